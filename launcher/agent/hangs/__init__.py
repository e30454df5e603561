"""Hangs: who stands still, and what can be known of it before anything is done."""
