"""The live system's decisions in simulated time."""
