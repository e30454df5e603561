"""What the members of a new world agree on, from what each of them says: pure, so that all conclude the same.

A survivor may be in the middle of a step, at its end, or one step ahead of another, because a reduction that the fault
interrupted may have ended for some and not for others. A newcomer has the state of an earlier step, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from unicron_elastic.training.shares import deal

__all__ = ["Agreement", "NoStateLeft", "Said", "agree"]


class NoStateLeft(Exception):
    """No member of the world has the training state in its memory."""


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
    """

    state: int | None
    held: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    keeps_last: bool = False
    start: int | None = None
    trained: frozenset[int] = frozenset()
    buckets: int = 1

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
    ``dealt`` the micro-batches that each rank computes for those.
    """

    step: int
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
        return not self.pull and not self.advance


def agree(said: Sequence[Said], *, micro_batches: int) -> Agreement:
    """The agreement of those who ``said`` this, in the order of their ranks, for steps of so many micro-batches.

    Those in the same step train the same parameters. Raises NoStateLeft.
    """
    states = [each.state for each in said if each.state is not None]
    if not states:
        return _begin(said)
    step = max(states)
    even = tuple(rank for rank, each in enumerate(said) if each.state == step)
    if len(even) < len(said):
        return _catch_up(said, step, even)
    done = frozenset().union(*(each.done for each in said))
    fill = tuple((bucket, _first_with(said, bucket)) for bucket in sorted(done) if not _all_have(said, bucket))
    left = tuple(bucket for bucket in range(said[even[0]].buckets) if bucket not in done)
    lost = frozenset(range(micro_batches)).difference(*(each.held for each in said)) if left else frozenset()
    return Agreement(step=step, fill=fill, open=left, dealt=deal(lost, [len(each.held) for each in said]))


def _begin(said: Sequence[Said]) -> Agreement:
    """All begin with what the first rank has that was there from the beginning."""
    first = next(((rank, each.start) for rank, each in enumerate(said) if each.start is not None), None)
    if first is None:
        raise NoStateLeft("no member of the new world has the training state in its memory")
    rank, step = first
    return Agreement(step=step, pull=tuple(range(len(said))), sources=(rank,), begins=True)


def _catch_up(said: Sequence[Said], step: int, even: tuple[int, ...]) -> Agreement:
    """Whoever is one step behind makes that step, if its reduced gradients still exist; all others take the state."""
    late = tuple(rank for rank, each in enumerate(said) if each.state == step - 1)
    whole = tuple(rank for rank in late if said[rank].has_all)
    keepers = (*whole, *(rank for rank in even if said[rank].keeps_last))
    keeper_of = {
        rank: next((keeper for keeper in keepers if said[keeper].trained == said[rank].trained), None)
        for rank in late
        if rank not in whole
    }
    gradients = tuple((keeper, rank) for rank, keeper in keeper_of.items() if keeper is not None)
    advance = tuple(sorted((*whole, *(rank for _, rank in gradients))))
    return Agreement(
        step=step,
        pull=tuple(rank for rank in range(len(said)) if rank not in even and rank not in advance),
        sources=even,
        advance=advance,
        gradients=gradients,
    )


def _all_have(said: Sequence[Said], bucket: int) -> bool:
    return all(bucket in each.done for each in said)


def _first_with(said: Sequence[Said], bucket: int) -> int:
    return next(rank for rank, each in enumerate(said) if bucket in each.done)
