"""Gradient buckets as Megatron-Core's (0.16.1), of one parameter each, with an element for each micro-batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from replicas import Rank


def total(given: dict[int, Tensor]) -> Tensor:
    """Of what all have given."""
    return torch.stack(list(given.values())).sum(0)


class Bucket:
    def __init__(self, micro_batches: int) -> None:
        self.grad_data = torch.zeros(micro_batches + 1, dtype=torch.float64)


class BucketGroup:
    """As Megatron-Core's (0.16.1), of one bucket with one parameter."""

    def __init__(self, rank: Rank, number: int) -> None:
        self.rank, self.number = rank, number
        self.buckets = [Bucket(rank.job.case.micro_batches)]
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=rank.job.case.overlap, use_distributed_optimizer=False)
        self.golden: dict[str, int] = {}
        self.per_param_grad_ready_counts: dict[str, int] = {}
        self.is_first_batch = True
        self.grad_reduce_handle: Any = None
        self.param_gather_dispatched = False

    def reset(self) -> None:
        if self.is_first_batch and self.per_param_grad_ready_counts:
            self.golden, self.is_first_batch = self.per_param_grad_ready_counts, False
        self.per_param_grad_ready_counts = {}
        self.buckets[0].grad_data.zero_()

    def add(self, index: int, value: float, *, is_last: bool) -> None:
        self.buckets[0].grad_data[index] += value
        if self.number == 0:
            self.buckets[0].grad_data[-1] += value
        if self.ddp_config.overlap_grad_reduce and is_last:
            counts = self.per_param_grad_ready_counts
            counts["p"] = counts.get("p", 0) + 1
            if not self.is_first_batch and counts == self.golden:
                self.start_grad_sync(force_all_reduce=False)

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:  # noqa: ARG002
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return
        assert self.grad_reduce_handle is None, "two reductions of one bucket"
        rank, data = self.rank, self.buckets[0].grad_data
        work = rank.job.collective(rank, rank.column(), f"bucket {self.number}", data, total)
        if self.ddp_config.overlap_grad_reduce:
            self.grad_reduce_handle = SimpleNamespace(works=[work], wait=work.wait)
        else:
            work.wait()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if not self.ddp_config.overlap_grad_reduce:
            self.start_grad_sync(force_all_reduce=force_all_reduce)
            return
        if self.is_first_batch:
            self.start_grad_sync(force_all_reduce=force_all_reduce)
        assert self.grad_reduce_handle is not None
        self.grad_reduce_handle.wait()
        self.grad_reduce_handle = None
