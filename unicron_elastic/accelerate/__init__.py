"""Accelerate goes on in place."""
