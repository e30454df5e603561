"""Tier 1 and 2: the run, its steps and micro-batches, gradient reduction that survives the loss of ranks."""
