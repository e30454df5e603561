"""A keeper and its warm process, held once their job has ended for the next launch of the same script."""
