"""Of one process of ours: its mark, what it ignores, what the kernel does for it, and what follows an import."""
