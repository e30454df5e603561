"""Gloo's back end by itself, with all collectives that torch's process groups have. Imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, ProcessGroup, ProcessGroupGloo, ReduceScatterOptions, Store, Work
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions

from unicron_elastic.compat.collectives.python_group import COLLECTIVES, Together

__all__ = ["MIND_NO_TIME_OUT", "AllgatherOptions", "GlooBackend"]

# A wait for one of these has no time-out (the list's reduce-scatter, torch 2.13), or ends the connection with it.
MIND_NO_TIME_OUT = frozenset(["reduce_scatter", "send", "recv", "recv_anysource"])


class GlooBackend(ProcessGroupGloo):  # type: ignore[misc]
    """A `GlooBackend` has the names of ``COLLECTIVES``, also for those that gloo has in C++ only.

    Gloo's own reduce-scatter (torch 2.13) is a sum of all, of which each rank keeps its part, and its wait has no
    time-out. Here it is the same sum, with the same bits, and its wait has one.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self._store = store  # torch keeps what it has of it in C++ only

    def call_itself(self, name: str, ranks: Sequence[int]) -> None:
        """Have its collectives recorded under the name of a group, of these ranks of the whole job."""
        self.options.group_name = name
        self.options.global_ranks_in_group = list(ranks)
        front = ProcessGroup(self.rank(), self.size())  # torch tells a back end its name in this way only
        front._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self)
        front._set_group_name(name)

    def sequence_number(self) -> int:
        """Return how many collectives were begun."""
        return int(self._get_sequence_number_for_group())

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """Gather into one tensor."""
        return _all_gather(self, output, tensor, AllgatherOptions() if opts is None else opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions | None = None) -> Work:
        """Sum, and keep a part."""
        if output.numel() * self.size() != tensor.numel() or output.dtype != tensor.dtype:
            raise ValueError(f"a part of {_said(tensor)} among {self.size()} ranks cannot become {_said(output)}")
        total, options = tensor.clone(memory_format=torch.contiguous_format), AllreduceOptions()
        if opts is not None:
            options.reduceOp, options.timeout = opts.reduceOp, opts.timeout
        return Kept(self.allreduce([total], options), output, total.view(self.size(), -1)[self.rank()])

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


class Kept(Work):  # type: ignore[misc]
    """A `Kept` is a sum of which a rank keeps its part."""

    def __init__(self, work: Work, output: Tensor, part: Tensor) -> None:
        super().__init__()
        self._work = work
        self._output: Tensor | None = output
        self._part = part

    def wait(self, *timeout: Any) -> bool:
        """Wait for the sum, and keep the part. Raises what the sum raises."""
        self._work.wait(*timeout)
        output, self._output = self._output, None
        if output is not None:
            output.detach().copy_(self._part.view_as(output))
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended; if it has well, the part is there."""
        if not self._work.is_completed():
            return False
        with contextlib.suppress(RuntimeError):  # it has ended badly, and says so to who waits
            self.wait()
        return True

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return bool(self._work.is_success())


def _said(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} of {tensor.dtype}"


def _own(name: str) -> Callable[..., Work]:
    """Return gloo's own, which this torch has under one of the names."""
    names = (name, *COLLECTIVES[name])
    found: Callable[..., Work] = next(getattr(ProcessGroupGloo, n) for n in names if hasattr(ProcessGroupGloo, n))
    return found


_all_gather, _all_to_all = _own("all_gather_single"), _own("all_to_all_single")
