"""What carries the collectives of a run: the process groups of its worlds, and waits that can be broken off."""
