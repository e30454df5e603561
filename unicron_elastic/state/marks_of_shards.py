"""Whether tensors of which each rank has a part have changed while they were copied.

torch counts the changes of a DTensor and those of its part apart, and neither counts what an operation on many tensors
at once, as ``torch._foreach_mul_``, does to the part. So some of its numbers are looked at as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor

from unicron_elastic.compat.tensors import changes_by_operations, changes_of, local_of
from unicron_elastic.state.exact import bits

_SAMPLES = 64  # of each tensor, if nobody says how many
_Look: TypeAlias = tuple[list[tuple[int, int]], dict[tuple[torch.device, torch.dtype], Tensor]]


class MarksOfShards:
    """`MarksOfShards` are those of some DTensors, or of their parts, as they are when this is made.

    ``samples``: how many numbers of each are looked at.
    """

    def __init__(self, tensors: Iterable[Tensor], samples: int = _SAMPLES) -> None:
        self._tensors = list(tensors)
        self._samples = samples
        self._first = self._look()

    def have_changed(self) -> bool:
        """Return whether they are others now."""
        (counts, samples), (counts_now, samples_now) = self._first, self._look()
        return counts != counts_now or any(not torch.equal(each, samples_now[key]) for key, each in samples.items())

    def forget(self) -> None:
        """Let the script free the tensors."""
        self._tensors = []
        self._first = self._look()

    def _look(self) -> _Look:
        samples = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
        for each in self._tensors:
            local = local_of(each).detach()
            if local.numel() and local.layout is torch.strided:
                flat = bits(torch.atleast_1d(local)).reshape(-1)
                samples[local.device, flat.dtype].append(flat[:: max(1, flat.numel() // self._samples)])
        counts = [(changes_by_operations(each), changes_of(each)) for each in self._tensors]
        return counts, {key: torch.cat(found) for key, found in samples.items()}
