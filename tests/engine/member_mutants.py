"""The protocol of a member with one of its checks taken out, and in which bounds that is to be found."""

from __future__ import annotations

from dataclasses import dataclass

from interleavings import Decide
from member_interleavings import MemberBounds
from mutants import changed

from unicron_elastic.engine.protocol import handle_member, replica_agreement

LOSS = MemberBounds(2, 1, losses=1)
REPLACED = MemberBounds(2, 1, steps=2, losses=1, newcomers=1)
PARTS = MemberBounds(2, 1, steps=2, losses=1, is_sharded=True)
ASKS = MemberBounds(2, 1, steps=2, losses=1, is_sharded=True, sums=True, evaluates=True)
PAIR_EVALUATES = MemberBounds(1, 2, steps=2, breaks=1, is_sharded=True, evaluates=True)
BREAK = MemberBounds(2, 1, breaks=1)
PAIR_BREAKS = MemberBounds(1, 2, steps=2, breaks=1)
PAIRS = MemberBounds(2, 2, losses=1, victims=(0,), first=4, window=3)
PAIRS_LATER = MemberBounds(2, 2, losses=1, victims=(0,), first=12, window=3)
PAIRS_AT_END = MemberBounds(2, 2, losses=1, victims=(0,), first=20, window=4)


@dataclass(frozen=True, slots=True)
class MemberMutant:
    """`MemberMutant` is what is said of it, what is replaced by what, and in which bounds it is to be found."""

    what: str
    old: str
    new: str
    bounds: MemberBounds

    def decide(self) -> Decide:
        """Return the protocol with the change."""
        decide: Decide = changed(self, replica_agreement, handle_member).handle_member
        return decide


MEMBER_MUTANTS = (
    # -- what all conclude
    MemberMutant(
        "what one member alone has summed up counts",
        "held.pop() if layout.names[replica] is not None and len(held) == 1",
        "max(held, key=len) if layout.names[replica] is not None",
        PAIR_BREAKS,
    ),
    MemberMutant("what the lost had is dealt to nobody", "if is_open else []", "if False else []", LOSS),
    # -- sums
    MemberMutant(
        "passes that broke leave their sums",
        "    if isinstance(record, Computing):\n        member =",
        "    if False:\n        member =",
        PAIR_BREAKS,
    ),
    MemberMutant(
        "what was summed up within is not taken back",
        "Restore(work.progress is Progress.WITHIN,",
        "Restore(False,",
        PAIR_BREAKS,
    ),
    MemberMutant(
        "a bucket that some have is not given",
        "for seat, bucket, source in agreement.fill if seat == member.seat)",
        "for seat, bucket, source in agreement.fill if False)",
        BREAK,
    ),
    MemberMutant(
        "what is not the same in a replica stays", "if agreement.held[number] != work.held:", "if False:", PAIR_BREAKS
    ),
    MemberMutant(
        "what is whole, and not committed, is summed up once more",
        "if work.progress is Progress.WHOLE:",
        "if False:",
        PAIR_BREAKS,
    ),
    MemberMutant("tokens are counted again by who has dropped them", "tokens=agreement.tokens", "tokens=None", LOSS),
    MemberMutant(
        "buckets are reduced in passes of more", "may_reduce = not (work.held or work.done)", "may_reduce = True", LOSS
    ),
    # -- the commit and the optimizer
    MemberMutant(
        "a step is committed in a world that broke",
        "    if isinstance(record, Computing):\n        member =",
        "    if isinstance(record, Confirming):\n        return _commit(member, record, _event)\n"
        "    if isinstance(record, Computing):\n        member =",
        PAIR_BREAKS,
    ),
    MemberMutant(
        "the norm of the step before is used again",
        "member.work._replace(norm=None, progress",
        "member.work._replace(progress",
        MemberBounds(2, 1, steps=2),
    ),
    MemberMutant(
        "who is late thinks that it has met",
        "record=Stepping(Standing.APART, is_behind=True)), (commit,)",
        "record=Stepping(Standing.EVEN, is_behind=True)), (commit,)",
        MemberBounds(2, 1, steps=2, breaks=1),
    ),
    # -- meetings
    MemberMutant(
        "a newcomer says that it has the state",
        "has_state=record.standing is not Standing.NEW",
        "has_state=True",
        REPLACED,
    ),
    MemberMutant(
        "nobody waits at the end",
        "    if is_last:\n        return _part(member)",
        "    if is_last:\n        return _finish(member)",
        PAIRS_AT_END,
    ),
    MemberMutant(
        "a step that is made in a meeting goes back to the script at once",
        "if standing is not Standing.EVEN and (is_last or member.is_sharded):",
        "if standing is not Standing.EVEN and is_last:",
        PARTS,
    ),
    MemberMutant(
        "a member evaluates while the others of its replica are in the next step",
        "Standing.MET if agreement.between.issuperset(member.layout.replicas[number]) else Standing.AMONG",
        "Standing.MET",
        PAIR_EVALUATES,
    ),
    MemberMutant(
        "a sum behind the last step lacks the share of who was lost behind its gradients",
        "if isinstance(record, Finished) and member.work.confirmed_in != member.met_number:",
        "if False:",
        ASKS,
    ),
    MemberMutant(
        "who needs nobody for an evaluation does not evaluate behind a loss",
        "    if member.shape.seats == 1:\n        return True\n",
        "",
        ASKS,
    ),
    MemberMutant(
        "who is stranded at the end does not ask whether it is over",
        "return member._replace(record=Stranded(str(error))), (asks,)",
        "return fail(member, 'no state left', str(error))",
        PAIR_BREAKS,
    ),
    MemberMutant(
        "nobody is told that a world broke",
        "    if not member.knows_newer:\n        broke = (",
        "    if False:\n        broke = (",
        BREAK,
    ),
    MemberMutant(
        "who enters late leaves the groups of the script open",
        "return with_before(meets_later, Disconnect(1, reason=reason))",
        "return meets_later",
        MemberBounds(2, 2, enters=True, losses=1, victims=(3,), window=5),
    ),
    MemberMutant(
        "who leaves a world for a newer one leaves its connections there open",
        "if member.met is None or not (member.knows_newer and member.is_connected) or member.shape.seats == 1:",
        "if True:",
        MemberBounds(2, 2, steps=2, losses=1, victims=(3,), evaluates=True, first=26, window=3),
    ),
)
