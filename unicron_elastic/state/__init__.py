"""State that moves between replicas: from the nearest peer, from host memory, from storage last."""
