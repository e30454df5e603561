"""Keeps the training state where it survives the worker."""
