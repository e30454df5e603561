"""Words that every room shares: faults and incidents as values, the world, one-line text, seals, checks of input."""
