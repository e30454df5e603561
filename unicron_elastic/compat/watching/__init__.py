"""What of torch is watched: who is told of it, and how."""
