"""The simulator: months of faults in seconds, with the decisions of the live system (docs/simulation.md)."""
