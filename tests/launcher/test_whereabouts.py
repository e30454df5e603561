"""Answers about process groups, and what follows from one that does not come."""

from __future__ import annotations

import pytest

from unicron_elastic.detection.sample import GroupPosition
from unicron_elastic.launcher.agent.process.whereabouts import (
    ANSWER_DEADLINE_S,
    ARRIVALS_MAX,
    LIMITS_MAX,
    Whereabouts,
    arrivals_of,
    groups_of,
    limits_of,
)
from unicron_elastic.worker.notices import GroupCounts, LatestCollectives, Position, SectionLimits

WORLD = GroupPosition(name="0", begun=12, ended=11)
LATE = 10.0 + 2 * ANSWER_DEADLINE_S


def test_nothing_is_known_at_first() -> None:
    where = Whereabouts()
    assert not where.is_silent(1e9)
    assert where.begun(1e9) is None
    assert where.is_waiting(1e9) is None


def test_an_answer_has_its_time() -> None:
    where = Whereabouts().asked(10.0)
    assert (where.questions, where.asked_at) == (1, 10.0)
    assert not where.is_silent(10.0)
    assert where.is_silent(LATE)
    answered = where.answered((WORLD,))
    assert not answered.is_silent(LATE)
    assert (answered.begun(LATE), answered.is_waiting(LATE)) == (12, True)


def test_while_it_is_waited_for_the_last_answer_holds_and_then_nothing_does() -> None:
    where = Whereabouts().asked(9.0).answered((WORLD,)).asked(10.0)
    assert (where.begun(10.0), where.is_waiting(10.0)) == (12, True)
    assert where.is_silent(LATE)
    assert (where.begun(LATE), where.is_waiting(LATE)) == (None, None)


def test_what_is_forgotten_is_not_known_but_stays_owed() -> None:
    where = Whereabouts().asked(9.0).answered((WORLD,)).asked(10.0).forgotten()
    assert where.begun(10.0) is None
    assert where.is_waiting(10.0) is None
    assert where.is_silent(LATE)
    assert where.questions == 2


@pytest.mark.parametrize(
    ("groups", "waiting"),
    [
        ([(5, 5)], False),
        ([(5, 4)], True),
        ([(5, None)], None),
        ([(5, 5), (7, 6)], True),  # in any group
        ([(5, 5), (7, None)], None),
        ([(0, 0)], False),
    ],
)
def test_who_has_begun_what_has_not_ended_waits(groups: list[tuple[int, int | None]], waiting: bool | None) -> None:
    positions = tuple(GroupPosition(name="", begun=begun, ended=ended) for begun, ended in groups)
    where = Whereabouts().asked(10.0).answered(positions)
    assert where.is_waiting(10.0) is waiting
    assert where.begun(10.0) == groups[0][0]


def test_the_answer_of_a_worker_without_groups_is_one() -> None:
    where = Whereabouts().asked(10.0).answered((), uses_gpu=True)
    assert not where.is_silent(LATE)
    assert (where.begun(LATE), where.is_waiting(LATE), where.uses_gpu) == (None, None, True)


def position(*groups: GroupCounts) -> Position:
    return Position(question=1, groups=groups, uses_gpu=False, is_at_prompt=False)


def test_an_answer_is_read() -> None:
    said = position(GroupCounts(name="0", begun=12, ended=11), GroupCounts(name="x", begun=3, ended=None))
    assert groups_of(said) == (WORLD, GroupPosition(name="x", begun=3, ended=None))
    assert groups_of(position()) == ()


def test_the_operation_is_read_if_it_is_known() -> None:
    (group,) = groups_of(position(GroupCounts(name="0", begun=12, ended=11, op="all_reduce" * 100)))
    assert group.op == ("all_reduce" * 4)


@pytest.mark.parametrize(("begun", "ended", "waits"), [(5, 4, True), (5, 5, False), (5, None, None)])
def test_whether_a_group_is_waited_in(begun: int, ended: int | None, waits: bool | None) -> None:
    assert GroupPosition(name="0", begun=begun, ended=ended).waits is waits


def test_a_long_name_is_cut() -> None:
    (group,) = groups_of(position(GroupCounts(name="n" * 10_000, begun=1, ended=1)))
    assert len(group.name) == 100


def test_arrivals_are_seconds_of_one_clock() -> None:
    told = arrivals_of(LatestCollectives(first=7, at_us=(1_700_000_000_000_000, 20_000, 41_000)))
    assert (told.first, told.end) == (7, 10)
    assert told.at_s == pytest.approx((1_700_000_000.0, 1_700_000_000.02, 1_700_000_000.041))
    assert arrivals_of(LatestCollectives()).at_s == ()


@pytest.mark.parametrize(
    ("ops", "op", "expected"),
    [
        (("all_reduce", "barrier"), (1, 0, 1), ("barrier", "all_reduce", "barrier")),
        (("all_reduce",), (), ("all_reduce",) * 3),
        ((), (), ()),
        (("all_reduce",), (0, 1, 0), ()),
        (("all_reduce",), (0, -1, 0), ()),
        ((), (0, 0, 0), ()),
    ],
)
def test_operations_are_read_if_all_of_them_are_named(
    ops: tuple[str, ...], op: tuple[int, ...], expected: tuple[str, ...]
) -> None:
    assert arrivals_of(LatestCollectives(first=1, at_us=(5, 1, 2), ops=ops, op=op)).ops == expected


def test_an_answer_about_arrivals_is_bounded() -> None:
    told = arrivals_of(LatestCollectives(first=0, at_us=(0,) * 10**5))
    assert len(told.at_s) == ARRIVALS_MAX


def test_limits_of_sections_are_seconds() -> None:
    assert limits_of(_limits({"setup": 600, "step": None, "checkpoint": 0})) == {"setup": 600.0}
    assert len(limits_of(_limits({str(number): 1.0 for number in range(5000)}))) == LIMITS_MAX


def _limits(sections_s: dict[str, float | None]) -> SectionLimits:
    return SectionLimits(first_heartbeat_s=None, heartbeat_s=3.0, out_of_section_s=None, sections_s=sections_s)
