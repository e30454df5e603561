"""How what torch does with tensors can be looked at, operation by operation. Imports torch."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["DispatchMode", "leaves"]


class DispatchMode(TorchDispatchMode):  # type: ignore[misc]
    """While a `DispatchMode` lasts, each operation goes through its ``__torch_dispatch__``, which nothing compiles."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import all of its compiler, for seconds, to keep it away from the function."""
        return False


def leaves(nested: Any) -> list[Any]:
    """Return all that lies in nested tuples, lists and dictionaries."""
    found: list[Any] = tree_leaves(nested)
    return found
