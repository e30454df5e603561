"""What a member says of itself in a meeting, as the text that the others read."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unicron_elastic.training.step.shares import deal, from_ranges, to_ranges

# What the members of a new world agree on, from what each of them says: pure, so that all conclude the same.
#
# A survivor may be in the middle of a step, at its end, or one step ahead of another, because a reduction that the
# fault interrupted may have ended for some and not for others. The same holds for a report between two steps, and for
# the end of one ``run.steps()`` where a script has several. A newcomer has the state of an earlier step, or none, and
# may be in another ``run.steps()`` than the others: then it leaves, and comes when it is where they are.


class NoStateLeft(Exception):
    """No member of the world has the training state in its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A reduction between two steps: the ``number``-th behind step ``state`` of the call ``until``, of this ``kind``.

    ``lacks`` are the ranks whose share is not in its result.
    """

    until: int
    state: int
    number: int
    kind: str
    lacks: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[int, int, int]:
        """Which it is."""
        return self.until, self.state, self.number

    @property
    def label(self) -> str:
        """The same for people."""
        where = "before the first step" if self.state < 0 else f"behind step {self.state} of {self.until}"
        return f"run.mean() number {self.number} {where}, of {self.kind}"


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
    until: int = 0
    has_parted: bool = False
    is_new: bool = False
    is_between: bool = False
    digests: Mapping[str, int] = field(default_factory=dict)
    report: Report | None = None
    asks: Report | None = None
    place: tuple[int, int] = (-1, -1)
    lost: frozenset[int] = frozenset()

    @property
    def has_all(self) -> bool:
        """Whether it has the reduced gradients of its step."""
        return len(self.done) == self.buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What happens next, by rank of the new world.

    Some may be behind: those who ``pull`` take the state of step ``step`` from one of ``sources``; those who
    ``advance`` have or get the gradients of the step before, and make its optimizer step first. ``gradients`` are the
    (source, destination) pairs for that. Then all say again where they are. If nobody is behind, ``fill`` are the
    (bucket, source) pairs of buckets that some have and others need, ``open`` the buckets that nobody has, and
    ``dealt`` the micro-batches that each rank computes for those. But if some ``leave``, the others go on without them,
    in another world: newcomers that are not in the ``run.steps()`` ``until``, or come while others are between steps.
    """

    step: int
    until: int = 0
    leave: tuple[int, ...] = ()
    pull: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    advance: tuple[int, ...] = ()
    gradients: tuple[tuple[int, int], ...] = ()
    fill: tuple[tuple[int, int], ...] = ()
    open: tuple[int, ...] = ()
    dealt: tuple[tuple[int, ...], ...] = field(default=())
    begins: bool = False  # nobody has trained yet: only the model is taken, as DDP does it

    @property
    def is_even(self) -> bool:
        """Whether all members are in the same step with the same parameters."""
        return not self.pull and not self.advance and not self.leave


def agree(said: Sequence[Said], *, micro_batches: int) -> Agreement:
    """The agreement of those who ``said`` this, in the order of their ranks, for steps of so many micro-batches.

    Those in the same step train the same parameters. Raises NoStateLeft.
    """
    have_state = [each for each in said if each.state is not None]
    if not have_state:
        return _begin(said)
    # Newcomers that have copied the state may be all that is left of it.
    first = max(([each for each in have_state if not each.is_new] or have_state), key=_place)
    even = tuple(rank for rank, each in enumerate(said) if _place(each) == _place(first))
    step, until = first.state, first.until
    assert step is not None
    leave = _who_leaves(said, until, is_between=any(said[rank].is_between for rank in even))
    if leave:
        return Agreement(step=step, until=until, leave=leave)
    even = tuple(rank for rank in even if not _is_torn(said, rank, even))
    if len(even) < len(said):
        return _catch_up(said, step, until, even)
    done = frozenset().union(*(each.done for each in said))
    fill = tuple((bucket, _first_with(said, bucket)) for bucket in sorted(done) if not _all_have(said, bucket))
    left = tuple(bucket for bucket in range(said[even[0]].buckets) if bucket not in done)
    lost = frozenset(range(micro_batches)).difference(*(each.held for each in said)) if left else frozenset()
    dealt = deal(lost, [len(each.held) for each in said])
    return Agreement(step=step, until=until, fill=fill, open=left, dealt=dealt)


