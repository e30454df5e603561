"""Whether tensors have changed while they were copied, though nobody has counted it.

torch counts what its operations change, but for what is done to ``parameter.data``, as where a script clips weights or
puts an average in their place; and other libraries count nothing. Digests of all numbers tell, at the price of reading
them three times; those of a sample cost some 10 µs a tensor, and tell of what is done to the whole of one.
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
        self._whole = [each.detach() for each in map(local_of, tensors) if each.layout is torch.strided]
        self._samples: list[list[Tensor]] = []  # each of one kind: it is looked at three times, and made once
        if most:
            self._whole, self._samples = _sampled(self._whole, most)
        self._others = others
        self._first = self._look()

    def have_changed(self) -> bool:
        """Return whether any has other numbers now."""
        return (self._others is not None and self._others.have_changed()) or self._look() != self._first

    def forget(self) -> None:
        """Let the script free the tensors."""
        if self._others is not None:
            self._others.forget()
        self._whole, self._samples, self._first = [], [], []

    def _look(self) -> list[int]:
        return digests([*self._whole, *map(torch.cat, self._samples)])


def _sampled(tensors: Iterable[Tensor], most: int) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return those with gaps in their memory, and of all others views of about so many numbers, by their kind."""
    gaps: list[Tensor] = []
    views: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in tensors:
        if each.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(each):
            stride = max(1, each.numel() // most)
            view = each.as_strided((each.numel() // stride,), (stride,))
            views.setdefault((each.device, each.dtype), []).append(view)
        else:
            gaps.append(each)
    return gaps, list(views.values())
