"""One replica's decisions: each check of the protocol that is taken out is found, and no event comes out of place."""

from __future__ import annotations

import pytest
from exploration import explore, scenario
from interleavings import Bounds
from mutants import MUTANTS, Mutant

from unicron_elastic.base.world import Member, World
from unicron_elastic.engine.protocol.handle import ProtocolError, handle
from unicron_elastic.engine.protocol.replica_command import AskAgent, Commit, Compute, Raise, Say
from unicron_elastic.engine.protocol.replica_event import (
    AllSaid,
    Answered,
    CallBegun,
    Computed,
    Connected,
    HoldBegan,
    MoreAsked,
    Moved,
    Reduced,
    ReplicaEvent,
    ScriptRaised,
    StepBegun,
    StepMade,
    WorldHeard,
)
from unicron_elastic.engine.protocol.replica_phase import Replica, ReplicaPhase

ALONE = World(number=1, members=(Member(name="0", node="n", local_rank=0),), store="h:1")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_each_check_that_is_taken_out_is_found(mutant: Mutant) -> None:
    found = explore(mutant.bounds, mutant.decide(), most_states=60_000)
    assert found.wrong, f"{mutant.what}: not found in {found}"
    assert found.path


def test_there_are_many_mutants() -> None:
    assert len({mutant.what for mutant in MUTANTS}) == len(MUTANTS) >= 15


def _told(replica: Replica, *events: ReplicaEvent) -> tuple[Replica, tuple[object, ...]]:
    commands: tuple[object, ...] = ()
    for event in events:
        replica, commands = handle(replica, event)
    return replica, commands


def _computing() -> Replica:
    """Return a replica that is alone, in its first step."""
    replica, commands = _told(Replica(micro_batches=2, buckets=2), WorldHeard(ALONE, 0), CallBegun(2))
    assert [type(each) for each in commands] == [AskAgent]
    replica, (say,) = _told(replica, Answered(is_member=True))
    assert isinstance(say, Say)
    replica, commands = _told(replica, AllSaid((say.said,)), Connected(), Moved())
    assert isinstance(commands[-1], Say)
    return _told(replica, AllSaid((commands[-1].said,)), StepBegun())[0]


def test_one_that_is_alone_computes_all_and_commits() -> None:
    replica = _computing()
    assert replica.phase is ReplicaPhase.COMPUTING
    replica, commands = _told(replica, Computed(0), Computed(1), MoreAsked(), Reduced(0), Reduced(1))
    assert commands == (Commit(0),)
    assert replica.phase is ReplicaPhase.STEPPING
    replica, commands = _told(replica, StepMade(), StepBegun())
    assert replica.step == 1
    assert commands[-1] == Compute((0, 1))


def test_the_state_may_be_copied_from_the_first_micro_batch_to_the_first_reduction() -> None:
    replica = _computing()
    assert replica.may_be_copied
    replica, _ = _told(replica, HoldBegan(), Computed(0), Computed(1), MoreAsked())
    assert not replica.may_be_copied
    with pytest.raises(ProtocolError, match="nobody may begin to copy the state of one that is reducing"):
        handle(replica, HoldBegan())


def test_an_exception_in_a_micro_batch_ends_the_replica() -> None:
    replica, (command,) = _told(_computing(), ScriptRaised(0))
    assert replica.phase is ReplicaPhase.ENDED
    assert isinstance(command, Raise)
    assert "not whole" in command.reason


@pytest.mark.parametrize("event", [StepMade(), Reduced(0), CallBegun(3), Connected(), Computed(5)], ids=repr)
def test_an_event_that_cannot_be_is_refused(event: ReplicaEvent) -> None:
    with pytest.raises(ProtocolError):
        handle(_computing(), event)


def test_each_command_has_a_reason_and_a_path_is_told_as_a_scenario() -> None:
    path = ["0: its script calls run.steps(1)", "0: its agent answers", "0: all have spoken"]
    lines = scenario(Bounds(1, (1,)), path)
    assert lines == [
        "1. 0: its script calls run.steps(1)",
        "    0: CallBegun until=1",
        "        AskAgent is_again=False: the script begins to train",
        "2. 0: its agent answers",
        "    0: WorldHeard 1 [0] rank=0 over=0 parted=0",
        "    0: Answered is_member=True has_source=False where=None",
        "        Say in 1: state=None until=1 held=[] done=[]: the members of world 1 say where they are",
        "3. 0: all have spoken",
        "    0: AllSaid state=None until=1 held=[] done=[]",
        "        MakeGroup number=1: all have spoken, and the world has no process group yet",
    ]
