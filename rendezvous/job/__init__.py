"""A node's part in one job: its presence, its rounds and the count of restarts."""
