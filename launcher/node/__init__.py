"""``unicron agent``: a node of the cluster, its children, its orders, and their output."""
