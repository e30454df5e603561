"""What one member of a replica of several processes does, whoever is lost meanwhile: ``handle_member(member, event)``.

Pure, like `handle`, whose phases, events and commands it shares where they mean the same. It is a function of its own
because who decides is another: each process for itself, as its replica may be put together anew of other processes, or
go on without one; there, a replica of several is lost with all of them.

A step is: passes; the sum of all tokens; the sum of each bucket over all replicas; what the members of a replica sum up
among themselves; and one word from all to all, with which the step is *committed*. What breaks before that is made
again with the members of the next world. Behind it the optimizer makes its step, with the other members of the replica;
what breaks there is made again, or the state taken of those who have made it.

In each newer world all meet: they speak, lay out replicas, make their process groups, and do what the agreement says in
as many rounds as it takes. Those who ``advance`` make the step before, which the others know to be whole, and then meet
again; who is in no replica sits out until the next world. Any newer world ends what goes on in the one before, but for
passes, which need nobody but the own replica. Where the optimizer is sharded, a step that is made in a meeting goes
back to the script when all have met behind it: of the parameters each has its own part alone until then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from unicron_elastic.engine.protocol.agreement import NoStateLeft
from unicron_elastic.engine.protocol.handle_by import (
    CLEAR,
    ProtocolError,
    adopt_newest,
    await_newer,
    fail,
    fail_outside,
    handle_by,
    with_before,
)
from unicron_elastic.engine.protocol.member_command import (
    AskEnd,
    Confirm,
    CountTokens,
    Disconnect,
    Drop,
    EndProcess,
    Evaluate,
    FindNorm,
    MakeStep,
    Restore,
    Settle,
    SitOut,
    SumWithin,
)
from unicron_elastic.engine.protocol.member_event import (
    Confirmed,
    Evaluated,
    EvaluationAsked,
    NormFound,
    OthersEnded,
    OthersTrain,
    Settled,
    StepAsked,
    SummedWithin,
    TokensCounted,
)
from unicron_elastic.engine.protocol.replica_agreement import MemberSaid, ReplicaAgreement, agree
from unicron_elastic.engine.protocol.replica_command import (
    AskAgent,
    Average,
    Commit,
    Compute,
    Gather,
    HandOver,
    LetGo,
    MakeGroup,
    MoveState,
    NoteMeeting,
    Reduce,
    ReplicaCommand,
    ReturnMean,
    Say,
    TellBroke,
    TellParted,
    TellReady,
)
from unicron_elastic.engine.protocol.replica_event import (
    AllSaid,
    Answered,
    Averaged,
    CallBegun,
    Computed,
    Connected,
    Gathered,
    GroupBroke,
    Handed,
    MeanAsked,
    MoreAsked,
    Moved,
    Reduced,
    ReplicaEvent,
    RoundLeft,
    StepBegun,
    StepMade,
    WorldHeard,
)
from unicron_elastic.engine.protocol.replica_layout import first_layout, name_of
from unicron_elastic.engine.protocol.replica_member import (
    Confirming,
    CountingTokens,
    Evaluating,
    FindingNorm,
    Making,
    Progress,
    ReplicaMember,
    Settling,
    SittingOut,
    StepWork,
    Stranded,
    SummingWithin,
)
from unicron_elastic.engine.protocol.replica_phase import (
    Arriving,
    Averaging,
    Computing,
    Errand,
    Finished,
    Handing,
    InMeeting,
    Moving,
    Outside,
    Parting,
    Reducing,
    Spot,
    Standing,
    Stepping,
    Talk,
)

MemberAnswer: TypeAlias = tuple[ReplicaMember, tuple[ReplicaCommand, ...]]
_DROP = Drop(reason="not all members of its replica have the same in their sums")


def handle_member(member: ReplicaMember, event: ReplicaEvent) -> MemberAnswer:
    """Return the member behind the event, and what it is to do. Raises ProtocolError."""
    if isinstance(event, WorldHeard):
        return _hear_world(member._replace(heard=event.world, heard_rank=event.rank))
    return handle_by(_HANDLERS, member, event)


def _let_go(member: ReplicaMember, record: Any, reason: str, *, is_over: bool = False) -> MemberAnswer:
    return member._replace(record=record), (LetGo(is_over, reason=reason),)


def _begin_call(member: ReplicaMember, _record: Outside, event: CallBegun) -> MemberAnswer:
    asks = AskAgent(reason="the script begins to train")
    return member._replace(until=event.until, record=Arriving()), (asks,)


def _hear_answer(member: ReplicaMember, record: Arriving, event: Answered) -> MemberAnswer:
    if not event.is_member:
        ready = TellReady(reason="others train already, and give their state to those whom they meet")
        return member._replace(replica=None, record=replace(record, errand=Errand.WORLD)), (ready,)
    world, at_rest = member.heard, Stepping(Standing.EVEN, is_behind=False)
    if world is not None and world.number > 1:
        reason = "the world of the script's own groups is left, and who trains in them would wait for this one"
        meets_later = _let_go(member, at_rest, "it meets the others in its first step")
        return with_before(meets_later, Disconnect(1, reason=reason))
    if world is not None and member.heard_rank is not None:
        layout = first_layout(member.shape, world.size)
        work = member.work._replace(confirmed_in=world.number)  # of steps before it begins nobody's share is missing
        member = member._replace(met=world, rank=member.heard_rank, layout=layout, work=work, is_connected=True)
    return _let_go(member, at_rest, "the process groups are those of the script")


def _hear_world(member: ReplicaMember) -> MemberAnswer:
    match member.record:
        case Arriving(errand=Errand.WORLD) if member.heard_rank is not None:
            return _let_go(
                member, Stepping(Standing.NEW, is_behind=False), "a world has it, and it can meet the others"
            )
        case InMeeting(talk=Talk.WORLD) if member.knows_newer:
            return _meet(member, member.record)
        case SittingOut(meeting=meeting) if member.knows_newer:
            return _meet(member, meeting)
    return member, ()


def _meet(member: ReplicaMember, meeting: InMeeting) -> MemberAnswer:
    """Speak in the newest world, with sums as they were before anything broke.

    Others of its replica may be in passes of the world before, which a newer one does not end: they would wait for this
    one, so that its connections there are broken.
    """
    leaves = _leaves(member)
    if member.knows_newer:
        newer = adopt_newest(member)
        if newer is None:
            return fail_outside(member)
        member = newer
    assert member.met is not None
    number = member.met.number
    member, mends = _mend(member)
    say = Say(number, _said(member, meeting), reason=f"the members of world {number} say where they are")
    return member._replace(record=replace(meeting, talk=Talk.ALL, agreement=None)), (*leaves, *mends, say)


def _mend(member: ReplicaMember) -> tuple[ReplicaMember, tuple[ReplicaCommand, ...]]:
    """Put the gradients in order that a break has left in disorder."""
    work = member.work
    if work.progress in {Progress.WHOLE, Progress.COMMITTED}:  # if anybody has committed them, they are as they must be
        return member, ()
    restore = Restore(work.progress is Progress.WITHIN, reason="what broke may have changed the sums")
    done = frozenset[int]() if member.is_sharded else work.done  # each has its part of a sum only
    work, is_spoiled = work._replace(progress=Progress.OPEN, done=done), work.progress is Progress.SPOILED
    if is_spoiled:
        drop = Drop(reason="passes broke on the way, and nobody knows what is in the sums")
        return member._replace(work=work._replace(held=frozenset())), (restore, drop)
    return member._replace(work=work), (restore,)


def _said(member: ReplicaMember, meeting: InMeeting) -> MemberSaid:
    work = member.work
    return MemberSaid(
        seat=member.seat,
        replica=member.replica,
        state=member.step if meeting.has_state else None,
        buckets=member.buckets,
        held=work.held,
        done=frozenset() if member.is_sharded else work.done,
        is_finished=work.progress in {Progress.WHOLE, Progress.COMMITTED},
        is_committed=work.progress is Progress.COMMITTED,
        tokens=work.tokens,
        norm=work.norm,
        is_between=meeting.spot is Spot.BETWEEN,
    )


def _leave_round(member: ReplicaMember, record: InMeeting, _event: RoundLeft) -> MemberAnswer:
    return _meet(member, record)


def _hear_all(member: ReplicaMember, record: InMeeting, event: AllSaid) -> MemberAnswer:
    assert member.met is not None
    said = [each for each in event.said if isinstance(each, MemberSaid)]
    try:
        agreement = agree(
            said,
            shape=member.shape,
            micro_batches=member.micro_batches,
            unit=member.unit,
            layout=member.layout if member.is_connected else None,
            nodes=[each.node for each in member.met.members],
        )
    except NoStateLeft as error:
        asks = AskEnd(reason="too few are left to train on, unless the training is over")
        return member._replace(record=Stranded(str(error))), (asks,)
    record = replace(record, agreement=agreement)
    if member.is_connected:
        return _conclude(member, record)
    make = MakeGroup(member.met.number, agreement.layout, reason="all have spoken, and the world has no groups yet")
    return member._replace(record=replace(record, talk=Talk.GROUP)), (make,)


def _connect(member: ReplicaMember, record: InMeeting, _event: Connected) -> MemberAnswer:
    assert member.met is not None
    layout = _agreement(record).layout
    number = layout.replica_of(member.rank)
    name = None if number is None else layout.names[number] or name_of(member.met.number, number)
    return _conclude(member._replace(layout=layout, replica=name, is_connected=True), record)


def _agreement(record: InMeeting) -> ReplicaAgreement:
    agreement: ReplicaAgreement | None = record.agreement
    assert agreement is not None
    return agreement


def _conclude(member: ReplicaMember, record: InMeeting) -> MemberAnswer:
    """Do what the agreement says of this member."""
    agreement = _agreement(record)
    if member.number is None:
        is_left_out = agreement.is_even and not member.knows_newer
        return _sit_out(member, record) if is_left_out else _meet(member, record)
    if agreement.advance:
        if agreement.norm is None and member.is_sharded:
            reason = "some make the step before, and nobody has found the norm of its gradients"
            find = FindNorm(agreement.cuts, is_scaled=record.spot is Spot.MAKING, reason=reason)
            return member._replace(record=FindingNorm(record)), (find,)
        return _advance(member, record, agreement.norm)
    if agreement.pull:
        pairs = zip(agreement.sources, agreement.pull, strict=True)
        return _move(member, record, tuple(pair for pair in pairs if member.rank in pair))
    return _take_part(member, record, agreement)


def _sit_out(member: ReplicaMember, record: InMeeting) -> MemberAnswer:
    member = member._replace(work=StepWork(norm=member.work.norm), record=SittingOut(record))
    drop = Drop(reason="a spare has no share in the step of the others")
    note = NoteMeeting((), reason="all members are in one step with one state, and this one is in no replica")
    return member, (CLEAR, drop, note, SitOut(reason="no replica can be made of this member and other spares"))


def _find_norm(member: ReplicaMember, record: FindingNorm, event: NormFound) -> MemberAnswer:
    return _advance(member, record.meeting, event.norm)


def _advance(member: ReplicaMember, record: InMeeting, norm: float | None) -> MemberAnswer:
    """Make the step that the others have made, or make too: its gradients are here."""
    if member.rank not in _agreement(record).advance:
        return _meet(member, record)
    member = member._replace(work=member.work._replace(norm=norm, progress=Progress.COMMITTED))
    if record.spot is Spot.MAKING:
        return _make(member, Standing.APART)
    commit = Commit(member.step, reason="others know that all have the gradients of this step")
    return member._replace(record=Stepping(Standing.APART, is_behind=True)), (commit,)


def _move(member: ReplicaMember, record: InMeeting, left: tuple[tuple[int, int], ...]) -> MemberAnswer:
    """Give the state to those of this seat who have none, or take it, one after another."""
    if not left:
        return _meet(member, record)
    source, to = left[0]
    reason = "this member has the state of the step, and another one in its seat needs it"
    behind = _agreement(record).step - member.step if record.spot in {Spot.MAKING, Spot.BETWEEN} else 0
    move = MoveState(source, (to,), begins=False, behind=behind, reason=reason)
    return member._replace(record=Moving(record, left=left)), (move,)


def _end_moving(member: ReplicaMember, record: Moving, _event: Moved) -> MemberAnswer:
    _, to = record.left[0]
    if to != member.rank:
        return _move(member, record.meeting, record.left[1:])
    drop = Drop(reason="what it had summed up was for another step")
    agreement = _agreement(record.meeting)
    member = member._replace(step=agreement.step, work=_next_work(member)._replace(norm=agreement.norm))
    if record.meeting.spot not in {Spot.MAKING, Spot.BETWEEN}:
        return with_before(_meet(member, replace(record.meeting, has_state=True)), CLEAR, drop)
    return with_before(_end_making(member, Standing.APART), CLEAR, drop)


def _take_part(member: ReplicaMember, record: InMeeting, agreement: ReplicaAgreement) -> MemberAnswer:
    """Take over what this member is to do of the step in which all are."""
    if record.spot is Spot.MAKING:
        raise ProtocolError("a step that is committed cannot be open again")
    commands: tuple[ReplicaCommand, ...] = ()
    number, work = member.number, member.work
    assert number is not None
    if work.progress is Progress.WHOLE:  # and nobody has committed it
        is_within = Progress.WITHIN if member.adds_within else Progress.OPEN
        member, commands = _mend(member._replace(work=work._replace(progress=is_within)))
        work = member.work
    if agreement.held[number] != work.held:
        work, commands = work._replace(held=frozenset()), (*commands, _DROP)
    work = work._replace(tokens=agreement.tokens, assigned=work.held | frozenset(agreement.dealt[number]))
    member = member._replace(work=work)
    if member.is_sharded:
        settle = Settle(agreement.cuts, reason="in this world replicas may have other parts of the optimizer's state")
        return member._replace(record=Settling(record)), (*commands, settle)
    return with_before(_fill(member, record, _to_fill(member, agreement)), *commands)


def _settle(member: ReplicaMember, record: Settling, event: Settled) -> MemberAnswer:
    member = member._replace(buckets=event.buckets)
    return _fill(member, record.meeting, _to_fill(member, _agreement(record.meeting)))


def _to_fill(member: ReplicaMember, agreement: ReplicaAgreement) -> tuple[tuple[int, int, None], ...]:
    return tuple((bucket, source, None) for seat, bucket, source in agreement.fill if seat == member.seat)


def _fill(
    member: ReplicaMember, record: InMeeting, left: tuple[tuple[int | None, int, int | None], ...]
) -> MemberAnswer:
    """Hand over the next bucket that some in this seat have, and others need; then go on."""
    if not left:
        dealt = _agreement(record).dealt
        note = NoteMeeting(dealt, reason="all who train are in one step with one state")
        if record.spot is Spot.BETWEEN and member.step < member.until:
            met = Stepping(_standing_between(member, _agreement(record)), is_behind=False)
            return with_before(_let_go(member, met, "the step is made, and all have met behind it"), note)
        return with_before(_go_on(member), note)
    if record.spot is Spot.BETWEEN:
        raise ProtocolError("parts of a sum are handed to nobody")
    bucket, source, _ = left[0]
    reason = "a member has the sum of this bucket, and others in its seat need it"
    return member._replace(record=Handing(record, left)), (HandOver(bucket, source, None, reason=reason),)


def _standing_between(member: ReplicaMember, agreement: ReplicaAgreement) -> Standing:
    """Return how a member stands behind a meeting before a step: the others of its replica may be in that step."""
    number = member.number
    assert number is not None
    return Standing.MET if agreement.between.issuperset(member.layout.replicas[number]) else Standing.AMONG


def _end_handing(member: ReplicaMember, record: Handing, _event: Handed) -> MemberAnswer:
    bucket = record.left[0][0]
    assert bucket is not None
    member = member._replace(work=member.work._replace(done=member.work.done | {bucket}))
    return _fill(member, record.meeting, record.left[1:])


def _hear_end(member: ReplicaMember, _record: Stranded | SittingOut, _event: OthersEnded) -> MemberAnswer:
    end = EndProcess(reason="the others have made the last step, and what this member has is of an earlier one")
    return member._replace(record=Finished(Standing.APART)), (_parted(member), end)


def _give_up(member: ReplicaMember, record: Stranded, _event: OthersTrain) -> MemberAnswer:
    return fail(member, "no state left", record.why)


def _begin_step(member: ReplicaMember, record: Stepping, _event: StepBegun) -> MemberAnswer:
    if record.standing in {Standing.MET, Standing.AMONG} and not member.needs_meeting:
        return _go_on(member)
    member = member._replace(work=_next_work(member))
    if record.standing is not Standing.EVEN or member.needs_meeting:
        return with_before(_meet_within(member, has_state=record.standing is not Standing.NEW), CLEAR)
    assigned = _share(member)
    return with_before(_go_on(member._replace(work=member.work._replace(assigned=assigned))), CLEAR)


def _next_work(member: ReplicaMember) -> StepWork:
    """Return the work of the next step, of which nothing is done."""
    return StepWork(norm=member.work.norm, confirmed_in=member.work.confirmed_in)


def _share(member: ReplicaMember) -> frozenset[int]:
    """Return the micro-batches of its replica, as Megatron-Core deals them: in turns."""
    unit, number = member.unit, member.number
    assert number is not None
    units = range(number, member.micro_batches // unit, len(member.layout.replicas))
    return frozenset(each * unit + index for each in units for index in range(unit))


def _go_on(member: ReplicaMember) -> MemberAnswer:
    """Do what is next in the step: all that comes before it is done."""
    work = member.work
    if member.step >= member.until:
        return _part(member)
    if member.needs_meeting:
        return _meet_within(member)
    if left := work.assigned - work.held:
        reason = "these micro-batches were dealt to its replica, and it has not computed them"
        may_reduce = not (work.held or work.done)
        return member._replace(record=Computing(left)), (Compute(tuple(sorted(left)), may_reduce, reason=reason),)
    if work.tokens is None:  # before any bucket is done: who has one knows the tokens
        count = CountTokens(reason="all gradients are divided by the tokens of the whole step")
        return member._replace(record=CountingTokens()), (count,)
    if buckets := tuple(bucket for bucket in range(member.buckets) if bucket not in work.done):
        record = Reducing(frozenset((bucket, 0) for bucket in buckets))
        return member._replace(record=record), (Reduce(buckets, reason="all that was dealt is computed"),)
    if work.progress is Progress.OPEN:
        progress = Progress.WITHIN if member.adds_within else Progress.OPEN
        sums = SumWithin(member.adds_within, reason="all buckets are reduced, and the members of a replica share some")
        return member._replace(record=SummingWithin(), work=work._replace(progress=progress)), (sums,)
    confirm = Confirm(reason="a step counts when all have all gradients")
    return member._replace(record=Confirming(), work=work._replace(confirmed_in=member.met_number)), (confirm,)


def _meet_within(member: ReplicaMember, *, has_state: bool = True) -> MemberAnswer:
    return _meet_at(member, Spot.WITHIN, has_state=has_state)


def _meet_at(member: ReplicaMember, spot: Spot, *, has_state: bool = True) -> MemberAnswer:
    meeting = InMeeting(spot, Talk.ALL, has_state=has_state)
    return _meet(member, meeting) if member.is_connected else _await_newer(member, meeting)


def _end_computing(member: ReplicaMember, record: Computing, event: Computed) -> MemberAnswer:
    if event.index not in record.left:
        raise ProtocolError(f"micro-batch {event.index} is computed, and was not dealt")
    return member._replace(record=replace(record, left=record.left - {event.index})), ()


def _ask_more(member: ReplicaMember, record: Computing, event: MoreAsked) -> MemberAnswer:
    if record.left:
        raise ProtocolError(f"the script asks for more, and has not computed {sorted(record.left)}")
    if _may_lack(member):
        return _break(member, record, event)
    return _go_on(member._replace(work=member.work._replace(held=member.work.assigned)))


def _leaves(member: ReplicaMember) -> tuple[ReplicaCommand, ...]:
    """Break the connections of a world that is left for a newer one, which ends no passes: others may be in them."""
    if member.met is None or not (member.knows_newer and member.is_connected) or member.shape.seats == 1:
        return ()
    return (
        Disconnect(member.met.number, reason="a newer world has come: this member makes no more passes in this one"),
    )


def _may_lack(member: ReplicaMember) -> bool:
    """Tell whether connections within the replica were broken in its passes: on NCCL these may have ended even so."""
    heard = member.heard
    return member.shape.seats > 1 and heard is not None and member.knows_newer and not member.may_go_on(heard)


def _count(member: ReplicaMember, _record: CountingTokens, event: TokensCounted) -> MemberAnswer:
    return _go_on(member._replace(work=member.work._replace(tokens=event.tokens)))


def _end_reducing(member: ReplicaMember, record: Reducing, event: Reduced) -> MemberAnswer:
    one = (event.bucket, 0)
    if one not in record.left:
        raise ProtocolError(f"bucket {event.bucket} is not being reduced")
    left = record.left - {one}
    member = member._replace(work=member.work._replace(done=member.work.done | {event.bucket}))
    return (member._replace(record=Reducing(left)), ()) if left else _go_on(member)


def _end_within(member: ReplicaMember, _record: SummingWithin, _event: SummedWithin) -> MemberAnswer:
    return _go_on(member._replace(work=member.work._replace(progress=Progress.WHOLE)))


def _commit(member: ReplicaMember, _record: Confirming, _event: Confirmed) -> MemberAnswer:
    work = member.work._replace(norm=None, progress=Progress.COMMITTED)
    commit = Commit(member.step, reason="all who train have all gradients")
    return member._replace(record=Stepping(Standing.EVEN, is_behind=True), work=work), (commit,)


def _ask_step(member: ReplicaMember, record: Stepping, _event: StepAsked) -> MemberAnswer:
    if not record.is_behind:
        raise ProtocolError("the optimizer is called, and there are no gradients of a step")
    return _make(member, record.standing)


def _make(member: ReplicaMember, standing: Standing) -> MemberAnswer:
    make = MakeStep(is_apart=standing is Standing.APART, reason="the gradients of the step are whole, and all know")
    return member._replace(record=Making(standing)), (make,)


def _note_norm(member: ReplicaMember, _record: Stepping | Making | Finished, event: NormFound) -> MemberAnswer:
    return member._replace(work=member.work._replace(norm=event.norm)), ()


def _end_step(member: ReplicaMember, record: Making, _event: StepMade) -> MemberAnswer:
    member = member._replace(step=member.step + 1, work=_next_work(member))
    return with_before(_end_making(member, record.standing), CLEAR)


def _end_making(member: ReplicaMember, standing: Standing) -> MemberAnswer:
    """Go on behind the optimizer's step, with the others if that was the last."""
    is_last = member.step >= member.until
    if standing is not Standing.EVEN and (is_last or member.is_sharded):
        return _meet_at(member, Spot.WITHIN if is_last else Spot.BETWEEN)
    if is_last:
        return _part(member)
    return _let_go(member, Stepping(standing, is_behind=False), "the step is made")


