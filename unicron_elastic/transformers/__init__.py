"""transformers' Trainer goes on in place: ``unicron_elastic.transformers.patch()``, before its arguments are made."""

from unicron_elastic.transformers.patch import patch

__all__ = ["patch"]
