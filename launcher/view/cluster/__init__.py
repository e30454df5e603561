"""The cluster at one moment, as values and as text."""