def _part(member: ReplicaMember) -> MemberAnswer:
    if member.needs_meeting:
        return _meet_within(member)
    reason = "nobody leaves before all are here: one may have missed the end of the last step"
    return member._replace(record=Parting()), (Gather(is_awaited=False, reason=reason),)


def _end_gathering(member: ReplicaMember, _record: Parting, _event: Gathered) -> MemberAnswer:
    return _finish(member)


def _finish(member: ReplicaMember) -> MemberAnswer:
    let_go = _let_go(member, Finished(Standing.EVEN), "all steps are made", is_over=True)
    return with_before(let_go, _parted(member))


def _parted(member: ReplicaMember) -> TellParted:
    return TellParted(member.met_number, member.until, reason="nobody needs this member any more")


def _begin_no_step(member: ReplicaMember, record: Finished, _event: StepBegun) -> MemberAnswer:
    return _let_go(member, record, "all steps are made", is_over=True)


def _ask_mean(member: ReplicaMember, record: Stepping | Finished, _event: MeanAsked) -> MemberAnswer:
    if record.standing is not Standing.EVEN or member.needs_meeting:
        own = ReturnMean(is_own=True, reason="it has not met the others, who may be elsewhere")
        return member, (own,)
    if isinstance(record, Finished) and member.work.confirmed_in != member.met_number:
        return member, (ReturnMean(is_own=True, reason="who was lost behind the last gradients cannot give its share"),)
    return member._replace(record=Averaging(record)), (Average(reason="the script of each rank asks for it"),)


