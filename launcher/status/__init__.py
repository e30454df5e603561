"""``unicron status``: what is read of the cluster, what is found of it, and how a terminal shows it."""