def _place(said: Said) -> tuple[int, int]:
    """How far a member has come in the script: a later ``run.steps()`` has a larger total."""
    return (said.until, -1 if said.state is None else said.state)


def _is_torn(said: Sequence[Said], rank: int, even: Sequence[int]) -> bool:
    """Whether this is a newcomer's, and what it has copied is not what the others have, who may have changed it."""
    theirs = next((said[each].digests for each in even if said[each].digests and not said[each].is_new), {})
    ours = said[rank].digests
    return said[rank].is_new and any(ours[name] != theirs[name] for name in ours.keys() & theirs.keys())


def _who_leaves(said: Sequence[Said], until: int, *, is_between: bool) -> tuple[int, ...]:
    """Newcomers that cannot be taken in at this moment, unless nobody else is there."""
    if all(each.is_new for each in said):
        return ()
    return tuple(rank for rank, each in enumerate(said) if each.is_new and (is_between or each.until != until))


def _begin(said: Sequence[Said]) -> Agreement:
    """All begin with what the first rank has that was there from the beginning."""
    first = next(((rank, each) for rank, each in enumerate(said) if each.start is not None), None)
    if first is None:
        raise NoStateLeft("no member of the new world has the training state in its memory")
    rank, each = first
    assert each.start is not None
    return Agreement(step=each.start, until=each.until, pull=tuple(range(len(said))), sources=(rank,), begins=True)


def _catch_up(said: Sequence[Said], step: int, until: int, even: tuple[int, ...]) -> Agreement:
    """Whoever is one step behind makes that step, if its reduced gradients still exist; all others take the state.

    So do newcomers: nobody can compare the state that they have copied any more. Whoever is only in the
    ``run.steps()`` before goes on to this one.
    """
    behind = tuple(rank for rank, each in enumerate(said) if each.state == step and each.until < until)
    late = tuple(rank for rank, each in enumerate(said) if each.state == step - 1 and not each.is_new)
    whole = tuple(rank for rank in late if said[rank].has_all)
    keepers = (*whole, *(rank for rank in even if said[rank].keeps_last))
    keeper_of = {
        rank: next((keeper for keeper in keepers if said[keeper].trained == said[rank].trained), None)
        for rank in late
        if rank not in whole
    }
    gradients = tuple((keeper, rank) for rank, keeper in keeper_of.items() if keeper is not None)
    advance = tuple(sorted((*behind, *whole, *(rank for _, rank in gradients))))
    return Agreement(
        step=step,
        until=until,
        pull=tuple(rank for rank in range(len(said)) if rank not in even and rank not in advance),
        sources=even,
        advance=advance,
        gradients=gradients,
    )


def _all_have(said: Sequence[Said], bucket: int) -> bool:
    return all(bucket in each.done for each in said)


def _first_with(said: Sequence[Said], bucket: int) -> int:
    return next(rank for rank, each in enumerate(said) if bucket in each.done)


def reports_to_give(said: Sequence[Said]) -> list[tuple[int, int]]:
    """The (source, destination) pairs of ranks: the one has the result of the reduction that the other waits for."""
    given = []
    for rank, each in enumerate(said):
        if each.asks is not None and (each.report is None or each.report.key != each.asks.key):
            keys = [None if other.report is None else other.report.key for other in said]
            if each.asks.key in keys:
                given.append((keys.index(each.asks.key), rank))
    return given


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


def read(text: str, terms: str, micro_batches: int, rank: int) -> Said:
    """Return what member ``rank`` said in ``written``. Raises MismatchError if it trains something else."""
    message = json.loads(text)
    if message["terms"] != terms:
        raise MismatchError(f"rank {rank} trains something else: it has {message['terms']}, this rank has {terms}")
    return Said(
        state=message["state"],
        held=from_ranges(message["held"], micro_batches),
        done=from_ranges(message["done"], message["buckets"]),
        keeps_last=bool(message["keeps_last"]),
        start=message["start"],
        trained=from_ranges(message["trained"], sys.maxsize),
        buckets=message["buckets"],
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