def _end_averaging(member: ReplicaMember, record: Averaging, _event: Averaged) -> MemberAnswer:
    return member._replace(record=record.back), (ReturnMean(is_own=False, reason="all have come, and have it"),)


def _ask_evaluation(member: ReplicaMember, record: Stepping | Finished, _event: EvaluationAsked) -> MemberAnswer:
    if isinstance(record, Stepping) and not _may_evaluate(member, record):
        return _let_go(member, record, "the other members of its replica may be elsewhere")
    return member._replace(record=Evaluating(record)), (Evaluate(reason="its replica is whole, as far as it knows"),)


def _may_evaluate(member: ReplicaMember, record: Stepping) -> bool:
    """Tell whether its parameters are good for passes, and all of its replica come to them, as far as it knows."""
    if record.standing is Standing.NEW:
        return False
    if member.shape.seats == 1:
        return True
    if record.standing not in {Standing.EVEN, Standing.MET} or not member.is_connected:
        return False
    heard = member.heard
    return heard is None or not member.knows_newer or member._replace(record=Evaluating(record)).may_go_on(heard)


def _end_evaluating(member: ReplicaMember, record: Evaluating, event: Evaluated) -> MemberAnswer:
    if _may_lack(member):
        return _break(member, record, event)
    over = isinstance(record.back, Finished)
    return with_before(_let_go(member, record.back, "its passes have ended", is_over=over), *_leaves(member))


