"""One job on one node."""
