"""Keeps the processes of one replica in unison: each decides the same, as all are told the same in the same order.

What a command ends with in one seat is told to all seats, and they go on with what that means for the replica: a sum
is there when it is in all seats, and broken if it is in one. The news of a world counts when all have heard it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeAlias, cast

from unicron_elastic.engine.protocol.replica_event import (
    Answered,
    Averaged,
    Connected,
    Gathered,
    GroupBroke,
    Handed,
    Judged,
    Moved,
    Outgrown,
    PatienceOver,
    Reduced,
    ReplicaEvent,
    RoundLeft,
    StateRefused,
    WhoIsWrong,
)
from unicron_elastic.training.group.assembly import TextsHeard
from unicron_elastic.training.shard.mates import Mates
from unicron_elastic.training.shard.seat_membership import SeatMembership

Result: TypeAlias = ReplicaEvent | None  # None: a waiting has ended with news, which are told anyway
_ENDS = (GroupBroke, Outgrown, RoundLeft, StateRefused)  # what one seat ended with ends it for all: the first of these
_EVENTS = {
    kind.__name__: kind
    for kind in (
        *(Answered, Averaged, Connected, Gathered, Handed, Judged, Moved, PatienceOver, Reduced, TextsHeard),
        *_ENDS,
    )
}


class Unison:
    """`Unison` is this process's part in it. ``break_too`` is called when what broke in another seat did not here."""

    def __init__(self, mates: Mates, membership: SeatMembership, break_too: Callable[[ReplicaEvent], object]) -> None:
        self._mates = mates
        self._membership = membership
        self._break_too = break_too

    def agree_on_news(self) -> None:
        """Take in the newest world, with all of the replica. Raises what a collective raises."""
        self._exchange(())

    def agree(self, results: Iterable[Result]) -> list[Result]:
        """Return how a command has ended for the replica that ended with ``results`` here; and take in news.

        Raises what a collective raises.
        """
        by_seat = self._exchange(tuple(results))
        mine = by_seat[self._mates.seat]
        ended = [each for kind in _ENDS for results in by_seat for each in results if isinstance(each, kind)]
        if ended and isinstance(ended[0], GroupBroke | Outgrown) and not any(isinstance(e, _ENDS[:2]) for e in mine):
            self._break_too(ended[0])
        return merged(by_seat)

    def _exchange(self, results: Sequence[Result]) -> list[list[Result]]:
        told = [self._membership.newest, [told_of(each) for each in results]]
        heard = [json.loads(each) for each in self._mates.share(json.dumps(told, separators=(",", ":")))]
        numbers = [number for number, _ in heard]
        while min(numbers) < max(numbers):
            self._membership.await_world(max(numbers))
            numbers = [int(each) for each in self._mates.share(str(self._membership.newest))]
        self._membership.agree()
        return [[read_result(each) for each in of_seat] for _, of_seat in heard]


def merged(by_seat: Sequence[Sequence[Result]]) -> list[Result]:
    """Return what the replica is told of what the seats ended with: pure, and so the same in all of them."""
    all_results = [each for results in by_seat for each in results]
    for kind in _ENDS:
        found = next((each for each in all_results if isinstance(each, kind)), None)
        if found is not None:
            return [*_sums(by_seat), found] if kind in _ENDS[:2] else [found]
    if judged := [each for each in all_results if isinstance(each, Judged)]:
        whose = {each.who for each in judged}
        return [Judged(next(who for who in (WhoIsWrong.THIS, WhoIsWrong.OTHERS, WhoIsWrong.NOBODY) if who in whose))]
    if any(isinstance(each, Reduced) for each in all_results):
        return list[Result](_sums(by_seat))
    gathered = [each for each in all_results if isinstance(each, Gathered)]
    tagged: list[Result] = []
    for seat, results in enumerate(by_seat):
        for each in results:
            match each:
                case Gathered():
                    tagged.append(Gathered(seat, is_awaited=any(e.is_awaited for e in gathered)))
                case Connected() | Handed() | Moved() | Averaged():
                    tagged.append(replace(each, seat=seat))
    if tagged:
        return tagged
    return _of_the_lead(by_seat, all_results)


def _of_the_lead(by_seat: Sequence[Sequence[Result]], all_results: Sequence[Result]) -> list[Result]:
    if all_results and all(isinstance(each, PatienceOver) for each in all_results):
        return [PatienceOver()]
    if answers := [each for each in all_results if isinstance(each, Answered)]:
        if len({each.is_member for each in answers}) > 1:
            raise RuntimeError("some processes of this replica are members of the job, and others are not yet")
        return [replace(answers[0], has_source=False)]  # the shards of the others come by their connections
    found = [each for each in by_seat[0] if not isinstance(each, PatienceOver)]
    return found or [None]


def _sums(by_seat: Sequence[Sequence[Result]]) -> list[Reduced]:
    """Return which sums are in which seat; what the notes of one say counts for all."""
    sums = [(seat, each) for seat, results in enumerate(by_seat) for each in results if isinstance(each, Reduced)]
    found: list[Reduced] = []
    for seat, each in sums:
        same = [other for _, other in sums if other.bucket == each.bucket]
        found.append(
            Reduced(
                each.bucket,
                seat,
                is_awaited=any(other.is_awaited for other in same),
                differs=any(other.differs for other in same),
                must_repeat=any(other.must_repeat for other in same),
            )
        )
    return found


def told_of(result: Result) -> Any:
    """Return it as plain data, which ``read_result`` takes."""
    if result is None:
        return None
    values = {field.name: getattr(result, field.name) for field in fields(cast("Any", result))}
    if isinstance(result, Judged):
        values["who"] = result.who.value
    return [type(result).__name__, values]


def read_result(told: Any) -> Result:
    """Undoes ``told_of``."""
    if told is None:
        return None
    kind, values = told
    values = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
    if kind == Judged.__name__:
        values["who"] = WhoIsWrong(values["who"])
    return cast("Result", _EVENTS[kind](**values))