def _break(member: ReplicaMember, record: Any, _event: ReplicaEvent) -> MemberAnswer:
    """Break with this world, and meet the others in the next; or go back to the script, and meet them later."""
    assert member.met is not None
    if isinstance(record, Averaging | Evaluating) and isinstance(record.back, Finished):
        return _return(member, record)  # nobody needs this member any more, nor it them
    broke = _leaves(member)
    if not member.knows_newer:
        broke = (
            TellBroke(member.met.number, reason="what members do together has failed, and no newer world says why"),
        )
    member = member._replace(is_connected=False)
    match record:
        case Averaging() | Evaluating():
            return with_before(_return(member, record), *broke)
        case InMeeting():
            meeting = record
        case Handing(meeting=meeting) | Moving(meeting=meeting) | FindingNorm(meeting=meeting):
            pass
        case Settling(meeting=meeting):
            pass
        case Making():
            meeting = InMeeting(Spot.MAKING, Talk.ALL, has_state=True)
        case _:
            meeting = InMeeting(Spot.WITHIN, Talk.ALL, has_state=True)
    if isinstance(record, Computing):
        member = member._replace(work=member.work._replace(progress=Progress.SPOILED))
    return with_before(_await_newer(member, meeting), *broke)


def _return(member: ReplicaMember, record: Averaging | Evaluating) -> MemberAnswer:
    reason = "others were lost, or came, on the way"
    if isinstance(record, Averaging):
        return member._replace(record=record.back), (ReturnMean(is_own=True, reason=reason),)
    return _let_go(member, record.back, reason, is_over=isinstance(record.back, Finished))


