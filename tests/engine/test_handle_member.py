"""One member's decisions: as golden scenarios, and in all interleavings within these bounds.

Every step that is applied has each micro-batch once, and what its replica shares; all divide by the same tokens and the
same norm; members of a collective do the same; nobody takes another state than the one agreed on; nobody says that the
state is lost while it is there, or after the end; and from every state all come to their end without one more fault.
"""

from __future__ import annotations

from dataclasses import replace

import member_interleavings
import pytest
from exploration import explore
from member_interleavings import MemberBounds
from member_mutants import MEMBER_MUTANTS, MemberMutant

from unicron_elastic.base.world import Member, World
from unicron_elastic.engine.protocol.handle_by import ProtocolError
from unicron_elastic.engine.protocol.handle_member import handle_member
from unicron_elastic.engine.protocol.member_command import Disconnect, MakeStep, SitOut
from unicron_elastic.engine.protocol.member_event import (
    Confirmed,
    NormFound,
    OthersEnded,
    StepAsked,
    SummedWithin,
    TokensCounted,
)
from unicron_elastic.engine.protocol.replica_agreement import MemberSaid
from unicron_elastic.engine.protocol.replica_command import LetGo, ReplicaCommand, Say
from unicron_elastic.engine.protocol.replica_event import (
    AllSaid,
    Answered,
    CallBegun,
    Computed,
    Connected,
    GroupBroke,
    MoreAsked,
    Reduced,
    ReplicaEvent,
    StepBegun,
    StepMade,
    WorldHeard,
)
from unicron_elastic.engine.protocol.replica_layout import ReplicaShape, first_layout
from unicron_elastic.engine.protocol.replica_member import Progress, ReplicaMember
from unicron_elastic.engine.protocol.replica_phase import Finished, ReplicaPhase, Standing

PAIR = ReplicaShape(tensor=1, pipeline=2)
FIRST = World(number=1, members=tuple(Member(name=str(r), node="n", local_rank=r) for r in range(4)), store="h:1")
SECOND = FIRST.after(store="h:1", reason="rank 3 is lost", lost=("3",))


def _new(rank: int = 0) -> ReplicaMember:
    """Return a member of two replicas of two, 0 with 2 and 1 with 3, before its script begins."""
    return ReplicaMember(
        shape=PAIR,
        seat=PAIR.seat_of(rank, 4)[0],
        micro_batches=4,
        layout=first_layout(PAIR, 4),
        rank=rank,
        replica=f"0/{rank % 2}",
    )


def _told(member: ReplicaMember, *events: ReplicaEvent) -> tuple[ReplicaMember, list[ReplicaCommand]]:
    commands: tuple[ReplicaCommand, ...] = ()
    for event in events:
        member, commands = handle_member(member, event)
        assert all(each.reason for each in commands)
    return member, list(commands)


def _trains(rank: int = 0) -> ReplicaMember:
    return _told(_new(rank), WorldHeard(FIRST, rank), CallBegun(2), Answered(is_member=True), StepBegun())[0]


def _names(commands: list[ReplicaCommand]) -> list[str]:
    return [type(each).__name__ for each in commands]


def test_a_step_from_its_first_micro_batch_to_the_optimizer() -> None:
    member, commands = _told(_trains(), Computed(0), Computed(2), MoreAsked())
    assert _names(commands) == ["CountTokens"]
    member, commands = _told(member, TokensCounted(400), Reduced(0), SummedWithin(), Confirmed())
    assert _names(commands) == ["Commit"]
    member, commands = _told(member, StepAsked())
    assert commands == [MakeStep(is_apart=False)]
    member, commands = _told(member, NormFound(1.5), StepMade())
    assert _names(commands) == ["Clear", "LetGo"]
    assert (member.step, member.work.norm, member.phase) == (1, 1.5, ReplicaPhase.STEPPING)


def test_who_enters_when_the_first_world_is_left_breaks_the_groups_of_the_script() -> None:
    """Others of its replica may be in their passes, which the new world does not end: they would wait for this one."""
    member, commands = _told(_new(2), WorldHeard(SECOND, 2), CallBegun(2), Answered(is_member=True))
    assert commands == [Disconnect(1), LetGo(is_over=False)]
    _, commands = _told(member, StepBegun())
    assert _names(commands) == ["Clear", "Restore", "Say"]


def test_passes_may_end_when_another_replica_is_lost_and_not_when_the_own_one_is() -> None:
    member = _trains(0)
    assert member.may_go_on(SECOND)
    assert not _trains(1).may_go_on(SECOND)
    assert not member.may_go_on(FIRST.after(store="h:1", reason="connections broke", anew=True))
    assert not _told(member, Computed(0), Computed(2), MoreAsked())[0].may_go_on(SECOND)


def test_passes_that_ended_in_a_world_that_is_left_are_kept_and_its_connections_broken_then() -> None:
    member, commands = _told(_trains(), WorldHeard(SECOND, 0), Computed(0), Computed(2), MoreAsked())
    assert _names(commands) == ["Disconnect", "Restore", "Say"]
    assert member.work.held == {0, 2}


