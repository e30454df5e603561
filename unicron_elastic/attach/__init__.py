"""Tier 1 for scripts that import nothing of ours: their trainers keep state in memory, and go on from it."""
