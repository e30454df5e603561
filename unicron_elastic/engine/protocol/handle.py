"""What a replica does that trains with others, whoever is lost meanwhile: ``handle(replica, event)``, and no more.

Pure: no torch, no time, no input and output. What the members of a new world conclude from what each says is in
`agreement`; here is when they meet, and what follows in each.

A replica has *met* its world when all members have spoken in one round of the meeting, their process group stands, and
all are in the same step with the same parameters. Until then it does nothing with others but meet. It meets

- when its script calls ``run.steps()`` for the first time: as one of the first, or as a newcomer with a copied state;
- when the script asks for the first micro-batch, and when it has computed what it was dealt, if its world was left;
- when the reduction has broken, or has told of a newcomer whose world has come;
- when the script asks for a mean between two steps, or behind a call, and its world was left or breaks on the way;
- at the end of a call, in which all stay until all are there: one of them may have missed the end of a reduction.

One that finds the others a step ahead is *late*: it has, or is given, the gradients of that step, makes it alone, and
meets them again. Its state may be copied from the moment when the script asks for the first micro-batch of a step until
the first reduction, in which all hear of it; those who copy are waited for before the script may change the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from unicron_elastic.base.world import EndOfSteps
from unicron_elastic.engine.protocol.agreement import Agreement, NoStateLeft, agree
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
from unicron_elastic.engine.protocol.replica_command import (
    AskAgent,
    Average,
    AwaitHolders,
    AwaitWorld,
    BeginReduce,
    BreakOff,
    Clear,
    Commit,
    Compare,
    Compute,
    CopyState,
    Gather,
    HandOver,
    LetGo,
    MakeGroup,
    MoveState,
    NoteMeeting,
    Reduce,
    ReleaseSource,
    ReplicaCommand,
    ReturnMean,
    Say,
    TellBroke,
    TellEntered,
    TellLeft,
    TellParted,
    TellReady,
)
from unicron_elastic.engine.protocol.replica_event import (
    AllSaid,
    Answered,
    Averaged,
    BucketReady,
    CallBegun,
    CallEnded,
    Computed,
    Connected,
    Copied,
    Gathered,
    GroupBroke,
    Handed,
    HoldBegan,
    HoldEnded,
    Judged,
    LaidOut,
    MeanAsked,
    MoreAsked,
    Moved,
    NotCopied,
    Outgrown,
    PatienceOver,
    Reduced,
    ReplicaEvent,
    RoundLeft,
    StateRefused,
    StepBegun,
    StepMade,
    WhoIsWrong,
    WorldHeard,
)
from unicron_elastic.engine.protocol.replica_phase import (
    Arriving,
    Averaging,
    Committed,
    Comparing,
    Computing,
    Errand,
    Finished,
    Handing,
    InMeeting,
    Moving,
    Outside,
    Parting,
    Passing,
    Reducing,
    Replica,
    Spot,
    Standing,
    Stepping,
    Talk,
    WaitFor,
    Work,
)
from unicron_elastic.engine.protocol.said import Said
from unicron_elastic.engine.protocol.tree import shares

COPIES_MAX = 2  # of one newcomer; for each that is too slow the others wait in vain
Answer: TypeAlias = tuple[Replica, tuple[ReplicaCommand, ...]]


def handle(replica: Replica, event: ReplicaEvent) -> Answer:
    """Return the replica behind the event, and what it is to do. Raises ProtocolError."""
    match event:
        case WorldHeard(world=world, rank=rank):
            return _hear_world(replica._replace(heard=world, heard_rank=rank))
        case HoldBegan():
            if not replica.may_be_copied:
                raise ProtocolError(f"nobody may begin to copy the state of one that is {replica.phase.value}")
            return replica._replace(holders=replica.holders + 1), ()
        case HoldEnded():
            return _end_hold(replica._replace(holders=replica.holders - 1))
        case PatienceOver():
            return _end_patience(replica)
        case LaidOut(buckets=buckets):
            work = replica.work._replace(done=frozenset(), has_last=False)
            return replica._replace(buckets=buckets, work=work), ()
    return handle_by(_HANDLERS, replica, event)


def _cleared(replica: Replica) -> Replica:
    """Nothing of the step that begins is done."""
    return replica._replace(work=Work(has_last=replica.is_complete))


def _begin_call(replica: Replica, record: Outside | Passing, event: CallBegun) -> Answer:
    replica = replica._replace(until=event.until)
    if isinstance(record, Outside):
        return _ask(replica, Arriving())
    if event.until < record.others_until:
        return replica._replace(step=event.until), (
            LetGo(is_over=True, reason="the others have that call behind them"),
        )
    arriving = Arriving(copies=record.copies, others_until=record.others_until)
    if record.kept is None:
        return _ask(replica, arriving)
    return _use_copy(replica, arriving, *record.kept)


def _ask(replica: Replica, arriving: Arriving, *, is_again: bool = False) -> Answer:
    record = replace(arriving, errand=Errand.ANSWER, has_copy=False)
    reason = "the others were elsewhere, or gave no state" if is_again else "the script begins to train"
    step = 0 if is_again else replica.step
    return replica._replace(record=record, step=step), (AskAgent(is_again, reason=reason),)


def _hear_answer(replica: Replica, record: Arriving, event: Answered) -> Answer:
    if event.is_member:
        return _meet(replica, InMeeting(Spot.FIRST, Talk.ALL, has_state=False))
    replica = replica._replace(step=0)  # with what it would begin it was not there
    if event.where is not None and event.where[0] != replica.until:
        return _look_elsewhere(replica, record, *event.where)
    if not event.has_source or record.copies >= COPIES_MAX:
        return _await_join(replica, replace(record, has_copy=False))
    copying = CopyState(reason="others train already, and one of them gives its state")
    return replica._replace(record=replace(record, errand=Errand.COPY)), (copying,)


def _take_copy(replica: Replica, record: Arriving, event: Copied) -> Answer:
    return _use_copy(replica, replace(record, copies=record.copies + 1), event.until, event.step)


def _use_copy(replica: Replica, record: Arriving, until: int, step: int) -> Answer:
    if until == replica.until:
        return _await_join(replica._replace(step=step), replace(record, has_copy=True))
    if until > replica.until:
        return _look_elsewhere(replica, record, until, step, kept=(until, step))
    release = ReleaseSource(reason="the source is in an earlier call than this newcomer")
    return with_before(_look_elsewhere(replica, record, until, step), release)


def _miss_copy(replica: Replica, record: Arriving, event: NotCopied) -> Answer:
    return _ask(replica, replace(record, copies=record.copies + (not event.is_refused)), is_again=True)


def _await_join(replica: Replica, record: Arriving) -> Answer:
    ready = TellReady(reason="this newcomer has what it can get before it meets the others")
    return replica._replace(record=replace(record, errand=Errand.WORLD)), (ready,)


def _look_elsewhere(
    replica: Replica, record: Arriving, until: int, step: int, *, kept: tuple[int, int] | None = None
) -> Answer:
    """The others are in step ``step`` of the call ``until``: pass this call by, or ask again."""
    others_until = max(record.others_until, until)
    if replica.until >= until:
        return _ask(replica, replace(record, others_until=others_until), is_again=True)
    if replica.until > step:
        reason = (
            f"this rank calls run.steps() with a total of {replica.until}, and the others train from step {step} until "
            f"{until}: all ranks must call it with the same totals, also one that comes later and counts from the "
            "beginning"
        )
        return fail(replica, "mismatch", reason)
    passing = Passing(record.copies, others_until, kept)
    let_go = LetGo(is_over=True, reason=f"the others have this call behind them, and are in step {step} of {until}")
    return replica._replace(record=passing, step=replica.until), (let_go,)


def _hear_world(replica: Replica) -> Answer:
    record = replica.record
    match record:
        case Arriving(errand=Errand.WORLD) if replica.heard_rank is not None:
            meeting = InMeeting(
                Spot.ARRIVING,
                Talk.ALL,
                has_state=record.has_copy,
                is_copy=record.has_copy,
                copies=record.copies,
                others_until=record.others_until,
            )
            release = (ReleaseSource(reason="the others are about to meet, and the copy is whole"),)
            return with_before(_meet(_cleared(replica), meeting), *(release if record.has_copy else ()), CLEAR)
        case InMeeting(talk=Talk.WORLD) if replica.knows_newer:
            return _meet(replica, record)
        case InMeeting(talk=Talk.GROUP) if replica.is_left:
            return _meet(replica, record)
        case Committed(wait=WaitFor.NEWCOMER) if replica.knows_newer:
            return _meet_within(replica)
        case Committed(wait=WaitFor.HOLDERS) if replica.is_left:
            return _meet_within(replica)
        case Parting(wait=WaitFor.NEWCOMER) if replica.knows_newer:
            return _leave_barrier(replica, must_meet=True)
        case Parting(wait=WaitFor.HOLDERS) if replica.is_left:
            return _leave_barrier(replica)
    return replica, ()


def _meet_within(replica: Replica) -> Answer:
    return _meet(replica, InMeeting(Spot.WITHIN, Talk.ALL, has_state=True))


def _is_over(replica: Replica, parts_in: int) -> bool:
    """Tell whether nobody comes to meet this one: others have ended, or have left the end at which it is."""
    heard = replica.heard
    return heard is not None and (heard.over > 0 or heard.has_parted(EndOfSteps(parts_in, replica.until)))


def _meet(replica: Replica, meeting: InMeeting) -> Answer:
    """Speak in the newest world."""
    if _is_over(replica, meeting.parts_in):
        if meeting.spot is Spot.END:
            return _finish(replica, Standing.APART, meeting.parts_in)
        if isinstance(meeting.back, Finished):
            return _return_own(replica, Finished(Standing.APART), "others have made this mean, and ended")
        reason = "other ranks have made their last step and ended: all ranks must ask for as many steps"
        return fail(replica, "over", reason)
    if replica.knows_newer:
        newer = adopt_newest(_without_doubtful(replica))
        if newer is None:
            return fail_outside(replica)
        replica = newer
    assert replica.met is not None
    said = _said(replica, meeting)
    record = replace(meeting, talk=Talk.ALL, agreement=None, by=frozenset())
    reason = f"the members of world {replica.met.number} say where they are"
    return replica._replace(record=record), (Say(replica.met.number, said, record.is_copy, reason=reason),)


def _said(replica: Replica, meeting: InMeeting) -> Said:
    is_new = meeting.spot is Spot.ARRIVING
    if not meeting.has_state:
        start = None if is_new else replica.step
        count = replica.micro_batches
        return Said(state=None, start=start, micro_batches=count, until=replica.until, is_new=is_new)
    work = replica.work
    return Said(
        state=replica.step,
        until=replica.until,
        is_new=is_new,
        is_between=meeting.spot in {Spot.FIRST, Spot.BETWEEN},
        has_parted=isinstance(meeting.back, Finished),
        held=work.held,
        done=work.done,
        keeps_last=work.has_last,
        buckets=replica.buckets,
        micro_batches=replica.micro_batches,
    )


def _leave_round(replica: Replica, record: InMeeting, _event: RoundLeft) -> Answer:
    return _meet(replica, record)


def _hear_all(replica: Replica, record: InMeeting, event: AllSaid) -> Answer:
    try:
        agreement = agree(event.said, micro_batches=replica.micro_batches)
    except NoStateLeft as error:
        return fail(replica, "no state left", str(error))
    holdings = tuple(each.held for each in event.said)
    replica = replica._replace(work=replica.work._replace(holdings=holdings))
    if replica.rank in agreement.leave:
        return _leave(replica, record, agreement, "this newcomer comes too early or too late")
    if agreement.leave:
        return await_newer(replica, record, "newcomers that came too early or too late leave this world", _meet)
    record = _hear_where(replica, replace(record, agreement=agreement), event)
    if not replica.is_connected:
        assert replica.met is not None
        make = MakeGroup(replica.met.number, reason="all have spoken, and the world has no process group yet")
        return replica._replace(record=replace(record, talk=Talk.GROUP, by=frozenset())), (make,)
    return _begin_handing(replica, record)


def _leave(replica: Replica, meeting: InMeeting, agreement: Agreement, why: str) -> Answer:
    """Be no member of this world any more, and come again where the others are then."""
    left = TellLeft(reason=why)
    arriving = Arriving(copies=meeting.copies, others_until=meeting.others_until)
    return with_before(_look_elsewhere(replica, arriving, agreement.until, agreement.step), left)


def _hear_where(replica: Replica, record: InMeeting, event: AllSaid) -> InMeeting:
    """Note whether others are in the step before which this one is, or have left the end at which it is."""
    here = [each for each in event.said if (each.until, each.state) == (replica.until, replica.step)]
    is_among = any(not each.is_between for each in here)
    have_parted = any(each.has_parted and each.until == replica.until for each in event.said)
    return replace(record, is_among=is_among, have_parted=have_parted)


def _connect(replica: Replica, record: InMeeting, event: Connected) -> Answer:
    by = record.by | {event.seat}
    if len(by) < replica.seats:
        return replica._replace(record=replace(record, by=by)), ()
    return _begin_handing(replica._replace(is_connected=True), record)


def _agreement(record: InMeeting) -> Agreement:
    agreement: Agreement | None = record.agreement
    assert agreement is not None
    return agreement


def _begin_handing(replica: Replica, record: InMeeting) -> Answer:
    agreement = _agreement(record)
    rank = replica.rank
    given = [
        (bucket, source, to)
        for source, to in agreement.gradients
        for bucket in range(replica.buckets)
        if rank in (source, to)
    ]
    if agreement.fill:
        replica = replica._replace(work=replica.work._replace(has_last=False))
    filled = [(bucket, source, None) for bucket, source in agreement.fill]
    means = [(None, source, to) for source, to in agreement.means if rank in (source, to)]
    return _hand(replica, record, (*given, *filled, *means))


def _hand(replica: Replica, record: InMeeting, left: tuple[tuple[int | None, int, int | None], ...]) -> Answer:
    """Hand over the next bucket: what breaks on the way leaves anything in the memory of those who are given it."""
    if not left:
        return _conclude(replica, record)
    bucket, source, to = left[0]
    if bucket is None:
        reason = "a member has the mean for which another one asks"
    else:
        reason = "a member has the sum of this bucket, and " + ("others need it" if to is None else "one is late")
        if source != replica.rank:
            replica = replica._replace(work=replica.work._replace(done=_without(replica, bucket)))
    return replica._replace(record=Handing(record, left)), (HandOver(bucket, source, to, reason=reason),)


def _has_notes(replica: Replica, bucket: int) -> bool:
    """Tell whether this is the bucket whose notes say what is in the sum, and how large the last bucket is."""
    return bucket == replica.buckets - 2


def _without(replica: Replica, bucket: int) -> frozenset[int]:
    """What is reduced without this bucket, nor the last one if this is the one whose notes tell its size."""
    gone = {bucket, bucket + 1} if _has_notes(replica, bucket) else {bucket}
    return replica.work.done - gone


def _end_handing(replica: Replica, record: Handing, event: Handed) -> Answer:
    by = record.by | {event.seat}
    if len(by) < replica.seats:
        return replica._replace(record=replace(record, by=by)), ()
    bucket, _, to = record.left[0]
    meeting = record.meeting
    if bucket is None:
        meeting = replace(meeting, has_mean=meeting.has_mean or to == replica.rank)
    elif to in (None, replica.rank):
        replica = replica._replace(work=replica.work._replace(done=replica.work.done | {bucket}))
    return _hand(replica, meeting, record.left[1:])


def _conclude(replica: Replica, record: InMeeting) -> Answer:
    """Do what the agreement says of this replica: all that was to be handed over is."""
    agreement = _agreement(record)
    replica = replica._replace(work=replica.work._replace(is_awaited=False))
    rank = replica.rank
    if agreement.is_even:
        note = NoteMeeting(agreement.dealt, reason="all members are in one step with one state")
        held = replica.work.held | frozenset(agreement.dealt[rank])
        holdings = tuple(
            before | frozenset(more) for before, more in zip(replica.work.holdings, agreement.dealt, strict=True)
        )
        replica = replica._replace(work=replica.work._replace(held=held, holdings=holdings))
        return with_before(_go_on_even(replica, record), note)
    if rank in agreement.advance:
        return _be_late(replica, record, agreement)
    if not agreement.pull or not (agreement.begins or rank == agreement.sources[0] or rank in agreement.pull):
        return _meet(replica, record)
    if record.has_state and rank in agreement.pull and record.spot is not Spot.ARRIVING and not agreement.begins:
        return fail(
            replica,
            "missed step",
            f"the others have made step {replica.step} while this rank was cut off from them, and nobody has its "
            "gradients any more: this rank begins again, with their state",
        )
    reason = "nobody has trained yet: all begin with what one has" if agreement.begins else "newcomers need the state"
    move = MoveState(agreement.sources[0], agreement.pull, agreement.begins, reason=reason)
    return replica._replace(record=Moving(record)), (move,)


def _end_moving(replica: Replica, record: Moving, event: Moved) -> Answer:
    by = record.by | {event.seat}
    if len(by) < replica.seats:
        return replica._replace(record=replace(record, by=by)), ()
    agreement = _agreement(record.meeting)
    if agreement.begins or replica.rank in agreement.pull:
        replica = _cleared(replica._replace(step=agreement.step))
        return with_before(_meet(replica, replace(record.meeting, has_state=True, is_copy=False)), CLEAR)
    return _meet(replica, record.meeting)


def _be_late(replica: Replica, record: InMeeting, agreement: Agreement) -> Answer:
    """Make the step that the others have made: its gradients are here now."""
    if agreement.until != replica.until and replica.step < replica.until:
        reason = (
            f"this rank is in step {replica.step} of {replica.until}, and others train until {agreement.until}: all "
            "ranks must call run.steps() with the same totals"
        )
        return fail(replica, "mismatch", reason)
    if record.spot is Spot.END:
        return _finish(replica, Standing.APART)
    if record.back is not None and (isinstance(record.back, Finished) or record.back.is_behind):
        back = replace(record.back, standing=Standing.APART)
        if record.has_mean:
            return _return_given(replica, back)
        return _return_own(replica, back, "the others have made this mean, and are a step or a call ahead")
    if record.spot is not Spot.WITHIN:
        raise ProtocolError("one that has not begun a step cannot have missed its end")
    return _leave_step(replica, WaitFor.HOLDERS_LATE)


def _go_on_even(replica: Replica, record: InMeeting) -> Answer:
    """Go on: all members are in the same step with the same parameters."""
    match record.spot:
        case Spot.WITHIN:
            return _compute(replica)
        case Spot.END:
            return _finish(replica, Standing.EVEN) if record.have_parted else _wait_at_end(replica)
    standing = Standing.AMONG if record.is_among else Standing.MET
    if record.back is not None:
        return _go_on_between(replica, record, record.back, standing)
    return replica._replace(record=Stepping(standing, is_behind=False)), (
        LetGo(is_over=False, reason="it is with the others, and its step may begin"),
    )


def _ask_mean(replica: Replica, record: Passing | Stepping | Finished, _event: MeanAsked) -> Answer:
    if isinstance(record, Passing):
        return _return_own(replica, record, "the others have this call behind them")
    if record.standing in {Standing.APART, Standing.AMONG}:
        return _return_own(replica, record, "the others do not ask for it where this rank is: they are ahead")
    return _average(replica, record)


def _return_own(replica: Replica, back: Passing | Stepping | Finished, reason: str) -> Answer:
    return replica._replace(record=back), (ReturnMean(is_own=True, reason=reason),)


def _return_given(replica: Replica, back: Stepping | Finished) -> Answer:
    given = ReturnMean(is_own=False, reason="another rank had this mean, and has given it")
    return replica._replace(record=back), (given,)


def _average(replica: Replica, back: Stepping | Finished) -> Answer:
    if replica.needs_meeting:
        replica, meeting, clear = _between(replica, back)
        return with_before(_meet(replica, meeting), *clear)
    return replica._replace(record=Averaging(back)), (Average(reason="the script of each rank asks for this mean"),)


def _between(replica: Replica, back: Stepping | Finished) -> tuple[Replica, InMeeting, tuple[ReplicaCommand, ...]]:
    """Return what it is that goes to meet the others and comes ``back`` then."""
    meeting = InMeeting(Spot.BETWEEN, Talk.ALL, has_state=True, back=back)
    if isinstance(back, Stepping) and not back.is_behind and back.standing is Standing.EVEN:
        return _cleared(replica), meeting, (CLEAR,)
    return replica, meeting, ()


def _go_on_between(replica: Replica, record: InMeeting, back: Stepping | Finished, before_step: Standing) -> Answer:
    if isinstance(back, Stepping) and not back.is_behind:
        back = replace(back, standing=before_step)
    if record.has_mean:
        return _return_given(replica, back)
    if back.standing is Standing.AMONG:
        return _return_own(replica, back, "others are in the next step already, and do not ask for it")
    return _average(replica, back)


def _end_averaging(replica: Replica, record: Averaging, event: Averaged) -> Answer:
    by = record.by | {event.seat}
    if len(by) < replica.seats:
        return replica._replace(record=replace(record, by=by)), ()
    return replica._replace(record=record.back), (ReturnMean(is_own=False, reason="all shares of it are summed"),)


def _begin_step(replica: Replica, record: Stepping, _event: StepBegun) -> Answer:
    if record.is_behind:
        raise ProtocolError("a step begins when the one before has ended")
    if record.standing in {Standing.MET, Standing.AMONG}:
        replica = replica._replace(work=replica.work._replace(computed=frozenset(), is_shut=False))
        clear = Clear(reason="nothing is computed of what it was dealt when it met the others in this step")
    else:
        clear, work = CLEAR, Work(has_last=replica.is_complete)
        if record.standing is Standing.EVEN:
            assert replica.met is not None
            holdings = tuple(frozenset(each) for each in shares(replica.micro_batches, replica.met.size))
            work = Work(has_last=replica.is_complete, holdings=holdings, held=holdings[replica.rank])
        replica = replica._replace(work=work)
    if record.standing is Standing.APART or replica.needs_meeting:
        return with_before(_meet_within(replica), clear)
    return with_before(_compute(replica), clear)


def _compute(replica: Replica) -> Answer:
    left = replica.work.held - replica.work.computed
    if not left:
        return _go_on(replica)
    reason = "these micro-batches were dealt to it, and it has not computed them"
    return replica._replace(record=Computing(left)), (Compute(tuple(sorted(left)), reason=reason),)


def _end_computing(replica: Replica, record: Computing, event: Computed) -> Answer:
    if event.index not in record.left:
        raise ProtocolError(f"micro-batch {event.index} is computed, and was not dealt")
    work = replica.work._replace(computed=replica.work.computed | {event.index})
    return replica._replace(record=replace(record, left=record.left - {event.index}), work=work), ()


def _hear_bucket(replica: Replica, record: Computing, event: BucketReady) -> Answer:
    """Begin to sum the bucket if nothing will be added to it any more, and all ranks sum the same ones in this step."""
    assert replica.met is not None
    is_next = event.bucket == record.begun and event.bucket < replica.buckets - 2
    is_alone = replica.met.size == 1
    if not is_next or len(record.left) > 1 or replica.work.done or is_alone or replica.needs_meeting:
        return replica, ()
    begin = BeginReduce(event.bucket, reason="this is its last micro-batch, and adds nothing more to this bucket")
    work = replica.work._replace(has_last=False)
    return replica._replace(record=replace(record, begun=record.begun + 1), work=work), (begin,)


def _ask_more(replica: Replica, record: Computing, _event: MoreAsked) -> Answer:
    if record.left:
        raise ProtocolError(f"the script asks for more, and has not computed {sorted(record.left)}")
    return _go_on(replica)


def _go_on(replica: Replica) -> Answer:
    """Meet, reduce, or leave the step, whichever is next."""
    if replica.needs_meeting:
        return _meet_within(replica)
    if not replica.is_complete:
        return _reduce(replica, replica.holders > 0 or replica.knows_newer)
    assert replica.met is not None
    if replica.work.differs:
        return replica._replace(record=Comparing()), (Compare(reason="the states of the ranks differ"),)
    if replica.work.is_awaited:
        if replica.knows_newer:
            return _meet_within(replica)
        wait = AwaitWorld(is_patient=False, reason="some rank has told all others of a newcomer on its way")
        return replica._replace(record=Committed(WaitFor.NEWCOMER)), (wait,)
    return _leave_step(replica, WaitFor.HOLDERS)


def _reduce(replica: Replica, knows: bool) -> Answer:
    """Sum what is not summed; the last bucket when the others are there, as their notes tell its size."""
    last, work = replica.buckets - 1, replica.work
    buckets = tuple(bucket for bucket in range(replica.buckets) if bucket not in work.done)
    has_last = work.has_last and buckets == (last,)
    source = next((rank for rank, held in enumerate(work.holdings) if 0 in held), 0)
    record = Reducing(frozenset((bucket, seat) for bucket in buckets for seat in range(replica.seats)))
    command = Reduce(buckets, source, knows, reason="all that was dealt is computed")
    return replica._replace(record=record, work=work._replace(has_last=has_last, is_shut=True)), (command,)


def _end_reducing(replica: Replica, record: Reducing, event: Reduced) -> Answer:
    one = (event.bucket, event.seat)
    if one not in record.left:
        raise ProtocolError(f"bucket {event.bucket} of seat {event.seat} is not being reduced")
    left = record.left - {one}
    work = replica.work
    whole, must_repeat = record.whole, record.must_repeat or event.must_repeat
    if not any(bucket == event.bucket for bucket, _ in left):
        whole |= {event.bucket}
        if _has_notes(replica, event.bucket):
            work = work._replace(is_awaited=event.is_awaited, differs=event.differs)
    if any(_has_notes(replica, bucket) for bucket in work.done | whole):
        work = work._replace(done=frozenset() if must_repeat else work.done | whole)
        whole = frozenset()
    if left:
        return replica._replace(record=Reducing(left, whole, must_repeat), work=work), ()
    return _go_on(replica._replace(work=work))


def _without_doubtful(replica: Replica) -> Replica:
    """What was reduced in the world before counts, unless states differed there, and nobody has found whose is right.

    One whose state is wrong may have a share in it, and be in this world no more.
    """
    if not replica.work.differs:
        return replica
    return replica._replace(work=replica.work._replace(done=frozenset(), differs=False))


def _judge(replica: Replica, _record: Comparing, event: Judged) -> Answer:
    """Go on without those whose state is wrong, and without what they have computed."""
    assert replica.met is not None
    match event.who:
        case WhoIsWrong.NOBODY:
            return _go_on(replica._replace(work=replica.work._replace(differs=False)))
        case WhoIsWrong.THIS:
            answer = fail(replica, "differs", "the state of this rank is not that of most")
            broken_off = BreakOff(reason="nobody is to have a state that is wrong")
            return with_before(answer, broken_off) if replica.holders else answer
    meeting = InMeeting(Spot.WITHIN, Talk.ALL, has_state=True)
    return await_newer(replica, meeting, "those whose state is wrong end, and leave this world", _meet)


def _leave_comparison(replica: Replica, _record: Comparing, _event: RoundLeft) -> Answer:
    return _meet_within(replica)


def _leave_move(replica: Replica, record: Moving, _event: RoundLeft) -> Answer:
    return _meet(replica, record.meeting)


def _refuse(replica: Replica, record: Moving, _event: StateRefused) -> Answer:
    """Leave the others, who go on without this newcomer, and ask again later."""
    why = "the others cannot give this newcomer their state"
    return _leave(replica, record.meeting, _agreement(record.meeting), why)


def _leave_step(replica: Replica, wait: WaitFor) -> Answer:
    if not replica.holders:
        return _commit(replica, wait)
    hold = AwaitHolders(reason="somebody copies the state, which is about to change")
    return replica._replace(record=Committed(wait)), (hold,)


def _commit(replica: Replica, wait: WaitFor) -> Answer:
    is_late = wait is WaitFor.HOLDERS_LATE
    record = Stepping(Standing.APART if is_late else Standing.EVEN, is_behind=True)
    reason = "the others have made this step, and its gradients are here" if is_late else "all gradients are whole"
    return replica._replace(record=record), (Commit(replica.step, reason=reason),)


def _end_hold(replica: Replica) -> Answer:
    if replica.holders < 0:
        raise ProtocolError("nobody has copied the state who could end it")
    if not replica.holders:
        match replica.record:
            case Committed(wait=WaitFor.HOLDERS | WaitFor.HOLDERS_LATE as wait):
                return _commit(replica, wait)
            case Parting(wait=WaitFor.HOLDERS):
                return _finish(replica, Standing.EVEN)
    return replica, ()


def _end_patience(replica: Replica) -> Answer:
    """Go on without those for whom it waited."""
    match replica.record:
        case Committed(wait=wait):
            answer = _commit(replica, wait)
        case Parting(wait=WaitFor()):
            answer = _finish(replica, Standing.EVEN)
        case _:
            raise ProtocolError(f"one that is {replica.phase.value} waits for nobody for a limited time")
    if replica.holders:
        return with_before(answer, BreakOff(reason="the state is about to change, and somebody copies it still"))
    return answer


def _end_step(replica: Replica, record: Stepping, _event: StepMade) -> Answer:
    if not record.is_behind:
        raise ProtocolError("a step has ended that has no gradients")
    return replica._replace(step=replica.step + 1, record=Stepping(record.standing, is_behind=False)), ()


def _end_call(replica: Replica, record: Stepping, _event: CallEnded) -> Answer:
    if record.is_behind or replica.step < replica.until:
        raise ProtocolError(f"the call is not over in step {replica.step} of {replica.until}")
    replica = _cleared(replica)
    if record.standing is Standing.APART:
        return with_before(_meet(replica, InMeeting(Spot.END, Talk.ALL, has_state=True)), CLEAR)
    return with_before(_wait_at_end(replica), CLEAR)


def _wait_at_end(replica: Replica, parts_in: int = 0) -> Answer:
    """Wait for all members there; ``parts_in``: the world in which this one has waited already."""
    if _is_over(replica, parts_in):
        return _finish(replica, Standing.EVEN, parts_in)
    if replica.needs_meeting:
        return _meet(replica, InMeeting(Spot.END, Talk.ALL, has_state=True, parts_in=parts_in))
    reason = "nobody leaves before all are here: one may have missed the end of the last reduction"
    return replica._replace(record=Parting()), (Gather(replica.knows_newer, reason=reason),)


def _parts_in(replica: Replica) -> int:
    assert replica.met is not None
    return replica.met.number


def _leave_barrier(replica: Replica, *, must_meet: bool = False) -> Answer:
    """Meet all at the end of the call again."""
    parts_in = _parts_in(replica)
    if must_meet and not _is_over(replica, parts_in):
        return _meet(replica, InMeeting(Spot.END, Talk.ALL, has_state=True, parts_in=parts_in))
    return _wait_at_end(replica, parts_in)


def _end_gathering(replica: Replica, record: Parting, event: Gathered) -> Answer:
    record = Parting(record.by | {event.seat}, record.is_awaited or event.is_awaited)
    if len(record.by) < replica.seats:
        return replica._replace(record=record), ()
    if record.is_awaited:
        if replica.knows_newer:
            return _leave_barrier(replica, must_meet=True)
        wait = AwaitWorld(is_patient=False, reason="some rank has told all others of a newcomer on its way")
        return replica._replace(record=replace(record, wait=WaitFor.NEWCOMER)), (wait,)
    if replica.holders:
        hold = AwaitHolders(reason="somebody copies the state, which is about to change")
        return replica._replace(record=replace(record, wait=WaitFor.HOLDERS)), (hold,)
    return _finish(replica, Standing.EVEN)


def _finish(replica: Replica, standing: Standing, ended_in: int = 0) -> Answer:
    """Leave the end of the call; ``ended_in``: others have left it in that world, and this one meets them in none."""
    parted = TellParted(ended_in or _parts_in(replica), replica.until, reason="all have come to the end of the call")
    let_go = LetGo(is_over=True, reason="nobody needs this rank at the end of the call any more")
    return replica._replace(record=Finished(standing)), (parted, let_go)


def _begin_next_call(replica: Replica, record: Finished, event: CallBegun) -> Answer:
    if replica.step >= event.until:
        return replica, (LetGo(is_over=True, reason="as many steps are made"),)
    entered = TellEntered(reason="the script makes one more call")
    return replica._replace(until=event.until, record=Stepping(record.standing, is_behind=False)), (entered,)


def _break(replica: Replica, record: Any, _event: GroupBroke) -> Answer:
    """Break with this world, and meet the others in the next."""
    assert replica.met is not None
    is_told = replica.is_left
    broke = TellBroke(replica.met.number, reason="what members do together has failed, and no newer world says why")
    answer = _go_to_next(replica._replace(is_connected=False), record)
    return answer if is_told else with_before(answer, broke)


def _outgrow(replica: Replica, record: Any, _event: Outgrown) -> Answer:
    return _go_to_next(replica._replace(is_connected=False), record)


def _go_to_next(replica: Replica, record: Any) -> Answer:
    clear: tuple[ReplicaCommand, ...] = ()
    match record:
        case Averaging(back=back):
            replica, meeting, clear = _between(replica, back)
        case Handing(meeting=meeting) | Moving(meeting=meeting):
            pass
        case InMeeting():
            meeting = record
        case Parting():
            meeting = InMeeting(Spot.END, Talk.ALL, has_state=True, parts_in=_parts_in(replica))
        case _:
            meeting = InMeeting(Spot.WITHIN, Talk.ALL, has_state=True)
    answer = await_newer(replica, meeting, "this world has broken, and the agents make the next", _meet)
    return with_before(answer, *clear)


_TOGETHER = (InMeeting, Handing, Moving, Reducing, Comparing, Parting, Averaging)  # with others, who may be lost

_HANDLERS: dict[tuple[type, type], Callable[[Replica, Any, Any], Answer]] = {
    (Outside, CallBegun): _begin_call,
    (Passing, CallBegun): _begin_call,
    (Finished, CallBegun): _begin_next_call,
    (Arriving, Answered): _hear_answer,
    (Arriving, Copied): _take_copy,
    (Arriving, NotCopied): _miss_copy,
    (InMeeting, AllSaid): _hear_all,
    (InMeeting, RoundLeft): _leave_round,
    (InMeeting, Connected): _connect,
    (Handing, Handed): _end_handing,
    (Moving, Moved): _end_moving,
    (Stepping, StepBegun): _begin_step,
    (Stepping, StepMade): _end_step,
    (Stepping, CallEnded): _end_call,
    (Computing, Computed): _end_computing,
    (Computing, BucketReady): _hear_bucket,
    (Computing, MoreAsked): _ask_more,
    (Reducing, Reduced): _end_reducing,
    (Parting, Gathered): _end_gathering,
    **{(kind, MeanAsked): _ask_mean for kind in (Passing, Stepping, Finished)},
    (Averaging, Averaged): _end_averaging,
    (Comparing, Judged): _judge,
    (Comparing, RoundLeft): _leave_comparison,
    (Moving, RoundLeft): _leave_move,
    (Moving, StateRefused): _refuse,
    **{(kind, GroupBroke): _break for kind in _TOGETHER},
    **{(kind, Outgrown): _outgrow for kind in _TOGETHER},
}
