"""Who is missing from a new world: the others wait there, in no collective, and a newcomer among them has no steps."""

from __future__ import annotations

from typing import Any

import pytest

from unicron_elastic.detection.evidence import hang_kind, suspects
from unicron_elastic.detection.sample import MEET, SPARE, GroupPosition, RankSample, RemoteRank, Sample
from unicron_elastic.detection.state import PaceState
from unicron_elastic.detection.telling import Hung, Verdict, Waiting
from unicron_elastic.detection.watch import forget, next_look_at, observe
from unicron_elastic.faults import HangKind

STEP_S = 0.5
STEPS = 40
MISSING = "missing from the new world, in which the others wait"


def rank(number: int, **known: Any) -> RankSample:
    idle = {"step": STEPS, "cpu_time_s": 1.0, "runnable": False, "in_io": False, "collective": 12, "waiting": False}
    return RankSample(rank=number, **(idle | known))


def meets(number: int, **known: Any) -> RankSample:
    return rank(number, **({"phase": MEET, "collective": None, "waiting": None} | known))


def newcomer(number: int, **known: Any) -> RankSample:
    return meets(number, **({"step": 0} | known))


def calls(number: int) -> RankSample:
    """It is in a collective, not only by the recorder's word."""
    return rank(number, waiting=True, groups=(GroupPosition(name="0", begun=12, ended=11, op="all_reduce"),))


@pytest.mark.parametrize(
    ("ranks", "standing", "named", "clause"),
    [
        ([newcomer(0), rank(1)], {1}, (1,), MISSING),
        ([newcomer(0), rank(1)], {0}, (1,), MISSING),  # who waits is not to blame, however long it has
        ([newcomer(0), rank(1)], {0, 1}, (1,), MISSING),
        ([meets(0), rank(1), rank(2)], {1, 2}, (1, 2), MISSING),
        # Rank 2 does not know yet that its collective has broken.
        (
            [meets(0), rank(1), rank(2, waiting=True)],
            {1, 2},
            (1,),
            "outside the collective in which the others wait",
        ),
        # They have not left a broken collective, or have gone on to the next one.
        ([meets(0), calls(1), calls(2)], {1, 2}, (0, 1, 2), ""),
        ([newcomer(0), rank(1, waiting=True)], {1}, (1,), MISSING),
        ([meets(0), rank(1), rank(2, silent=True)], {1, 2}, (2,), "without an answer while others answer"),
        ([meets(0, stopped=True), rank(1)], {0, 1}, (0,), "stopped by a signal"),
        ([newcomer(0, stopped=True), meets(1)], {0, 1}, (0,), "stopped by a signal"),
        ([newcomer(0), meets(1)], {0, 1}, (0, 1), ""),
        ([newcomer(0), meets(1, silent=True)], {0, 1}, (1,), "without an answer while others answer"),
        ([meets(0), rank(1, phase=SPARE)], {0}, (1,), MISSING),
        ([rank(0), rank(1, phase=SPARE, stopped=True)], {1}, (1,), "stopped by a signal"),
        ([rank(0, step=1), rank(1, phase=SPARE)], {1}, (1,), ""),
        # A parameter server makes no steps, and is in no group.
        (
            [rank(0, waiting=True), rank(1), rank(2, step=0, collective=None, waiting=None)],
            {0, 1},
            (1,),
            "outside the collective in which the others wait",
        ),
        # A newcomer that computes its first step, for which the others wait.
        (
            [newcomer(0, phase="train", collective=13, waiting=False), rank(1, collective=13, waiting=True)],
            {1},
            (0,),
            "outside the collective in which the others wait",
        ),
    ],
)
def test_whoever_has_not_come_is_named(
    ranks: list[RankSample], standing: set[int], named: tuple[int, ...], clause: str
) -> None:
    found = suspects(tuple(ranks), frozenset(standing))
    assert (found.ranks, found.clause) == (named, clause)


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        ((newcomer(0), rank(1)), HangKind.AWAITED),
        ((rank(0), rank(1)), HangKind.UNCLEAR),
        # What the recorder tells of a group that is no more does not make it a deadlock.
        ((meets(0, collective=12, waiting=True), rank(1, waiting=True)), HangKind.AWAITED),
    ],
)
def test_who_meets_waits_for_the_others(ranks: tuple[RankSample, ...], kind: HangKind) -> None:
    assert hang_kind(ranks, (1,), True) is kind


