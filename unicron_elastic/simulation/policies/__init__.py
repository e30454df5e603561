"""The policies that are compared, and what a fault costs under each."""