def _await_newer(member: ReplicaMember, meeting: InMeeting) -> MemberAnswer:
    return await_newer(member, meeting, "this world has broken, and the agents make the next", _meet)


_WITH_OTHERS = (
    InMeeting,
    Handing,
    Moving,
    FindingNorm,
    Settling,
    Computing,
    CountingTokens,
    Reducing,
    SummingWithin,
    Confirming,
    Making,
    Parting,
    Averaging,
    Evaluating,
)

_HANDLERS: dict[tuple[type, type], Callable[[ReplicaMember, Any, Any], MemberAnswer]] = {
    (Outside, CallBegun): _begin_call,
    (Arriving, Answered): _hear_answer,
    (InMeeting, AllSaid): _hear_all,
    (InMeeting, RoundLeft): _leave_round,
    (InMeeting, Connected): _connect,
    (FindingNorm, NormFound): _find_norm,
    (Moving, Moved): _end_moving,
    (Settling, Settled): _settle,
    (Handing, Handed): _end_handing,
    (Stranded, OthersEnded): _hear_end,
    (Stranded, OthersTrain): _give_up,
    (SittingOut, OthersEnded): _hear_end,
    (Stepping, StepBegun): _begin_step,
    (Finished, StepBegun): _begin_no_step,
    (Computing, Computed): _end_computing,
    (Computing, MoreAsked): _ask_more,
    (CountingTokens, TokensCounted): _count,
    (Reducing, Reduced): _end_reducing,
    (SummingWithin, SummedWithin): _end_within,
    (Confirming, Confirmed): _commit,
    (Stepping, StepAsked): _ask_step,
    **{(kind, NormFound): _note_norm for kind in (Stepping, Making, Finished)},
    (Making, StepMade): _end_step,
    (Parting, Gathered): _end_gathering,
    **{(kind, MeanAsked): _ask_mean for kind in (Stepping, Finished)},
    (Averaging, Averaged): _end_averaging,
    **{(kind, EvaluationAsked): _ask_evaluation for kind in (Stepping, Finished)},
    (Evaluating, Evaluated): _end_evaluating,
    **{(kind, GroupBroke): _break for kind in _WITH_OTHERS},
}
