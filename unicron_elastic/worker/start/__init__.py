"""Attaches the in-band parts to a worker, and forks workers from a process that has torch already."""