def settled(*numbers: int, whole_job: bool = True) -> tuple[PaceState, float]:
    """After STEPS steps of the ranks that are watched here."""
    state, at = PaceState(whole_job=whole_job, asks_remote_ranks=not whole_job), 0.0
    for step in range(1, STEPS + 1):
        at = step * STEP_S
        ranks = tuple(rank(number, step=step, step_at=at, step_time_s=STEP_S, cpu_time_s=at) for number in numbers)
        state, verdicts = observe(state, Sample(at=at + 0.01, ranks=ranks))
        assert verdicts == []
    return forget(state), at  # a new world has come


def watched(
    state: PaceState, at: float, until: float, *here: RankSample, remote_ranks: tuple[RemoteRank, ...] = ()
) -> list[Verdict]:
    """What is said of ranks that stay as they are."""
    said: list[Verdict] = []
    while at < until:
        at = max(at + 0.01, next_look_at(state))
        state, verdicts = observe(state, Sample(at=at, ranks=here, remote_ranks=remote_ranks))
        said += verdicts
    return said


def test_who_stands_while_a_newcomer_waits_for_it_hangs_and_the_newcomer_does_not() -> None:
    state, at = settled(0, 1)
    waits = newcomer(0, phase_since=at + 5.0)
    (verdict,) = watched(state, at + 5.0, at + 700.0, waits, rank(1, step_at=at, step_time_s=STEP_S))
    assert isinstance(verdict, Hung)
    assert (verdict.ranks, verdict.kind) == ((1,), HangKind.AWAITED)
    assert verdict.reason.startswith("rank 1 hangs: no step for ")
    assert verdict.reason.endswith(f"; {MISSING}, it is not at work.")
    assert verdict.at - at < 70.0


def test_a_newcomer_on_another_node_waits_all_the_same() -> None:
    state, at = settled(1, whole_job=False)
    waits = RemoteRank(node="node-b", seen=newcomer(0), working="")
    (verdict,) = watched(state, at, at + 700.0, rank(1, step_at=at, step_time_s=STEP_S), remote_ranks=(waits,))
    assert isinstance(verdict, Hung)
    assert (verdict.ranks, verdict.kind) == ((1,), HangKind.AWAITED)


def test_the_node_of_the_newcomer_names_who_is_missing_elsewhere() -> None:
    state, at = settled(0, whole_job=False)
    missing = RemoteRank(node="node-b", seen=rank(1), working="")
    said = watched(state, at, at + 700.0, meets(0, step_at=at, phase_since=at), remote_ranks=(missing,))
    assert [type(verdict) for verdict in said] == [Waiting]
    assert said[0].reason.startswith("rank 0 waits for rank 1 on node-b: no step for ")


def test_while_nothing_is_known_of_other_nodes_nobody_is_named_who_meets() -> None:
    state, at = settled(0, whole_job=False)
    said = watched(state, at, at + 700.0, meets(0, step_at=at, phase_since=at))
    assert [type(verdict) for verdict in said] == [Waiting]
    assert said[0].missing == ()


def test_a_meeting_may_take_a_minute_however_short_the_others_were() -> None:
    state, at = settled(0, 1)
    for number in range(1, 4):  # meetings of a tenth of a second
        at += 1.0
        for phase in (MEET, "train"):
            ranks = tuple(rank(each, step=STEPS + number, step_at=at, phase=phase, phase_since=at) for each in (0, 1))
            state, _ = observe(state, Sample(at=at, ranks=ranks))
            at += 0.1
    assert state.habits.longest_s(MEET) is None
    said = watched(state, at, at + 55.0, *(meets(each, step_at=at, phase_since=at) for each in (0, 1)))
    assert said == []


def test_who_is_at_work_is_waited_for() -> None:
    state, at = settled(0, 1)
    begin, said = at + 5.0, list[Verdict]()
    while at < begin + 150.0:
        at = max(at + 0.01, next_look_at(state))
        busy = rank(1, step_at=begin - 5.0, step_time_s=STEP_S, cpu_time_s=at, runnable=True)
        state, verdicts = observe(state, Sample(at=at, ranks=(newcomer(0, phase_since=begin), busy)))
        said += verdicts
    assert said == []
