"""Gloo's back end by itself, with all collectives that torch's process groups have. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroupGloo, ReduceScatterOptions, Store, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from unicron_elastic.compat.collectives.python_group import COLLECTIVES, Together

__all__ = ["MIND_NO_TIME_OUT", "GlooBackend"]

# A wait for one of these has no time-out (reduce-scatters, torch 2.13), or the connection ends when it is over.
MIND_NO_TIME_OUT = frozenset(
    ["reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "send", "recv", "recv_anysource"]
)


class GlooBackend(ProcessGroupGloo):  # type: ignore[misc]
    """A `GlooBackend` has the names of ``COLLECTIVES``, also for those that gloo has in C++ only."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self._store = store  # torch keeps what it has of it in C++ only

    def call_itself(self, name: str, ranks: Sequence[int]) -> None:
        """Have its collectives recorded under the name of a group, of these ranks of the whole job."""
        self.options.group_name = name
        self.options.global_ranks_in_group = list(ranks)

    def sequence_number(self) -> int:
        """Return how many collectives were begun."""
        return int(self._get_sequence_number_for_group())

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """Gather into one tensor."""
        return _all_gather(self, output, tensor, AllgatherOptions() if opts is None else opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """Sum, and keep a part."""
        return _reduce_scatter(self, output, tensor, ReduceScatterOptions() if opts is None else opts)

    def all_to_all_single(self, output: Tensor, tensor: Tensor, counts: Any, given: Any, opts: Any = None) -> Work:
        """Exchange parts of a tensor."""
        return _all_to_all(self, output, tensor, counts, given, AllToAllOptions() if opts is None else opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Gather several, into one tensor each."""
        return Together([self.all_gather_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Sum several, and keep a part of each."""
        return Together([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)])


def _own(name: str) -> Callable[..., Work]:
    """Return gloo's own, which this torch has under one of the names."""
    names = (name, *COLLECTIVES[name])
    found: Callable[..., Work] = next(getattr(ProcessGroupGloo, n) for n in names if hasattr(ProcessGroupGloo, n))
    return found


_all_gather, _reduce_scatter = _own("all_gather_single"), _own("reduce_scatter_single")
_all_to_all = _own("all_to_all_single")
