"""What the members of a new world agree on, from what each of them says: pure, so that all conclude the same.

A survivor may be in the middle of a step, at its end, or one step ahead of another, because a reduction that the
fault interrupted may have ended for some and not for others. The same holds for a report between two steps, and for
the end of one ``run.steps()`` where a script has several. A newcomer has the state of an earlier step, or none, and
may be in another ``run.steps()`` than the others: then it leaves, and comes when it is where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from unicron_elastic.engine.protocol.said import Said
from unicron_elastic.engine.protocol.shares import deal


class NoStateLeft(Exception):
    """No member of the world has the training state in its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What happens next, by rank of the new world.

    Some may be behind: those who ``pull`` take the state of step ``step`` from one of ``sources``; those who
    ``advance`` have or get the gradients of the step before, and make its optimizer step first. ``gradients`` are the
    (source, destination) pairs for that. Then all say again where they are. If nobody is behind, ``fill`` are the
    (bucket, source) pairs of buckets that some have and others need, ``open`` the buckets that nobody has, and
    ``dealt`` the micro-batches that each rank computes for those. But if some ``leave``, the others go on without them,
    in another world: newcomers that are not in the ``run.steps()`` ``until``, or come while others are between steps.
    ``means`` are (source, destination) pairs: the one has the result of the mean that the other asks for.
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
    means: tuple[tuple[int, int], ...] = ()
    begins: bool = False  # nobody has trained yet: only the model is taken, as DDP does it

    @property
    def is_even(self) -> bool:
        """Whether all members are in the same step with the same parameters."""
        return not self.pull and not self.advance and not self.leave


def agree(said: Sequence[Said], *, micro_batches: int) -> Agreement:
    """The agreement of those who ``said`` this, in the order of their ranks, for steps of so many micro-batches.

    Those in the same step train the same parameters. Raises NoStateLeft.
    """
    return replace(_agree(said, micro_batches), means=tuple(reports_to_give(said)))


def _agree(said: Sequence[Said], micro_batches: int) -> Agreement:
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
