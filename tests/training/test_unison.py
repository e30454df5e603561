"""What a replica of several processes concludes from how a command has ended in each seat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

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
from unicron_elastic.training.engine import Engine
from unicron_elastic.training.group.assembly import TextsHeard
from unicron_elastic.training.shard.unison import Result, merged, read_result, told_of
from unicron_elastic.training.step.wrong_use import WrongUseError


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
        [Reduced(0), Reduced(1, must_repeat=True, differs=True)],
    ]
    notes = {"is_awaited": True, "must_repeat": True, "differs": True}
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


class Told:
    """`Told` are mates of whom the other one has told this."""

    seats = 2

    def __init__(self, *other: float) -> None:
        self._other = torch.tensor(other, dtype=torch.float64)

    def mean(self, mine: torch.Tensor) -> torch.Tensor:
        return (mine + self._other) / 2


def _of_all_seats(mates: Told, weight: float | None) -> tuple[torch.Tensor, float | None]:
    return Engine._of_all_seats(cast("Engine", SimpleNamespace(_mates=mates)), torch.tensor([1.0, 2.0]), weight)


def test_losses_and_weights_are_means_over_the_seats() -> None:
    losses, weight = _of_all_seats(Told(3.0, 4.0, 5.0, 1.0), 3.0)
    assert (losses.tolist(), losses.dtype, weight) == ([2.0, 3.0], torch.float32, 4.0)
    assert _of_all_seats(Told(3.0, 4.0, 0.0, 0.0), None)[1] is None


@pytest.mark.parametrize(("other", "weight"), [(0.0, 3.0), (1.0, None)])
def test_all_seats_have_a_weight_or_none_has(other: float, weight: float | None) -> None:
    with pytest.raises(WrongUseError, match="a weight on some ranks of this replica, and none on others"):
        _of_all_seats(Told(3.0, 4.0, 5.0, other), weight)
