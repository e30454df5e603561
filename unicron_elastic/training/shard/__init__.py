"""Replicas of several processes, each with a shard of the model: how they are one in all that they do with others."""
