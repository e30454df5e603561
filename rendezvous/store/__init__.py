"""The store in which the cluster keeps its truth: the interface, etcd behind it, and one session of a node."""
