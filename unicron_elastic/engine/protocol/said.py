"""What a member says of itself in a meeting, and the text that the others read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unicron_elastic.engine.protocol.shares import from_ranges, to_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`Report` is what all ranks do together between two steps: the ``number``-th behind step ``state`` of ``until``.

    It is a ``call`` of the run's by that name, of this ``kind``. ``lacks`` are the ranks whose share is not in its
    result, which has so many ``bytes``.
    """

    until: int
    state: int
    number: int
    kind: str
    lacks: tuple[int, ...] = ()
    call: str = "mean"
    bytes: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """Which it is."""
        return self.until, self.state, self.number

    @property
    def label(self) -> str:
        """The same for people."""
        where = "before the first step" if self.state < 0 else f"behind step {self.state} of {self.until}"
        return f"run.{self.call}() number {self.number} {where}, of {self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one member says of itself. Step number ``s`` is the one that begins after ``s`` optimizer steps.

    ``state`` is how many optimizer steps its parameters have behind them, and so the number of the step it is in; None:
    it has no state that others know, and would begin with step number ``start``, or None if it came when others trained
    already: what it begins with is not what they had. ``held`` are the micro-batches of that
    step which it has computed or will. ``done`` are the gradient buckets of that step which it has, reduced.
    ``keeps_last`` says whether it still has the reduced gradients of the step before. ``trained`` are the positions of
    the parameters that are trained in that step, whose gradients are in so many ``buckets``; if it ``keeps_last``, they
    are those of the step before, too.

    ``until`` is the total of the ``run.steps()`` in which it is, or was last; ``has_parted``: it has left that with all
    others. ``is_new``: it was in no world before. ``is_between`` two steps its parameters are not those of ``state``.
    ``digests`` are those of what is registered, by name: of a newcomer what it has copied, of others what it should be.
    ``micro_batches``: so many the step has that it is in, or would begin with, if ``until`` has one more.
    ``report`` is the latest of which it has the result, ``asks`` the one that it waits for,
    ``place`` the total and the step behind which it makes others, and ``lost`` are ranks that
    were lost since shares of those were dealt.
    """

    state: int | None
    held: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    keeps_last: bool = False
    start: int | None = None
    trained: frozenset[int] = frozenset()
    buckets: int = 1
    micro_batches: int = 1
    until: int = 0
    has_parted: bool = False
    is_new: bool = False
    is_between: bool = False
    digests: Mapping[str, int] = field(default_factory=dict, hash=False)
    report: Report | None = None
    asks: Report | None = None
    place: tuple[int, int] = (-1, -1)
    lost: frozenset[int] = frozenset()

    @property
    def has_all(self) -> bool:
        """Whether it has the reduced gradients of its step."""
        return len(self.done) == self.buckets

    @property
    def counts(self) -> tuple[int, int] | None:
        """Return of which step of which call it says how many micro-batches there are; None: of none."""
        step = self.start if self.state is None else self.state
        return None if step is None or step >= self.until else (self.until, step)


# What all read of a newcomer on other terms: it leaves, as one does that is in no call of theirs.
_STRANGER = Said(state=None, until=-1, is_new=True)


class MismatchError(RuntimeError):
    """The members do not run the same training."""


def written(said: Said, terms: str) -> str:
    """Return what a member says, and the ``terms`` on which it trains, as a text."""
    message = {
        "terms": terms,
        "state": said.state,
        "held": to_ranges(said.held),
        "done": to_ranges(said.done),
        "keeps_last": said.keeps_last,
        "start": said.start,
        "trained": to_ranges(said.trained),
        "buckets": said.buckets,
        "micro_batches": said.micro_batches,
        "until": said.until,
        "is_new": said.is_new,
        "is_between": said.is_between,
        "has_parted": said.has_parted,
        "digests": said.digests,
        "report": None if said.report is None else asdict(said.report),
        "asks": None if said.asks is None else asdict(said.asks),
        "place": said.place,
        "lost": to_ranges(said.lost),
    }
    return json.dumps(message, separators=(",", ":"))


def read(texts: Sequence[str], terms: str, own: Said) -> list[Said]:
    """Return what each member said in ``written``, by rank; ``own`` is what this one has said.

    A newcomer that trains something else than those who were there before, or has another number of micro-batches for
    the step that they are in, costs these nothing: it is to leave. Raises MismatchError where one of them does, and in
    that newcomer.
    """
    messages = [json.loads(text) for text in texts]
    all_said = [_read(message) for message in messages]
    on = [(message["terms"], _count(said, own)) for message, said in zip(messages, all_said, strict=True)]
    ours = (terms, own.micro_batches)
    theirs = {each for each, said in zip(on, all_said, strict=True) if not said.is_new}
    found = []
    for rank, (each, said) in enumerate(zip(on, all_said, strict=True)):
        if each == ours:
            found.append(said)
        elif said.is_new and ours in theirs:
            found.append(_STRANGER)
        elif each[0] == terms:
            assert own.counts is not None
            counts = f"rank {rank} has {each[1]} micro-batches, and this rank {own.micro_batches}"
            raise MismatchError(f"in step {own.counts[1]} {counts}")
        else:
            theirs_alone, ours_alone = _apart(each[0], terms)
            raise MismatchError(f"rank {rank} trains something else: {theirs_alone}, and this rank {ours_alone}")
    return found


def _count(said: Said, own: Said) -> int:
    """Return how many micro-batches a member has in the step that this one is in; of another step that says nothing."""
    return said.micro_batches if said.counts == own.counts is not None else own.micro_batches


def _apart(theirs: str, ours: str) -> tuple[str, str]:
    """Return those parts of two terms that are not the same."""
    pairs = [pair for pair in zip(theirs.split(" and "), ours.split(" and "), strict=False) if pair[0] != pair[1]]
    return " and ".join(each for each, _ in pairs), " and ".join(each for _, each in pairs)


def _read(message: Mapping[str, Any]) -> Said:
    return Said(
        state=message["state"],
        held=from_ranges(message["held"], message["micro_batches"]),
        done=from_ranges(message["done"], message["buckets"]),
        keeps_last=bool(message["keeps_last"]),
        start=message["start"],
        trained=from_ranges(message["trained"], sys.maxsize),
        buckets=message["buckets"],
        micro_batches=message["micro_batches"],
        until=message["until"],
        is_new=bool(message["is_new"]),
        is_between=bool(message["is_between"]),
        has_parted=bool(message["has_parted"]),
        digests=message["digests"],
        report=_report(message["report"]),
        asks=_report(message["asks"]),
        place=tuple(message["place"]),
        lost=from_ranges(message["lost"], sys.maxsize),
    )


def _report(message: dict[str, Any] | None) -> Report | None:
    return None if message is None else Report(**{**message, "lacks": tuple(message["lacks"])})
