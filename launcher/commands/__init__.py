"""The commands of ``unicron``."""
