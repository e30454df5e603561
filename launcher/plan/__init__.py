"""The plan between jobs, as people see it and ask what would be."""
