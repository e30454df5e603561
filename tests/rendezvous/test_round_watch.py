"""What is said of a round whose nodes come and go."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from unicron_elastic.membership.rounds import Place, Round
from unicron_elastic.rendezvous.job.round_watch import RoundListener, RoundWatch


class Rounds:
    """What a handler knows of a round, as the test sets it."""

    def __init__(self) -> None:
        self.over = ""
        self.gone: tuple[str, ...] = ()
        self.waiting = 0

    def why_over(self, _round: Round) -> str:
        return self.over

    def nodes_gone(self, _round: Round) -> tuple[str, ...]:
        return self.gone

    def nodes_waiting(self, _round: Round) -> int:
        return self.waiting

    def why_cancelled(self, _round: Round) -> str:
        return ""

    def why_recalled(self, _round: Round) -> tuple[str, str, bool]:
        return "", "", False

    def nodes_departing(self, _round: Round) -> tuple[tuple[str, ...], str]:
        return (), ""


@pytest.mark.parametrize(
    ("goes_on", "gone", "expected"),
    [
        (True, ("b/1",), [("lost", ("b/1",)), ("waiting", 1)]),  # who goes on without b takes it in again
        (True, (), [("fault", "b is lost.")]),
        (False, ("b/1",), [("fault", "b is lost.")]),
    ],
)
def test_nodes_that_wait_are_told_of_unless_the_round_is_over(
    goes_on: bool, gone: tuple[str, ...], expected: list[tuple[str, object]]
) -> None:
    heard: list[tuple[str, object]] = []

    def hears(what: str) -> Callable[[object], None]:
        return lambda said: heard.append((what, said))

    listener = RoundListener(
        on_fault=hears("fault"),
        on_lost=(lambda nodes, _why: heard.append(("lost", nodes))) if goes_on else None,
        on_waiting=hears("waiting"),
    )
    rounds = Rounds()
    watch = RoundWatch(rounds, Round(number=1, places=(Place("a/1", "a"),)), listener)
    rounds.over, rounds.gone = "b is lost.", gone
    watch.look()
    rounds.waiting = 1
    watch.look()
    assert heard == expected


@pytest.mark.parametrize("tells_apart", [True, False])
def test_what_another_node_tells_is_told_from_what_only_this_one_sees(tells_apart: bool) -> None:
    heard: list[tuple[str, str]] = []
    listener = RoundListener(
        on_fault=lambda why: heard.append(("fault", why)),
        on_told=(lambda why: heard.append(("told", why))) if tells_apart else None,
    )
    rounds = Rounds()
    watch = RoundWatch(rounds, Round(number=1, places=(Place("a/1", "a"),)), listener)
    watch.told(2, "On b, of another round.")
    watch.told(1, "On b, rank 1 was killed.")
    rounds.over = "b is lost."
    watch.look()
    assert heard == [("told" if tells_apart else "fault", "On b, rank 1 was killed.")]
