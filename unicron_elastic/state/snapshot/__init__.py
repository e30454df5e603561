"""Snapshots in memory that outlive the worker which wrote them, and their copies on other nodes."""