def test_who_leaves_a_world_before_its_passes_breaks_its_connections_there() -> None:
    """As one that hears of a newcomer while it connects: others of its replica may be in their passes already."""
    member, commands = _told(_trains(0), GroupBroke("closed"), WorldHeard(SECOND, 0))
    own = commands[-1].said if isinstance(commands[-1], Say) else None
    other = MemberSaid(seat=1, replica="0/0", state=0, buckets=1)
    spare = MemberSaid(seat=0, replica="0/1", state=0, buckets=1)
    member, commands = _told(member, AllSaid((own, spare, other)))
    assert _names(commands) == ["MakeGroup"]
    third = SECOND.after(store="h:1", reason="rank 3 is back", joined=[Member(name="3+1", node="n", local_rank=3)])
    member, commands = _told(member, WorldHeard(third, 0), Connected())
    assert _names(commands) == ["NoteMeeting", "Disconnect", "Restore", "Say"]
    assert Disconnect(2) in commands


def test_passes_that_broke_leave_nothing() -> None:
    member, commands = _told(_trains(), GroupBroke("closed"))
    assert _names(commands) == ["TellBroke", "AwaitWorld"]
    assert member.work.progress is Progress.SPOILED
    member, commands = _told(member, WorldHeard(SECOND, 0))
    assert _names(commands) == ["Restore", "Drop", "Say"]
    assert isinstance(commands[-1], Say)
    assert commands[-1].said == MemberSaid(seat=0, replica="0/0", state=0, buckets=1)


def test_one_whose_replica_is_lost_sits_out_until_the_others_have_ended() -> None:
    member, commands = _told(_trains(1), GroupBroke("closed"), WorldHeard(SECOND, 1))
    said = replace(commands[-1].said, held=frozenset()) if isinstance(commands[-1], Say) else None
    others = [MemberSaid(seat=seat, replica="0/0", state=0, buckets=1, held=frozenset({0, 2})) for seat in (0, 1)]
    member, commands = _told(member, AllSaid((others[0], said, others[1])))
    assert _names(commands) == ["MakeGroup"]
    member, commands = _told(member, Connected())
    assert isinstance(commands[-1], SitOut)
    assert (member.phase, member.replica) == (ReplicaPhase.SPARE, None)
    member, commands = _told(member, OthersEnded())
    assert _names(commands) == ["TellParted", "EndProcess"]
    assert member.record == Finished(Standing.APART)


@pytest.mark.parametrize("event", [StepMade(), Reduced(0), CallBegun(3), Connected(), Computed(1)], ids=repr)
def test_an_event_that_cannot_be_is_refused(event: ReplicaEvent) -> None:
    with pytest.raises(ProtocolError):
        handle_member(_trains(), event)


SHORT = (
    MemberBounds(2, 1, losses=1, breaks=1),
    MemberBounds(2, 1, steps=2, losses=1, newcomers=1),
    MemberBounds(2, 1, steps=2, losses=1, newcomers=1, is_sharded=True),
    MemberBounds(1, 2, steps=2, breaks=1),
    MemberBounds(1, 2, steps=2, breaks=1, is_sharded=True, sums=True, evaluates=True),
    MemberBounds(2, 1, losses=1, buckets=2, sums=True, evaluates=True),
    MemberBounds(2, 1, steps=2, losses=1, is_sharded=True, sums=True, evaluates=True),
    MemberBounds(2, 1, enters=True, losses=1, hasty=True),
    MemberBounds(2, 2, losses=1, victims=(0,), first=6, window=3),
    MemberBounds(2, 2, losses=1, victims=(3,), first=18, window=3),
)
DEEP = (
    MemberBounds(2, 2, losses=1),
    MemberBounds(2, 2, losses=1, enters=True),
    MemberBounds(3, 1, losses=2),
    MemberBounds(3, 1, losses=1, newcomers=1),
    MemberBounds(3, 1, steps=2, losses=1, is_sharded=True, sums=True, evaluates=True),
    MemberBounds(2, 1, steps=3, losses=1, newcomers=1, is_sharded=True, sums=True, evaluates=True),
    MemberBounds(2, 1, steps=2, losses=2, newcomers=1),
    MemberBounds(1, 2, steps=2, breaks=2),
    *(MemberBounds(2, 2, losses=1, victims=(1,), first=first, window=4, is_sharded=True) for first in (2, 14, 26)),
    MemberBounds(2, 2, losses=1, newcomers=1, victims=(1,), first=10, window=1),
    MemberBounds(2, 2, steps=2, losses=1, newcomers=1, victims=(1,), first=18, window=1, evaluates=True),
)


def _check(bounds: MemberBounds, capsys: pytest.CaptureFixture[str]) -> None:
    found = explore(bounds, handle_member, model=member_interleavings)
    with capsys.disabled():
        print(f"\n{bounds}: {found}")
    assert found.is_whole
    assert not found.wrong
    assert found.ends


@pytest.mark.timeout(600)  # of a loaded machine; a few seconds of a processor
@pytest.mark.parametrize("bounds", SHORT, ids=str)
def test_no_interleaving_of_members_breaks_the_protocol(
    bounds: MemberBounds, capsys: pytest.CaptureFixture[str]
) -> None:
    _check(bounds, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bounds", DEEP, ids=str)
def test_no_interleaving_of_more_members_breaks_the_protocol(
    bounds: MemberBounds, capsys: pytest.CaptureFixture[str]
) -> None:
    _check(bounds, capsys)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "mutant",
    [pytest.param(each, marks=[pytest.mark.slow] if each.bounds.enters else []) for each in MEMBER_MUTANTS],
    ids=lambda mutant: mutant.what,
)
def test_each_check_of_a_member_that_is_taken_out_is_found(mutant: MemberMutant) -> None:
    found = explore(mutant.bounds, mutant.decide(), most_states=200_000, model=member_interleavings)
    assert found.wrong, f"{mutant.what}: not found in {found}"
    assert found.path
