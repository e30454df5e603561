"""Hangs: who stands, what can be known of it before anything is done, and what other nodes see."""
