"""A node's part in the cluster: its presence, heartbeats, links to others."""
