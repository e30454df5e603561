"""Whether tensors have changed while they were copied, though nobody has counted it.

torch counts what its operations change, but for what is done to ``parameter.data``, as where a script clips weights or
puts an average in their place; and other libraries count nothing. Digests of all numbers tell, at the price of reading
them three times.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from unicron_elastic.compat.tensors import local_of
from unicron_elastic.state.digest import digests
from unicron_elastic.state.snapshot.writer import Marks


class MarksOfNumbers:
    """`MarksOfNumbers` are digests of tensors as they are when this is made, beside ``others``."""

    def __init__(self, tensors: Iterable[Tensor], others: Marks | None) -> None:
        self._tensors = [each for each in map(local_of, tensors) if each.layout is torch.strided]
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
        return digests([each.detach() for each in self._tensors])
