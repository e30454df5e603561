"""One replica's decisions: each check of the protocol that is taken out is found, and no event comes out of place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exploration import explore, scenario
from interleavings import Bounds
from mutants import MUTANTS, Mutant

from unicron_elastic.base.world import Member, World
from unicron_elastic.engine.protocol.handle import handle
from unicron_elastic.engine.protocol.handle_by import ProtocolError
from unicron_elastic.engine.protocol.replica_command import AskAgent, Commit, Compute, HandOver, Say
from unicron_elastic.engine.protocol.replica_event import (
    AllSaid,
    Answered,
    CallBegun,
    Computed,
    Connected,
    Handed,
    HoldBegan,
    MoreAsked,
    Moved,
    Reduced,
    ReplicaEvent,
    StepBegun,
    StepMade,
    WorldHeard,
)
from unicron_elastic.engine.protocol.replica_phase import InMeeting, Replica, ReplicaPhase, Spot, Talk, Work
from unicron_elastic.engine.protocol.said import Said

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


NEWCOMER = "9+1"
PARTED_BEFORE = (  # a newcomer joins and is lost when rank 0 has come to its first end; nobody has met its world
    *(f"{rank}: {what}" for what in ("its script calls run.steps(1)", "its agent answers") for rank in (0, 1)),
    *("0: all have spoken", "1: all have spoken"),
    *("0: its group group is done in seat 0", "1: its group group is done in seat 0"),
    *(f"{rank}: its moved ('state', 0, (0, 1), True) is done in seat 0" for rank in (0, 1)),
    *("0: all have spoken", "0: its script begins step 0"),
    "a newcomer starts",
    *(f"{NEWCOMER}: {what}" for what in ("its script calls run.steps(1)", "its agent answers")),
    *(f"{NEWCOMER}: {what}" for what in ("it begins to copy the state of 0", "it has the state of 0")),
    *("0: it computes [0]", "1: all have spoken", "1: its script begins step 0", "1: it computes [1]"),
    *(f"{rank}: its reduced {what} is done in seat 0" for what in ("('sum', 0)", "('last', 0)") for rank in (0, 1)),
    *("0: its patience is over", "1: its patience is over"),
    *("0: its script has made all steps of its call", "1: its script has made all steps of its call"),
    "0: its gathered ('end', 1) is done in seat 0",
    *(f"{NEWCOMER} is lost", f"the agents notice that {NEWCOMER} is lost"),
    "1: its gathered ('end', 1) is done in seat 0",
    *("0: its script calls run.steps(2)", "1: its script calls run.steps(2)"),
    *("0: its script begins step 1", "1: its script begins step 1", "1: it hears of world 3"),
    *("0: it computes [0]", "1: it computes [1]"),
    *(f"{rank}: its reduced {what} is done in seat 0" for what in ("('sum', 0)", "('last', 0)") for rank in (0, 1)),
    *("0: its patience is over", "0: its script has made all steps of its call"),
    *("0: it learns that others have gone on", "0: it hears of world 3"),
)


def test_the_end_of_one_call_is_not_taken_for_that_of_the_next_in_the_same_world() -> None:
    bounds = Bounds(2, (1, 2), newcomers=1, grows=True, losses=1)
    told = scenario(bounds, list(PARTED_BEFORE))
    heard = next(at for at, line in enumerate(told) if "WorldHeard 3 [0, 1] rank=0 over=0 parted=1/1" in line)
    assert told[heard + 1].strip().startswith("Say in 3: state=2 until=2"), told[heard:]


BROKEN_OFF = (  # rank 1 has left the last barrier, which breaks for rank 0; the newcomer's world comes meanwhile
    *(f"{rank}: {what}" for rank in (0, 1) for what in ("its script calls run.steps(1)", "its agent answers")),
    *("0: all have spoken", "1: all have spoken"),
    *("0: its group group is done in seat 0", "1: its group group is done in seat 0"),
    *("a newcomer starts", f"{NEWCOMER}: its script calls run.steps(1)", f"{NEWCOMER}: its agent answers"),
    *(f"{rank}: its moved ('state', 0, (0, 1), True) is done in seat 0" for rank in (0, 1)),
    *("0: all have spoken", "0: its script begins step 0", "0: it computes [0]"),
    *("1: all have spoken", "1: its script begins step 0", "1: it computes [1]"),
    *(f"0: its reduced {what} is done in seat 0" for what in ("('sum', 0)", "('last', 0)")),
    *("0: its script has made all steps of its call", "0: it hears of world 2"),
    *(f"1: its reduced {what} is done in seat 0" for what in ("('sum', 0)", "('last', 0)")),
    *("1: its script has made all steps of its call", "1: its gathered ('end', 1) is done in seat 0"),
    *("connections of world 1 break", "0: what it does with others breaks", "0: it hears of world 3"),
    "0: it leaves this round",
)


def test_who_leaves_the_end_behind_others_tells_in_which_world_that_was_and_a_newcomer_since_is_not_needed() -> None:
    told = scenario(Bounds(2, (1,), breaks=1, newcomers=1, grows=True), list(BROKEN_OFF))
    left = next(at for at, line in enumerate(told) if "it leaves this round" in line)
    assert told[left + 2].strip().startswith("TellParted number=1 total=1"), told[left:]


def test_a_sum_that_is_handed_over_again_counts_no_more_until_it_is_there_nor_the_one_whose_size_it_tells() -> None:
    members = tuple(Member(name=str(rank), node="n", local_rank=rank) for rank in range(3))
    world = World(number=2, members=members, store="h:1")
    work = Work(held=frozenset({1}), done=frozenset({0, 1, 2}), holdings=tuple(frozenset({each}) for each in range(3)))
    meeting = InMeeting(Spot.WITHIN, Talk.ALL, has_state=True)
    replica = Replica(3, 4, record=meeting, until=1, work=work, heard=world, met=world, rank=1, is_connected=True)
    some = Said(state=0, until=1, held=frozenset({0}), done=frozenset({0, 1, 2}), buckets=4)
    said = (some, replace(some, held=frozenset({1})), replace(some, held=frozenset({2}), done=frozenset({0, 1})))
    replica, commands = _told(replica, AllSaid(said))
    assert commands == (HandOver(2, 0, None),)
    assert replica.work.done == {0, 1}
    assert _told(replica, Handed())[0].work.done == {0, 1, 2}
    whole, without = replace(some, done=frozenset({0, 1, 2, 3})), replace(some, done=frozenset({0, 1, 3}))
    replica = replica._replace(record=meeting, work=work._replace(done=whole.done))
    replica, commands = _told(replica, AllSaid((whole, replace(whole, held=frozenset({1})), without)))
    assert commands == (HandOver(2, 0, None),)
    assert replica.work.done == {0, 1}


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
        "    0: WorldHeard 1 [0] rank=0 over=0 parted=0/0",
        "    0: Answered is_member=True has_source=False where=None",
        "        Say in 1: state=None until=1 held=[] done=[]: the members of world 1 say where they are",
        "3. 0: all have spoken",
        "    0: AllSaid state=None until=1 held=[] done=[]",
        "        MakeGroup number=1 layout=None: all have spoken, and the world has no process group yet",
    ]
