"""States in storage, as torch.distributed.checkpoint writes them."""
