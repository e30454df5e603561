"""The late back end gives what gloo does, later; and what reads too early, or goes on after an abort, is seen."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from unicron_elastic.engine.group import StableGroup
from unicron_elastic.engine.group.connect_inside import connect_inside
from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.testing.late import (
    Fate,
    LateInside,
    Lateness,
    StreamOrder,
    event_of,
    lateness,
    synchronize,
)

DEADLINE_S = 120.0
IMPOSSIBLE = ("without", "send and recv from any")  # with NCCL as well
# These fill nothing, on some ranks or on all; and what a functional collective gives is a copy of garbage or not.
NEVER_SEEN_LATE = {"barrier", "reduce", "gather", "send and recv", "functional all_reduce"}
NEVER_SEEN_LATE |= {"all_reduce, some ranks", "broadcast, some ranks"}


def test_each_operation_gives_what_gloo_does_where_the_stream_orders_it(collective: Any) -> None:
    assert collective("late", "operations", 3, "stream", *IMPOSSIBLE) == collective(
        "gloo", "operations", 3, *IMPOSSIBLE
    )


def test_each_operation_gives_garbage_first_and_then_what_gloo_does(collective: Any) -> None:
    found, expected = (collective(backend, "operations", 3, *IMPOSSIBLE) for backend in ("late", "gloo"))
    for late, prompt in zip(found, expected, strict=True):
        objects = {name for name in late if name.endswith("of objects")}  # which read at once
        assert any("UnpicklingError" in late[name].get("error", "") for name in objects)
        tensors = set(late) - objects
        assert {name: late[name].get("digest") for name in tensors} == {n: prompt[n]["digest"] for n in tensors}
        assert {name for name in tensors if not late[name]["is_late"]} <= NEVER_SEEN_LATE


@pytest.mark.parametrize("kind", ["ddp", "ddp with a hook", "fsdp2"])
def test_in_stream_order_training_has_the_bits_that_it_has_over_gloo(collective: Any, kind: str) -> None:
    assert collective("late", "train", 2, kind, "stream") == collective("gloo", "train", 2, kind)


@pytest.mark.parametrize("kind", ["ddp", "ddp with views", "ddp with a hook", "fsdp2"])
def test_an_abort_while_gradients_are_reduced_is_silent_and_garbage_is_stepped_with(collective: Any, kind: str) -> None:
    assert [each["has_nan"] for each in collective("late", "train", 2, kind, "stream", "abort")] == [True, True]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_torn_abort_leaves_each_rank_with_numbers_of_its_own_that_are_wrong(collective: Any, kind: str) -> None:
    torn, whole = collective("late", "train", 2, kind, "stream", "abort", "torn"), collective("gloo", "train", 2, kind)
    if kind == "ddp":  # what FSDP2 reduces into is new memory, in which anything may stand
        assert not any(each["has_nan"] for each in torn)
    assert torn[0]["digest"] != torn[1]["digest"]
    assert {each["digest"] for each in torn}.isdisjoint({each["digest"] for each in whole})


def inside() -> LateInside:
    return LateInside(HashStore(), 0, 1, timedelta(seconds=20))


@pytest.fixture
def group() -> Iterator[StableGroup]:
    made = StableGroup(0, 1)
    made.enter(inside(), rank=0, ranks=[0])
    yield made
    made.shutdown()


def test_an_event_tells_when_the_result_is_there(group: StableGroup) -> None:
    tensor = torch.ones(3)
    work = group.allreduce([tensor])
    assert work.wait()
    event = event_of(tensor)
    assert event is not None
    assert tensor.isnan().all()
    assert event.synchronize(DEADLINE_S)
    assert event.query()
    assert event.fate is Fate.LANDED
    assert work.is_success()
    assert tensor.tolist() == [1.0] * 3


def test_what_is_aborted_has_ended_and_was_no_success(group: StableGroup) -> None:
    tensor = torch.ones(3)
    group.abort()
    work = group.allreduce([tensor])
    event = event_of(tensor)
    assert event is not None
    assert event.synchronize(DEADLINE_S)
    assert work.is_completed()
    assert not work.is_success()
    assert event.fate is Fate.ABORTED
    assert not synchronize()


def test_the_collective_is_aborted_that_was_asked_for(group: StableGroup) -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    lateness.abort_in(2)
    for each in tensors:
        group.allreduce([each])
        with StreamOrder():
            each.sum()
    assert [bool(each.isnan().all()) for each in tensors] == [False, True]


def test_behind_the_stream_nothing_reads_too_early(group: StableGroup) -> None:
    tensor = torch.ones(3)
    group.allreduce([tensor])
    with StreamOrder():
        assert float(tensor.sum()) == 3.0
    assert event_of(tensor) is None


@pytest.fixture
def set_lateness() -> Iterator[Callable[..., None]]:
    """Set what all groups of this process mind, until the test has ended."""
    before = dataclasses.asdict(lateness)

    def put(**values: Any) -> None:
        for name, value in values.items():
            setattr(lateness, name, value)

    yield put
    put(**before)


def test_what_is_begun_in_another_world_lands_there(group: StableGroup, set_lateness: Callable[..., None]) -> None:
    lost, kept, second = torch.ones(3), torch.ones(3), inside()
    set_lateness(delay_s=2.0)
    before = group.allreduce([lost])
    former = group.enter(second, rank=0, ranks=[0], world=2)
    set_lateness(delay_s=0.02)
    with StreamOrder():
        group.allreduce([kept])
        assert float(kept.sum()) == 3.0
    assert lost.isnan().all()
    assert not before.is_success()
    assert former.is_aborted  # type: ignore[union-attr]


def test_a_making_that_blocks_is_left_to_itself(set_lateness: Callable[..., None]) -> None:
    set_lateness(init_s=4.0)
    began = time.monotonic()
    with pytest.raises(Superseded):
        connect_inside(LateInside, HashStore(), rank=0, size=1, timeout_s=20.0, is_left=lambda: True)
    assert time.monotonic() - began < 4.0
    for each in threading.enumerate():
        if each.name == "unicron-connect":
            each.join(DEADLINE_S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.bool, torch.uint8])
def test_garbage_is_seen_in_each_type(dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, dtype=dtype)
    Lateness().spoil(tensor)
    assert not torch.equal(tensor, torch.zeros(2, dtype=dtype))


def test_what_is_torn_has_the_sum_behind() -> None:
    tensor = torch.zeros(4)
    Lateness(is_torn=True).spoil(tensor)
    Lateness(is_torn=True).tear(tensor, torch.ones(4))
    assert tensor.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert not lateness.is_torn
