"""Prints the reference of all metrics, as docs/metrics.md has it."""

from unicron_elastic.metrics.definitions import reference

if __name__ == "__main__":
    print(reference(), end="")
