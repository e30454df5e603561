"""What happens inside one step: micro-batches, gradients, buffers, random numbers."""
