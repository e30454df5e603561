"""The batches of a data loader by number, in the order of its own sampler."""
