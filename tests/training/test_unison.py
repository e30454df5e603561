"""What a replica of several processes concludes from how a command has ended in each seat."""

from __future__ import annotations

import pytest

from unicron_elastic.engine.protocol.replica_event import (
    Answered,
    Connected,
    Gathered,
    GroupBroke,
    Judged,
    Moved,
    Outgrown,
    PatienceOver,
    Reduced,
    RoundLeft,
    StateRefused,
    WhoIsWrong,
)
from unicron_elastic.training.group.assembly import TextsHeard
from unicron_elastic.training.shard.unison import Result, merged, read_result, told_of


@pytest.mark.parametrize(
    ("by_seat", "concluded"),
    [
        ([[Connected()], [Connected()]], [Connected(0), Connected(1)]),
        ([[Moved()], [Moved()]], [Moved(0), Moved(1)]),
        ([[Connected()], [GroupBroke("gone")]], [GroupBroke("gone")]),
        ([[Connected()], [RoundLeft()]], [RoundLeft()]),
        ([[RoundLeft()], [GroupBroke("gone")]], [GroupBroke("gone")]),
        ([[Outgrown()], [Moved()]], [Outgrown()]),
        ([[StateRefused()], [Moved()]], [StateRefused()]),
        ([[TextsHeard(("a", "b"))], [None]], [TextsHeard(("a", "b"))]),
        ([[TextsHeard(("a", "b"))], [RoundLeft()]], [RoundLeft()]),
        ([[None], [None]], [None]),
        ([[PatienceOver()], [PatienceOver()]], [PatienceOver()]),
        ([[PatienceOver()], [None]], [None]),  # one has heard of the newcomer's world, and so will the other
        ([[Judged(WhoIsWrong.NOBODY)], [Judged(WhoIsWrong.THIS)]], [Judged(WhoIsWrong.THIS)]),
        ([[Judged(WhoIsWrong.OTHERS)], [Judged(WhoIsWrong.NOBODY)]], [Judged(WhoIsWrong.OTHERS)]),
        ([[Gathered()], [Gathered(is_awaited=True)]], [Gathered(0, is_awaited=True), Gathered(1, is_awaited=True)]),
        ([[Answered(is_member=True)], [Answered(is_member=True)]], [Answered(is_member=True)]),
        ([[Answered(has_source=True, where=(6, 2))]] * 2, [Answered(where=(6, 2))]),
    ],
)
def test_what_holds_for_the_replica_is_the_same_in_each_seat(
    by_seat: list[list[Result]], concluded: list[Result]
) -> None:
    assert merged(by_seat) == concluded


def test_a_sum_is_told_of_each_seat_that_has_it_and_what_the_notes_of_one_say_counts_for_all() -> None:
    by_seat: list[list[Result]] = [
        [Reduced(0), Reduced(1, is_awaited=True)],
        [Reduced(0), Reduced(1, must_repeat=True)],
    ]
    notes = {"is_awaited": True, "must_repeat": True}
    assert merged(by_seat) == [Reduced(0, 0), Reduced(1, 0, **notes), Reduced(0, 1), Reduced(1, 1, **notes)]


def test_a_sum_that_broke_in_one_seat_is_broken_for_all_behind_those_that_are_there() -> None:
    by_seat: list[list[Result]] = [[Reduced(0), Reduced(1)], [Reduced(0), GroupBroke("gone")]]
    assert merged(by_seat) == [Reduced(0, 0), Reduced(1, 0), Reduced(0, 1), GroupBroke("gone")]


def test_processes_of_one_replica_are_members_together() -> None:
    with pytest.raises(RuntimeError, match="others are not yet"):
        merged([[Answered(is_member=True)], [Answered()]])


@pytest.mark.parametrize(
    "result",
    [
        None,
        Reduced(3, is_awaited=True),
        Judged(WhoIsWrong.OTHERS),
        TextsHeard(("one", "two")),
        Answered(where=(6, 2)),
        GroupBroke("why"),
    ],
)
def test_what_is_told_is_read(result: Result) -> None:
    assert read_result(told_of(result)) == result
