"""The plan between jobs as the coordinator carries it out in the store."""
