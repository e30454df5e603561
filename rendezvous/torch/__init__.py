"""torch's rendezvous interface over all of this, and handlers for jobs of one node."""
