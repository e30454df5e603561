"""The worlds of a job in place: how workers hear of them, and the snapshots they go on from."""
