"""Whether tensors have changed while they were copied, though nobody has counted it.

torch counts what its operations change, but for what is done to ``parameter.data``, as where a script clips weights or
puts an average in their place; and other libraries count nothing. Digests of all numbers tell, at the price of reading
them three times; those of a sample cost next to nothing, and tell of what is done to whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from unicron_elastic.compat.tensors import local_of
from unicron_elastic.state.digest import digests
from unicron_elastic.state.snapshot.writer import Marks


class MarksOfNumbers:
    """`MarksOfNumbers` are digests of tensors as they are when this is made, beside ``others``.

    ``most``: of so many numbers of each tensor, spread over it; 0: of all.
    """

    def __init__(self, tensors: Iterable[Tensor], others: Marks | None, *, most: int = 0) -> None:
        self._tensors = [each for each in map(local_of, tensors) if each.layout is torch.strided]
        self._most = most
        self._others = others
        self._first = self._look()

    def have_changed(self) -> bool:
        """Return whether any has other numbers now."""
        return (self._others is not None and self._others.have_changed()) or self._look() != self._first

    def forget(self) -> None:
        """Let the script free the tensors."""
        if self._others is not None:
            self._others.forget()
        self._tensors, self._first = [], []

    def _look(self) -> list[int]:
        return digests(_samples(self._tensors, self._most) if self._most else [each.detach() for each in self._tensors])


def _samples(tensors: Iterable[Tensor], most: int) -> list[Tensor]:
    """Return about so many numbers of each tensor, 1-D, in as few tensors as there are kinds of them."""
    parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    with torch.no_grad():
        for each in tensors:
            stride = max(1, each.numel() // most)
            is_dense = torch.ops.aten.is_non_overlapping_and_dense(each)
            part = each.as_strided((each.numel() // stride,), (stride,)) if is_dense else each.flatten()[::stride]
            parts.setdefault((each.device, each.dtype), []).append(part)
        return [torch.cat(of_kind) for of_kind in parts.values()]
