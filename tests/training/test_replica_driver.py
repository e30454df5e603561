"""Who copies the state begins when all that was decided at once is done, and is counted before anything is decided."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from unicron_elastic.base.world import Member, World
from unicron_elastic.engine.protocol.replica_command import (
    AskAgent,
    Clear,
    Compute,
    MakeGroup,
    MoveState,
    Reduce,
    ReplicaCommand,
    Say,
)
from unicron_elastic.engine.protocol.replica_event import (
    AllSaid,
    Answered,
    CallBegun,
    Computed,
    Connected,
    MoreAsked,
    Moved,
    Reduced,
    StepBegun,
)
from unicron_elastic.training.replica_driver import ReplicaDriver, Result
from unicron_elastic.training.snapshot.gate import StateGate


class Alone:
    """`Alone` is the membership of a process in a world of its own, and does what its driver is told to."""

    def __init__(self) -> None:
        self.gate = StateGate()
        self.driver = ReplicaDriver(self, self.gate, self.act)  # type: ignore[arg-type]
        self.driver.begin(1)
        self.driver.lay_out(2)
        self.number = 1
        self.copies_at: type[ReplicaCommand] | None = None  # until then somebody copies the state
        self.seen: list[tuple[str, bool]] = []  # each command, and whether the state could be copied then
        self.awaited: list[bool] = []

    def newer_than(self, number: int) -> tuple[World, int] | None:
        members = (Member(name="0", node="n", local_rank=0),)
        world = World(number=self.number, members=members, store="h:1")
        return (world, 0) if self.number > number else None

    def act(self, command: ReplicaCommand) -> Iterable[Result]:
        try:
            self.gate.hold(0)
            self.gate.release()
            is_open = True
        except TimeoutError:
            is_open = False
        self.seen.append((type(command).__name__, is_open))
        if self.copies_at is type(command):
            self.copies_at = None
            self.gate.release()
        match command:
            case AskAgent():
                return [Answered(is_member=True)]
            case Say(said=said):
                return [AllSaid((said,))]
            case MakeGroup():
                return [Connected()]
            case MoveState():
                return [Moved()]
            case Reduce(buckets=buckets, is_awaited=is_awaited):
                self.awaited.append(is_awaited)
                return [Reduced(bucket) for bucket in buckets]
        return ()


def _in_first_step() -> Alone:
    alone = Alone()
    alone.driver.post(CallBegun(2))
    alone.seen.clear()
    assert alone.driver.post(StepBegun()) == Compute((0,))
    return alone


def test_nobody_begins_to_copy_before_the_step_is_cleared() -> None:
    alone = _in_first_step()
    assert alone.seen == [(Clear.__name__, False)]
    assert alone.gate.hold(0) == 0


def test_who_copies_is_counted_before_the_reduction_begins_and_nobody_begins_to_in_it() -> None:
    alone = _in_first_step()
    alone.driver.post(Computed(0))
    alone.gate.hold(0)
    alone.seen.clear()
    alone.copies_at = Reduce
    alone.driver.post(MoreAsked())
    assert alone.awaited == [True]
    assert ("Reduce", False) in alone.seen
    with pytest.raises(TimeoutError):
        alone.gate.hold(0)
