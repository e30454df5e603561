"""The names by which torch calls its collectives, on either side of a process group. Imports torch."""
