"""Processes: workers, the warm process they are forked from, and the supervisor that clears away."""
