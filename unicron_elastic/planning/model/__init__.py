"""What a job achieves on a number of nodes, measured where it was measured and modelled elsewhere. Pure."""
