"""The protocol with one of its checks taken out: the source of its parts, changed in one place."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from interleavings import Bounds, Decide

from unicron_elastic.engine.protocol import agreement, handle

TWO = Bounds(2, (1,), losses=1)
BREAKS = Bounds(2, (1,), breaks=1)
LATE = Bounds(2, (2,), breaks=1)
REPLACED = Bounds(2, (2,), losses=1, newcomers=1)
GROWS = Bounds(1, (2,), newcomers=1, grows=True)
CALLS = Bounds(1, (1, 2), newcomers=1, grows=True)
SEATS = Bounds(2, (1,), seats=2, breaks=1)
THREE = Bounds(3, (1,), losses=1)
DIFFERS = Bounds(2, (1,), flips=1, losses=1)
OVERLAPS = Bounds(2, (1,), micro_batches=3, buckets=3, overlaps=True, losses=1)
REPLACED_EARLY = Bounds(2, (1,), buckets=3, overlaps=True, losses=1, newcomers=1)
ADDS = Bounds(2, (1,), buckets=3, overlaps=True, breaks=1, additions=1)
MEANS = Bounds(2, (2,), breaks=1, means=("before", "behind"))
MEANS_AT_END = Bounds(2, (1, 2), breaks=1, means=("end",))


@dataclass(frozen=True, slots=True)
class Mutant:
    """`Mutant` is what is said of it, what is replaced by what, and in which bounds it is to be found."""

    what: str
    old: str
    new: str
    bounds: Bounds

    def decide(self) -> Decide:
        """Return the protocol with the change."""
        decide: Decide = changed(self, agreement, handle).handle
        return decide


def changed(mutant: Any, heart: ModuleType, handler: ModuleType) -> ModuleType:
    """Return the ``handler`` with a change in it, or in the ``heart``, which is the agreement that it uses."""
    hearts, handlers = (Path(str(each.__file__)).read_text(encoding="utf-8") for each in (heart, handler))
    assert hearts.count(mutant.old) + handlers.count(mutant.old) == 1, mutant.old
    found = _module(handler, handlers.replace(mutant.old, mutant.new))
    if mutant.old in hearts:
        found.agree = _module(heart, hearts.replace(mutant.old, mutant.new)).agree  # type: ignore[attr-defined]
    return found


def _module(like: ModuleType, source: str) -> ModuleType:
    module = ModuleType(f"{like.__name__}_mutant")
    module.__file__ = like.__file__
    sys.modules[module.__name__] = module  # where dataclasses look for the names of their types
    try:
        exec(compile(source, module.__name__, "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return module


MUTANTS = (
    # -- what all conclude
    Mutant("nobody is given a bucket that others have", "if not _all_have(said, bucket))", "if False)", BREAKS),
    Mutant(
        "what the lost held is dealt to nobody",
        "lost = frozenset(range(micro_batches)).difference(*(each.held for each in said)) if left else frozenset()",
        "lost = frozenset[int]()",
        TWO,
    ),
    Mutant(
        "what is held is dealt again",
        ".difference(*(each.held for each in said))",
        ".difference()",
        Bounds(3, (1,), micro_batches=3, losses=1),
    ),
    Mutant(
        "who is late is thought to have the gradients",
        "whole = tuple(rank for rank in late if said[rank].has_all)",
        "whole = late",
        LATE,
    ),
    Mutant(
        "who has overwritten the last gradients gives them",
        "for rank in even if said[rank].keeps_last)",
        "for rank in even)",
        LATE,
    ),
    Mutant(
        "a bucket is given by who has it not",
        "return next(rank for rank, each in enumerate(said) if bucket in each.done)",
        "return 0",
        BREAKS,
    ),
    Mutant(
        "a newcomer that is a step behind is late",
        "each.state == step - 1 and not each.is_new)",
        "each.state == step - 1)",
        REPLACED,
    ),
    Mutant(
        "who is in the call before takes the state",
        "each.state == step and each.until < until)",
        "False)",
        Bounds(2, (1, 2), breaks=1),
    ),
    Mutant("newcomers of another call stay", "(is_between or each.until != until)", "is_between", CALLS),
    Mutant("those who have not come so far count as even", "if _place(each) == _place(first))", "if True)", LATE),
    # -- the gate
    Mutant(
        "nobody waits for those who copy",
        "    if not replica.holders:\n        return _commit",
        "    if True:\n        return _commit",
        Bounds(1, (1,), breaks=1, newcomers=1, grows=True),
    ),
    Mutant(
        "a copy that takes too long is not broken off",
        "    if replica.holders:\n        return with_before(answer",
        "    if False:\n        return with_before(answer",
        GROWS,
    ),
    # -- the sum and the commit
    Mutant(
        "a sum counts before it is whole in all seats",
        "if not any(bucket == event.bucket for bucket, _ in left):",
        "if True:",
        SEATS,
    ),
    Mutant(
        "sums of the last step are thought to be there",
        "has_last = work.has_last and buckets == (last,)",
        "has_last = work.has_last",
        Bounds(2, (2,), breaks=2),
    ),
    Mutant(
        "what was computed is computed again",
        "left = replica.work.held - replica.work.computed",
        "left = replica.work.held",
        TWO,
    ),
    Mutant(
        "who is dealt what is forgotten", "before | frozenset(more) for before, more", "before for before, _", THREE
    ),
    Mutant(
        "it commits in a broken world",
        "_go_to_next(replica._replace(is_connected=False), record)\n    return answer if",
        "_commit(replica, WaitFor.HOLDERS)\n    return answer if",
        TWO,
    ),
    # -- buckets that are summed while the backward pass goes on
    Mutant("a bucket is begun before the last micro-batch", "len(record.left) > 1 or", "", OVERLAPS),
    Mutant("buckets that others have are begun again", "or replica.work.done or", "or", REPLACED_EARLY),
    Mutant("the bucket with the notes is begun", "event.bucket < replica.buckets - 2", "True", ADDS),
    Mutant(
        "sums of the last step are thought to be there when the next are begun",
        "work = replica.work._replace(has_last=False)\n    return replica._replace(record=replace(record, begun",
        "work = replica.work\n    return replica._replace(record=replace(record, begun",
        Bounds(2, (2,), buckets=3, overlaps=True, breaks=1),
    ),
    Mutant(
        "what was added too late is forgotten",
        "must_repeat = record.whole, record.must_repeat or event.must_repeat",
        "must_repeat = record.whole, False",
        ADDS,
    ),
    Mutant(
        "sums count before the notes are there",
        "if any(_has_notes(replica, bucket) for bucket in work.done | whole):",
        "if True:",
        ADDS,
    ),
    # -- meetings
    Mutant("who is late thinks that it has met", "Standing.APART if is_late", "Standing.EVEN if is_late", LATE),
    Mutant(
        "a newcomer forgets what it was dealt",
        "if record.standing in {Standing.MET, Standing.AMONG}:",
        "if False:",
        GROWS,
    ),
    Mutant(
        "nobody waits at the end",
        "return with_before(_wait_at_end(replica), CLEAR)",
        "return _finish(replica, record.standing)",
        BREAKS,
    ),
    Mutant("nobody hears that others have ended", "heard.over > 0 or heard.has_parted", "heard.has_parted", BREAKS),
    Mutant(
        "nobody is told that a world broke",
        "return answer if is_told else with_before(answer, broke)",
        "return answer",
        BREAKS,
    ),
    Mutant(
        "who leaves does not say so",
        "return with_before(_look_elsewhere(replica, arriving, agreement.until, agreement.step), left)",
        "return _look_elsewhere(replica, arriving, agreement.until, agreement.step)",
        CALLS,
    ),
    Mutant(
        "one seat is handed a bucket for all",
        "return replica._replace(record=replace(record, by=by)), ()\n    bucket",
        "pass\n    bucket",
        SEATS,
    ),
    Mutant(
        "one seat takes the state for all",
        "return replica._replace(record=replace(record, by=by)), ()\n    agreement = _agreement(record.meeting)",
        "pass\n    agreement = _agreement(record.meeting)",
        SEATS,
    ),
    Mutant(
        "one seat waits at the end for all",
        "return replica._replace(record=record), ()\n    if record.is_awaited",
        "pass\n    if record.is_awaited",
        SEATS,
    ),
    Mutant(
        "one that was cut off takes another state",
        "record.has_state and rank in agreement.pull and",
        "False and rank in agreement.pull and",
        Bounds(2, (2,), breaks=2),
    ),
    # -- states that differ, or cannot be sent
    Mutant(
        "sums count though whose state is wrong is not known, and who had a share in them is lost",
        "adopt_newest(_without_doubtful(replica))",
        "adopt_newest(replica)",
        DIFFERS,
    ),
    Mutant(
        "nobody compares states that differ",
        "    if replica.work.differs:\n        return replica._replace(record=Comparing())",
        "    if False:\n        return replica._replace(record=Comparing())",
        DIFFERS,
    ),
    Mutant(
        "a newcomer that is refused the state thinks that it has it",
        "    return _leave(replica, record.meeting, _agreement(record.meeting), why)",
        "    return _end_moving(replica, record, Moved())",
        Bounds(1, (2,), micro_batches=1, newcomers=1, grows=True, refusals=1),
    ),
    # -- means
    Mutant("a mean that a member has is not given", "means=tuple(reports_to_give(said))", "means=()", MEANS),
    Mutant(
        "one that is given a mean sums it again",
        "if record.has_mean:\n        return _return_given(replica, back)\n    if",
        "if",
        MEANS,
    ),
    Mutant("who is late waits for a mean", "in {Standing.APART, Standing.AMONG}:", "is Standing.AMONG:", MEANS_AT_END),
    Mutant(
        "one whose members are in the step waits for a mean",
        "if back.standing is Standing.AMONG:",
        "if False:",
        Bounds(2, (2,), breaks=1, means=("before",)),
    ),
    Mutant(
        "what is dealt between two steps is forgotten",
        "back = replace(back, standing=before_step)",
        "pass",
        MEANS,
    ),
    Mutant(
        "who waits at the end stays though others have left it",
        "return _finish(replica, Standing.EVEN) if record.have_parted else _wait_at_end(replica)",
        "return _wait_at_end(replica)",
        MEANS_AT_END,
    ),
    Mutant(
        "one seat averages for all",
        "return replica._replace(record=replace(record, by=by)), ()\n    return replica._replace(record=record.back)",
        "pass\n    return replica._replace(record=record.back)",
        Bounds(2, (1,), seats=2, means=("behind",)),
    ),
)
