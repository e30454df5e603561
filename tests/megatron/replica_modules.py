"""What the product's modules find in the place of torch.distributed, Megatron-Core's groups and the agent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replica_buckets import total
from replica_jobs import Job
from replicas import FakeMeeting, Work, here
from torch import Tensor

from unicron_elastic.engine.protocol import handle_member
from unicron_elastic.engine.protocol.agreement import NoStateLeft
from unicron_elastic.engine.protocol.replica_agreement import MemberSaid, ReplicaAgreement, agree
from unicron_elastic.megatron import members, run

__all__ = ["install"]


class _Distributed:
    """Stands for the modules torch.distributed and megatron.core.parallel_state."""

    group = SimpleNamespace(WORLD=None)
    DistNetworkError = RuntimeError

    def get_rank(self) -> int:
        return int(here.rank.local_rank)

    def get_world_size(self) -> int:
        return int(here.rank.job.size)

    def is_initialized(self) -> bool:
        return here.rank.connection is not None

    def get_data_parallel_group(self, **_: Any) -> list[int]:
        found: list[int] = here.rank.column()
        return found

    def all_reduce(self, tensor: Tensor, *, async_op: bool) -> Work:
        assert async_op
        job: Job = here.rank.job
        return job.collective(here.rank, range(here.rank.connection.size), "all", tensor, total)

    def broadcast(self, tensor: Tensor, source: int, *, group: Sequence[int], async_op: bool) -> Work:
        assert async_op
        job: Job = here.rank.job
        tensor = tensor.clone() if here.rank.connection.rank == source else tensor  # which it only reads
        return job.collective(here.rank, group, f"from {source}", tensor, lambda given: given[source])

    def isend(self, tensor: Tensor, destination: int) -> Work:
        job: Job = here.rank.job
        return job.send(here.rank, tensor, destination)

    def irecv(self, tensor: Tensor, source: int) -> Work:
        job: Job = here.rank.job
        return job.receive(here.rank, tensor, source)


class _Waiter:
    """As Waiter; here all that breaks ends."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def begin(self) -> None:
        pass

    def wait(self, work: Work) -> None:
        work.wait()

    wait_one_to_one = wait

    def call(self, waits: Callable[[], object]) -> None:
        waits()

    def has_ended(self, work: Work, **_: Any) -> bool:
        with contextlib.suppress(RuntimeError):
            work.wait()
        return True


def _agree(said: Sequence[MemberSaid], **terms: Any) -> ReplicaAgreement:
    job: Job = here.rank.job
    try:
        found = agree(said, **terms)
    except NoStateLeft:
        job.check_lost(said)
        raise
    job.check_agreement(found)
    return found


def _give(_state: Any, exchange: Any, destinations: Sequence[int], _device: Any) -> None:
    for destination in destinations:
        for number in (here.rank.version, here.rank.parameters):
            exchange.send(torch.tensor([number]), destination)


def _receive(exchange: Any, source: int, _device: Any) -> tuple[list[int], int]:
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    for each in found:
        exchange.receive(each, source)
    return [int(each) for each in found], 0


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on the product's modules have ranks that are threads."""
    for name, value in {
        "dist": _Distributed(),
        "parallel_state": _Distributed(),
        "Meeting": FakeMeeting,
        "Waiter": _Waiter,
        "break_collectives": lambda *_, **__: here.rank.break_collectives(),
        "wait_let_go": lambda *_: None,
        "_is_of_connections": lambda error: "Connection closed" in str(error),
    }.items():
        monkeypatch.setattr(members, name, value)
    monkeypatch.setattr(handle_member, "agree", _agree)
    monkeypatch.setattr(run, "give_state", _give)
    monkeypatch.setattr(run, "receive_state", _receive)
    monkeypatch.setattr(run, "made_before", lambda _steps: None)
