"""An agent of a cluster and its children, what is submitted to it, and the output that comes back."""
