"""Which job gets how many workers: throughput, the value of an allocation, the plan. Pure code."""
