"""All interleavings of a few replicas that run the real ``handle``, in a world of choices instead of a network.

What is modelled, each as one step of a path:

- *the script*: calls of ``run.steps()`` with their totals; it asks for the first micro-batch of a step; it computes all
  that it was dealt and asks for more; its optimizer steps; it asks for means over all ranks; it ends;
- *the members' store*: rounds of a meeting, which end for all when all have spoken, or for all when one leaves;
- *process groups*: sums, hand-overs of a bucket, copies of the state, the wait at the end. Each needs all who take
  part, and then ends for each replica, and each of its seats, at a time of its own; or breaks for it, if a member is
  gone, has left, or has said that the world is broken: whether others have it or not. What breaks leaves garbage;
- *the agents*: notice a loss some time after it; make the next world of a loss, a newcomer, a broken connection, an
  end; a replica hears of the newest world some time after it was made, and not of those in between;
- *newcomers*: ask, copy the state of a member that holds it, wait for a world, pass by calls, leave, and come again;
- *patience* that is over before what it waits for;
- *faults*: a loss of a replica at any of these moments, and connections that break though nobody is lost.

The values are modelled, too: what each replica has summed up is how often each micro-batch is in it, a sum has the step
and the counts of all members, the parameters are the steps that were applied, and a mean is who has a share in it.

- *overlap*: in a backward pass a bucket is there before the others, or seems to be, and more is added to it then;
- *states*: one becomes wrong, so that ranks differ; one cannot be sent for a while; from a step on others are trained.

What is not modelled: ranks whose scripts call ``run.steps()`` differently, snapshots, scripts that change the state
while others copy it, a loss of all who have the state, an agent that is lost, and the store of the members. A replica
is lost with all its seats.

Two states are the same if they differ only in names of processes, in dead ones that nobody can notice any more, and in
the numbers of worlds. Ranks are not exchanged for each other, as agreements give to the first one that has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from unicron_elastic.base.world import NO_END, EndOfSteps, Member, World
from unicron_elastic.engine.protocol.handle import handle
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
    Raise,
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
    Computing,
    Ended,
    Finished,
    Handing,
    InMeeting,
    Moving,
    Outside,
    Passing,
    Replica,
    Spot,
    Stepping,
)
from unicron_elastic.engine.protocol.said import Report

Label: TypeAlias = tuple[int, int, str]  # of a mean: the call, the step, and where the script asks for it
Decide: TypeAlias = Callable[[Replica, Any], tuple[Replica, tuple[Any, ...]]]
GARBAGE = ("garbage",)


class Broken(Exception):
    """`Broken`: an invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """`Bounds` of one exploration."""

    replicas: int
    totals: tuple[int, ...]  # of the calls of run.steps()
    micro_batches: int = 2
    buckets: int = 2  # the last one is not summed, but given by one
    seats: int = 1
    losses: int = 0
    breaks: int = 0
    newcomers: int = 0  # who take a lost one's place, or come of themselves if ``grows``
    grows: bool = False
    loses_newcomers: bool = False  # each as it has joined
    means: tuple[str, ...] = ()  # where it asks for one: "before" each step, "behind" it, at the "end" of a call
    trains_other_from: int = 0  # from this step on the script trains other parameters; 0: it does not
    flips: int = 0  # states that become wrong, so that ranks differ
    refusals: int = 0  # states that cannot be sent for a while
    overlaps: bool = False  # buckets may be there before the end of a backward pass
    additions: int = 0  # to a bucket that was there already


class Pending(NamedTuple):
    """`Pending` is what a process waits for: a ``kind``, the ``keys`` of collectives, and how many each seat has."""

    kind: str
    keys: tuple[Any, ...] = ()
    seats: tuple[int, ...] = ()


class Process(NamedTuple):
    """`Process` is a replica's: what it has decided, its memory, and how its script and its agent see it."""

    name: str
    slot: int
    replica: Replica
    local: tuple[int, ...]
    sums: tuple[tuple[Any, ...], ...]  # by bucket and seat
    params: int = 0
    calls: int = 0
    pending: Pending | None = None
    round: tuple[int, int] = (0, 0)  # in which it has spoken last: the world's number, and which
    counts: tuple[tuple[Any, int], ...] = ()  # of its collectives in the present group
    since: int = 0  # the first world that it has joined; 0: it was there from the first one on
    is_over: bool = False
    parted_in: EndOfSteps = NO_END
    copy: tuple[str, int, int, bool] | None = None  # source, until, step, whether the source still holds it
    has_exited: bool = False
    asked: Label | None = None  # for which mean it asks, or asked last
    mean: tuple[Label, tuple[int, ...]] | None = None  # the latest that it has, and whose shares are in it
    means: tuple[tuple[Label, tuple[int, ...]], ...] = ()  # that its script was given
    is_offered: bool = False  # the mean for which it asks, by one that it has just met
    trains_other: bool = False
    is_wrong: bool = False  # its state
    refuses: bool = False  # its state cannot be sent
    early: tuple[Any, ...] = ()  # buckets that are being summed though it computes, each with its collective
    must_repeat: bool = False  # more was added to one of them


class Slot(NamedTuple):
    """`Slot` is one collective: what it is, and what those ranks gave who have come to it."""

    what: Any
    given: tuple[tuple[int, Any], ...] = ()


class WorldThere(NamedTuple):
    """`WorldThere` is what there is of one world: its rounds, and its process group."""

    world: World
    rounds: tuple[tuple[tuple[tuple[int, Any], ...], str], ...] = ()  # what was said, and how it ended
    slots: tuple[tuple[Any, Slot], ...] = ()
    is_broken: bool = False


class Job(NamedTuple):
    """`Job` is one state of everything."""

    processes: tuple[Process, ...]
    worlds: tuple[WorldThere, ...]
    newest: World
    losses: int
    breaks: int
    newcomers: int
    flips: int = 0
    refusals: int = 0
    additions: int = 0
    has_ended: bool = False  # one has made its last step and ended
    born: int = 0


class Move:
    """`Move` carries out one step on a copy of a job; everything else is pure."""

    def __init__(self, bounds: Bounds, job: Job, decide: Decide = handle, told: list[str] | None = None) -> None:
        """``decide`` is the protocol; ``told`` gets lines about what replicas are told and do."""
        self.bounds, self.decide = bounds, decide
        self.processes = {each.name: each for each in job.processes}
        self.worlds = {each.world.number: each for each in job.worlds}
        self.newest = job.newest
        self.losses, self.breaks, self.newcomers = job.losses, job.breaks, job.newcomers
        self.flips, self.refusals, self.additions = job.flips, job.refusals, job.additions
        self.has_ended, self.born = job.has_ended, job.born
        self.seems_there = False  # the bucket that is there now: more will be added to it
        self.told = told

    def done(self) -> Job:
        processes = tuple(sorted(self.processes.values(), key=lambda each: (each.slot, each.name)))
        alive = [each for each in processes if not each.has_exited]
        numbers = {self.newest.number}
        for each in alive:
            numbers |= {world.number for world in (each.replica.heard, each.replica.met) if world is not None}
        worlds = tuple(_pruned(self.worlds[number], self.processes) for number in sorted(numbers & self.worlds.keys()))
        left = (self.losses, self.breaks, self.newcomers, self.flips, self.refusals, self.additions)
        return Job(processes, worlds, self.newest, *left, self.has_ended, self.born)

    # -- processes ----------------------------------------------------------------------------------------------------

    def post(self, name: str, event: ReplicaEvent) -> None:
        """Let a replica decide, and carry out what it says."""
        process = self.processes[name]
        if isinstance(event, AllSaid):
            own = _report(process.asked)
            self.update(name, is_offered=own is not None and own in [each.report for each in event.said])
            process = self.processes[name]
        replica, commands = self.decide(process.replica, event)
        if self.told is not None:
            self.told.append(f"    {name}: {_word(event)}")
            self.told += [f"        {_word(each)}: {each.reason}" for each in commands]
        self.processes[name] = process._replace(replica=replica)
        for command in commands:
            if name in self.processes:
                name = self.carry_out(name, command)

    def update(self, name: str, **changes: Any) -> None:
        self.processes[name] = self.processes[name]._replace(**changes)

    def carry_out(self, name: str, command: ReplicaCommand) -> str:
        """Do it; return the process's name, which is another one if it has left its world."""
        match command:
            case Raise(kind=kind, reason=reason):
                is_right = kind == "missed step" and not self.has_sums(name)
                if not is_right and kind != "differs":
                    raise Broken(f"{name} is told an error: {kind}: {reason}")
                self.lose(name)  # it begins again, with the others' state
                if not any(_has_state(self.newest, each) for each in self.processes.values()):
                    self.processes = {}  # all begin again
            case Commit(step=step):
                self.commit(name, step)
            case Compute() | LetGo() | ReturnMean():
                self.update(name, pending=None)
                if isinstance(command, ReturnMean):
                    self.check_mean(name, is_own=command.is_own)
            case Clear():
                self.update(name, local=(0,) * self.bounds.micro_batches)
            case ReleaseSource() | BreakOff():
                self.end_copy(name, is_own=isinstance(command, ReleaseSource))
            case TellLeft():
                return self.rename(name)
            case TellReady() | TellBroke() | TellParted() | TellEntered():
                self.tell_agent(name, command)
            case AskAgent() | CopyState() | AwaitWorld() | AwaitHolders() | Say() | Compare():
                self.wait(name, command)
            case _:
                self.begin_collective(name, command)
        return name

    def has_sums(self, name: str) -> bool:
        """Whether anybody has the gradients of the step that this one is in, or it is in none."""
        step = self.processes[name].params
        if step >= self.processes[name].replica.until:
            return True
        return any(
            all(found == self.right(bucket, step) for bucket, seats in enumerate(each.sums) for found in seats)
            for each in self.processes.values()
        )

    def right(self, bucket: int, step: int) -> Any:
        """What the sum of a bucket is if all is right."""
        is_last = bucket == self.bounds.buckets - 1
        return ("made", step) if is_last else ("sum", step, (1,) * self.bounds.micro_batches, False)

    def lay_out(self, name: str, step: int) -> None:
        """Let its script train what it trains in this step, if that is not so."""
        is_other = 0 < self.bounds.trains_other_from <= step
        if self.processes[name].trains_other != is_other:
            self.update(name, trains_other=is_other, sums=((GARBAGE,) * self.bounds.seats,) * self.bounds.buckets)
            self.post(name, LaidOut(self.bounds.buckets))

    def tell_agent(self, name: str, command: ReplicaCommand) -> None:
        process = self.processes[name]
        match command:
            case TellReady():
                self.update(name, pending=None, params=process.replica.step)
                self.lay_out(name, process.replica.step)
                if self.has_ended:
                    self.lose(name)
                else:
                    self.next_world(joined=(Member(name=name, node="n", local_rank=process.slot),))
                    self.update(name, since=self.newest.number)
                    if self.bounds.loses_newcomers:
                        self.lose(name)
            case TellBroke(number=number):
                self.break_world(number)
            case TellParted(number=number, total=total):
                self.update(name, is_over=True, parted_in=EndOfSteps(number, total))
                assert process.replica.met is not None
                if self.newest.breaks(process.replica.met):
                    self.next_world(parted=EndOfSteps(number, total))
            case TellEntered():
                self.update(name, is_over=False)

    def wait(self, name: str, command: ReplicaCommand) -> None:
        match command:
            case AskAgent():
                self.update(name, pending=Pending("ask"))
            case CopyState():
                self.update(name, pending=Pending("copy"))
            case AwaitWorld(is_patient=is_patient):
                self.update(name, pending=Pending("world" if is_patient else "newcomer"))
            case AwaitHolders():
                self.update(name, pending=Pending("holders"))
            case Say(number=number, said=said):
                process = self.processes[name]
                asks = _report(process.asked if said.is_between else None)
                trained = frozenset({int(process.trains_other)})
                said = replace(said, asks=asks, report=_report(process.mean), trained=trained)
                self.update(name, is_offered=False, early=())
                self.speak(name, number, said, "said")
            case Compare():
                process = self.processes[name]
                assert process.replica.met is not None
                self.update(name, is_offered=False, early=())
                self.speak(name, process.replica.met.number, process.is_wrong, "judged")

    def begin_collective(self, name: str, command: ReplicaCommand) -> None:
        process = self.processes[name]
        match command:
            case MakeGroup():
                self.update(name, counts=())
                self.arrive(name, "group", [("group", "group", None)])
            case HandOver():
                self.hand_over(name, command)
            case MoveState(source=source, to=to, begins=begins):
                rank = process.replica.rank
                if rank == source and not begins:
                    self.check_given(process)
                what = ("state", source, to, begins)
                given = (process.params, process.is_wrong, process.refuses and not begins)
                self.arrive(name, "moved", [("move", what, given if rank == source else None)])
            case BeginReduce(bucket=bucket):
                self.begin_early(name, bucket)
            case Reduce():
                self.reduce(name, command)
            case Average():
                self.arrive(name, "averaged", [("all", ("mean", process.asked), process.slot)])
            case Gather(is_awaited=is_awaited):
                self.arrive(name, "gathered", [("all", ("end", process.replica.until), is_awaited)])

    def commit(self, name: str, step: int) -> None:
        """Check what is applied, and apply it."""
        process = self.processes[name]
        if process.params != step:
            raise Broken(f"{name} applies the gradients of step {step} to parameters of step {process.params}")
        for bucket, seats in enumerate(process.sums):
            for seat, found in enumerate(seats):
                if found != self.right(bucket, step):
                    raise Broken(f"{name} applies in step {step} as bucket {bucket} of seat {seat} {found}")
        for each in self.processes.values():
            if each.copy is not None and each.copy[0] == name and each.copy[3]:
                raise Broken(f"{name} changes its state while {each.name} copies it")
        self.update(name, params=step + 1, pending=None)
        if "behind" not in self.bounds.means:
            self.post(name, StepMade())

    def check_mean(self, name: str, *, is_own: bool) -> None:
        """All who live and are given one that is not their own are given the same, for which they asked."""
        process = self.processes[name]
        if is_own:
            if process.is_offered:
                raise Broken(f"{name} is given its own share of the mean {process.asked}, which another one has")
            return
        assert process.asked is not None
        if process.mean is None or process.mean[0] != process.asked:
            raise Broken(f"{name} asks for the mean {process.asked}, and is given {process.mean}")
        for other in self.processes.values():
            if dict(other.means).get(process.asked, process.mean[1]) != process.mean[1]:
                raise Broken(f"{name} is given the mean {process.mean}, and {other.name} had {other.means[-1]}")
        self.update(name, means=(*process.means, process.mean))

    def check_given(self, process: Process) -> None:
        """A state is given as it is in one span: not while the script changes it."""
        if isinstance(process.replica.record, Stepping | Finished) or process.params != process.replica.step:
            raise Broken(f"{process.name} gives a state between two steps")

    # -- copies -------------------------------------------------------------------------------------------------------

    def end_copy(self, name: str, *, is_own: bool) -> None:
        if is_own:
            self.release(name)
        else:
            self.break_off(name)

    def release(self, name: str) -> None:
        copy = self.processes[name].copy
        self.update(name, copy=None)
        if copy is not None and copy[3] and copy[0] in self.processes:
            self.post(copy[0], HoldEnded())

    def break_off(self, source: str) -> None:
        for each in list(self.processes.values()):
            if each.copy is not None and each.copy[0] == source and each.copy[3]:
                self.update(each.name, copy=(*each.copy[:3], False))
                self.post(source, HoldEnded())

    # -- worlds -------------------------------------------------------------------------------------------------------

    def next_world(self, **changes: Any) -> None:
        """Make it, as the agents do."""
        if self.has_ended and "over" not in changes and "parted" not in changes:
            return
        if changes.get("lost") or changes.get("anew"):
            over = [each.parted_in for each in self.processes.values() if each.is_over]
            changes = {"parted": max(over, default=NO_END), **changes}
        self.newest = self.newest.after(store="h:1", reason="", **changes)
        self.worlds[self.newest.number] = WorldThere(self.newest)

    def rename(self, name: str) -> str:
        """Take it out of its world, under another name."""
        process = self.processes.pop(name)
        new = f"{name}~"
        self.processes[new] = process._replace(name=new)
        if self.newest.rank_of(name) is not None:
            self.next_world(lost=(name,))
        return new

    def break_world(self, number: int) -> None:
        world = self.worlds[number]
        self.worlds[number] = world._replace(is_broken=True)
        if not self.newest.breaks(world.world):
            self.next_world(anew=True)

    def lose(self, name: str) -> None:
        """End the process: its agent notices it later."""
        process = self.processes[name]
        self.release(name)
        for each in list(self.processes.values()):
            if each.copy is not None and each.copy[0] == name:
                self.update(each.name, copy=(*each.copy[:3], False))
        del self.processes[process.name]

    def hear(self, name: str) -> None:
        """Let it hear of the newest world."""
        self.post(name, WorldHeard(self.newest, self.newest.rank_of(name)))

    # -- meetings -----------------------------------------------------------------------------------------------------

    def speak(self, name: str, number: int, said: Any, kind: str) -> None:
        process = self.processes[name]
        rounds = self.worlds[number].rounds
        mine = process.round[1] + 1 if process.round[0] == number else 1
        rounds = (*rounds, *(((), "") for _ in range(mine - len(rounds))))
        words, end = rounds[mine - 1]
        if any(type(other) is not type(said) for _, other in words):
            raise Broken(f"{name} speaks in a round of world {number} in which others speak of something else")
        words = tuple(sorted((*words, (process.replica.rank, said)), key=lambda each: each[0]))
        if not end and len(words) == self.worlds[number].world.size:
            end = ALL
        rounds = (*rounds[: mine - 1], (words, end), *rounds[mine:])
        self.worlds[number] = self.worlds[number]._replace(rounds=rounds)
        self.update(name, round=(number, mine), pending=Pending(kind, (number, mine)))

    def leave_round(self, number: int, mine: int) -> None:
        world = self.worlds[number]
        rounds = list(world.rounds)
        rounds[mine - 1] = (rounds[mine - 1][0], LEFT)
        self.worlds[number] = world._replace(rounds=tuple(rounds))

    # -- collectives --------------------------------------------------------------------------------------------------

    def arrive(self, name: str, kind: str, begun: list[tuple[Any, Any, Any]]) -> None:
        """Begin collectives, and wait for them."""
        number, keys = self.come(name, begun)
        self.update(name, pending=Pending(kind, (number, *keys), (0,) * self.bounds.seats))

    def come(self, name: str, begun: list[tuple[Any, Any, Any]]) -> tuple[int, list[Any]]:
        """Come to collectives: each the next of its key, of what, and with what is given; return them."""
        process = self.processes[name]
        replica = process.replica
        assert replica.met is not None
        number = replica.met.number
        slots, counts = dict(self.worlds[number].slots), dict(process.counts)
        keys = []
        for key, what, given in begun:
            counts[key] = counts.get(key, 0) + 1
            at = (key, counts[key])
            slot = slots.get(at) or Slot(what)
            if slot.what != what:
                raise Broken(f"{name} comes with {what} to a collective of others, which is {slot.what}")
            slots[at] = slot._replace(given=(*slot.given, (replica.rank, given)))
            keys.append(at)
        ordered = tuple(sorted(slots.items(), key=lambda item: repr(item[0])))
        self.worlds[number] = self.worlds[number]._replace(slots=ordered)
        self.update(name, counts=tuple(sorted(counts.items(), key=repr)))
        return number, keys

    def spoil(self, name: str, bucket: int) -> None:
        """Mark what is in the memory of a bucket as anything."""
        sums = list(self.processes[name].sums)
        sums[bucket] = (GARBAGE,) * self.bounds.seats
        self.update(name, sums=tuple(sums))

    def put(self, name: str, bucket: int, seat: int, value: Any) -> None:
        sums = [list(each) for each in self.processes[name].sums]
        sums[bucket][seat] = value
        self.update(name, sums=tuple(map(tuple, sums)))

    def reduce(self, name: str, command: Reduce) -> None:
        process = self.processes[name]
        last = self.bounds.buckets - 1
        early = dict(process.early)
        if not early.keys() <= set(command.buckets):
            raise Broken(f"{name} sums {sorted(command.buckets)}, and has begun {sorted(early)}")
        begun = []
        for bucket in command.buckets:
            if bucket in early:
                continue
            if bucket == last:
                is_source = process.replica.rank == command.source
                if is_source and process.local[0] != 1:
                    raise Broken(f"{name} is to give the buffers of micro-batch 0, and has not computed it")
                begun.append(("all", ("last", command.source), ("made", process.params) if is_source else None))
            else:
                told = (command.is_awaited, process.is_wrong, process.must_repeat)
                begun.append(("all", ("sum", bucket), (process.params, process.local, *told)))
            self.spoil(name, bucket)
        number, keys = self.come(name, begun)
        keys[-1:-1] = early.values()  # they count behind the notes, in front of the last bucket
        pending = Pending("reduced", (number, *keys), (0,) * self.bounds.seats)
        self.update(name, pending=pending, early=(), must_repeat=False)

    def begin_early(self, name: str, bucket: int) -> None:
        """Begin to sum a bucket with the gradients of the micro-batch that is not over yet."""
        process = self.processes[name]
        computing = process.replica.record
        assert isinstance(computing, Computing)
        local = list(process.local)
        if not self.seems_there:
            local[min(computing.left)] += 1
        value = (process.params, tuple(local), False, process.is_wrong, False)
        _, (key,) = self.come(name, [("all", ("sum", bucket), value)])
        self.spoil(name, bucket)
        must_repeat = process.must_repeat or self.seems_there
        self.update(name, early=(*process.early, (bucket, key)), must_repeat=must_repeat)

    def hand_over(self, name: str, command: HandOver) -> None:
        process = self.processes[name]
        is_source = process.replica.rank == command.source
        if command.bucket is None:
            given: Any = process.mean
        else:
            given = process.sums[command.bucket] if is_source else None
            if not is_source:
                self.spoil(name, command.bucket)
        key = "all" if command.to is None else (command.source, command.to)
        self.arrive(name, "handed", [(key, ("bucket", command.bucket, command.source, command.to), given)])

    def move(self, name: str, seat: int, what: Any, given: dict[int, Any]) -> None:
        """Let a state be given and taken."""
        _, source, to, begins = what
        replica = self.processes[name].replica
        if begins or replica.rank in to:
            if replica.record.meeting.spot in (Spot.WITHIN, Spot.END):
                raise Broken(f"{name} is given another state in the middle of its script")
            params, is_wrong, is_refused = given[source]
            if is_refused:
                self.post(name, StateRefused())
                return
            self.update(name, params=params, is_wrong=is_wrong)
            self.lay_out(name, params)
        self.post(name, Moved(seat))

    def end(self, name: str, seat: int) -> None:
        """Let the next collective of a seat end well."""
        process = self.processes[name]
        pending = process.pending
        assert pending is not None
        number, *keys = pending.keys
        slot = dict(self.worlds[number].slots)[keys[pending.seats[seat]]]
        seats = list(pending.seats)
        seats[seat] += 1
        is_last = all(each == len(keys) for each in seats)
        waits = None if is_last else pending._replace(seats=tuple(seats))
        self.update(name, pending=waits)
        given = dict(slot.given)
        match pending.kind, slot.what:
            case "group", _:
                self.post(name, Connected(seat))
            case "averaged", (_, label):
                self.update(name, mean=(label, tuple(sorted(given.values()))))
                self.post(name, Averaged(seat))
            case "gathered", _:
                self.post(name, Gathered(seat, any(given.values())))
            case "moved", what:
                self.move(name, seat, what, given)
            case "handed", (_, bucket, source, _):
                if process.replica.rank != source and bucket is None:
                    self.update(name, mean=given[source])
                elif process.replica.rank != source:
                    self.put(name, bucket, seat, given[source][seat])
                self.post(name, Handed(seat))
            case "reduced", ("last", source):
                last = process.replica.buckets - 1
                self.put(name, last, seat, given[source])
                self.post(name, Reduced(last, seat))
            case "reduced", (_, bucket):
                steps, local, awaited, wrong, repeat = zip(*given.values(), strict=True)
                counts = tuple(map(sum, zip(*local, strict=True)))
                of = ("sum", steps[0]) if len(set(steps)) == 1 else ("mixed", tuple(sorted(set(steps))))
                self.put(name, bucket, seat, (*of, counts, any(wrong)))
                self.post(name, Reduced(bucket, seat, any(awaited), any(wrong), any(repeat)))
        if not is_last and name in self.processes and self.processes[name].pending != waits:
            raise Broken(f"{name} goes on before all its seats have done {slot.what}")


ALL, LEFT = "all", "left"
RUNS = ("reduced", "handed", "moved", "gathered", "averaged", "group")
WHERE = ("behind", "before", "end")  # a script asks for means


def _report(of: Any) -> Report | None:
    """Return what is said of a mean: of its label, or of the label and the result."""
    if of is None:
        return None
    until, step, where = of if isinstance(of[0], int) else of[0]
    return Report(until=until, state=step, number=WHERE.index(where), kind="")


def _word(value: Any) -> str:
    """Write an event or command for people."""
    name = type(value).__name__
    match value:
        case WorldHeard(world=world, rank=rank):
            members = ", ".join(each.name for each in world.members)
            return f"{name} {world.number} [{members}] rank={rank} over={world.over} parted={world.parted}"
        case AllSaid(said=said):
            return f"{name} " + " | ".join(_of_said(each) for each in said)
        case Say(number=number, said=said):
            return f"{name} in {number}: {_of_said(said)}"
    fields = [each for each in type(value).__dataclass_fields__ if each != "reason"]
    return " ".join([name, *(f"{each}={getattr(value, each)}" for each in fields)])


def _of_said(said: Any) -> str:
    words = [f"state={said.state}", f"until={said.until}", f"held={sorted(said.held)}", f"done={sorted(said.done)}"]
    words += [each for each in ("keeps_last", "is_new", "is_between") if getattr(said, each)]
    return " ".join(words)


def _pruned(world: WorldThere, processes: dict[str, Process]) -> WorldThere:
    """Forget rounds and collectives to which nobody can come any more, and for which nobody waits."""
    number = world.world.number
    members = [processes[each.name] for each in world.world.members if each.name in processes]
    members = [each for each in members if each.replica.met is None or each.replica.met.number <= number]
    waits = [each.pending.keys for each in members if each.pending is not None and each.pending.keys]
    waits = [keys for keys in waits if keys[0] == number]
    least = min((each.round[1] if each.round[0] == number else 0 for each in members), default=len(world.rounds))
    rounds = tuple(
        each if at >= least or (number, at) in waits else ((), LEFT) for at, each in enumerate(world.rounds, 1)
    )
    waited = {key for keys in waits for key in keys[1:]} | {key for each in members for _, key in each.early}
    is_there = [each for each in members if each.replica.met is not None and each.replica.met.number == number]
    slots = []
    for key, slot in world.slots:
        come = {rank for rank, _ in slot.given}
        may_come = len(is_there) < len(members) or any(each.replica.rank not in come for each in is_there)
        if key in waited or (may_come and (is_there or members)):
            slots.append((key, slot))
    if rounds == world.rounds and len(slots) == len(world.slots):
        return world
    return world._replace(rounds=rounds, slots=tuple(slots))


def begin(bounds: Bounds) -> Job:
    """Return the job before its scripts' first calls."""
    members = tuple(Member(name=str(slot), node="n", local_rank=slot) for slot in range(bounds.replicas))
    world = World(number=1, members=members, store="h:1")
    processes = tuple(_process(bounds, each.name, each.local_rank) for each in members)
    processes = tuple(
        each._replace(replica=each.replica._replace(heard=world, heard_rank=each.slot)) for each in processes
    )
    left = (bounds.losses, bounds.breaks, bounds.newcomers, bounds.flips, bounds.refusals, bounds.additions)
    return Job(processes, (WorldThere(world),), world, *left)


def _process(bounds: Bounds, name: str, slot: int) -> Process:
    replica = Replica(micro_batches=bounds.micro_batches, buckets=bounds.buckets, seats=bounds.seats)
    sums = ((GARBAGE,) * bounds.seats,) * bounds.buckets
    return Process(name, slot, replica, (0,) * bounds.micro_batches, sums)


def steps(bounds: Bounds, job: Job) -> Iterator[tuple[str, bool, Any]]:
    """Yield all that can happen next: what it is, whether it is a fault, and what carries it out on a `Move`."""
    by_name = {each.name: each for each in job.processes}
    for process in job.processes:
        if process.has_exited:
            continue
        yield from ((f"{process.name}: {what}", False, do) for what, do in _of_process(bounds, job, process, by_name))
    for member in job.newest.members:
        if member.name not in by_name:
            yield f"the agents notice that {member.name} is lost", False, lambda move, m=member: _notice(move, m)
    if job.has_ended:
        return
    if bounds.grows and job.newcomers:
        yield "a newcomer starts", False, lambda move: _start(move, len(by_name) + job.born + 7)
    if job.losses:
        for process in job.processes:
            others = [each for each in job.processes if each.name != process.name and _has_state(job.newest, each)]
            if others and not process.has_exited:
                yield f"{process.name} is lost", True, lambda move, n=process.name: _lose(move, n)
    yield from _of_states(job)
    if job.breaks:
        for world in job.worlds:
            if not world.is_broken and any(
                each.replica.is_connected and each.replica.met == world.world for each in job.processes
            ):
                number = world.world.number
                yield f"connections of world {number} break", True, lambda move, n=number: _break(move, n)


def _of_states(job: Job) -> Iterator[tuple[str, bool, Any]]:
    """Yield what happens to states beside the script: they become wrong, or cannot be sent for a while."""
    for process in job.processes:
        name = process.name
        if process.refuses:
            yield f"the state of {name} can be sent again", False, lambda move, n=name: move.update(n, refuses=False)
        elif job.refusals and not process.has_exited:
            yield f"the state of {name} cannot be sent", True, lambda move, n=name: _refuse(move, n)
        if job.flips and not process.is_wrong and isinstance(process.replica.record, Stepping | Computing):
            yield f"the state of {name} becomes wrong", True, lambda move, n=name: _flip(move, n)


def _refuse(move: Move, name: str) -> None:
    move.refusals -= 1
    move.update(name, refuses=True)


def _flip(move: Move, name: str) -> None:
    move.flips -= 1
    move.update(name, is_wrong=True)


def _has_state(newest: World, process: Process) -> bool:
    """Whether others may rely on it: else all begin again when the rest is lost."""
    record = process.replica.record
    record = getattr(record, "meeting", record)
    if isinstance(record, InMeeting) and not record.has_state:
        return False
    return not isinstance(record, Outside | Arriving | Passing) and newest.rank_of(process.name) is not None


def _lose(move: Move, name: str) -> None:
    move.losses -= 1
    move.lose(name)


def _break(move: Move, number: int) -> None:
    move.breaks -= 1
    move.worlds[number] = move.worlds[number]._replace(is_broken=True)


def _notice(move: Move, member: Member) -> None:
    move.next_world(lost=(member.name,))
    if move.newcomers and not move.bounds.grows and not move.has_ended:
        _start(move, member.local_rank)


def _start(move: Move, slot: int) -> None:
    move.newcomers -= 1
    move.born += 1
    name = f"{slot}+{move.born}"
    move.processes[name] = _process(move.bounds, name, slot)


def _exit(move: Move, name: str) -> None:
    """End its script: nobody needs those who have come since the world in which all were at the end, and they end."""
    process = move.processes[name]
    met = process.replica.met
    known = {each.name for each in met.members} if met is not None else set()
    made_in = process.parted_in.world
    known -= {each.name for each in move.processes.values() if each.since > made_in > 0}
    if not move.has_ended and process.parted_in.world:
        move.next_world(over=process.parted_in.world)
    move.has_ended = True
    for each in list(move.processes.values()):
        if each.name not in known and not each.has_exited:
            move.lose(each.name)
    move.update(name, has_exited=True, pending=None)


def _of_process(bounds: Bounds, job: Job, process: Process, by_name: dict[str, Process]) -> Iterator[tuple[str, Any]]:
    name, replica, pending = process.name, process.replica, process.pending
    if replica.heard is None or job.newest.number > replica.heard.number:
        yield f"it hears of world {job.newest.number}", lambda move: move.hear(name)
    if isinstance(replica.record, Ended):
        return
    if pending is None:
        yield from _of_script(bounds, process, has_additions=job.additions > 0)
        return
    match pending.kind:
        case "ask":
            yield "its agent answers", lambda move: _answer(move, name)
        case "copy":
            yield from _of_copy(job, process)
        case "said" | "judged":
            yield from _of_round(job, process)
        case "newcomer" | "holders":
            yield "its patience is over", lambda move: move.post(name, PatienceOver())
        case kind if kind in RUNS:
            yield from _of_collective(bounds, job, process, by_name)


def _of_round(job: Job, process: Process) -> Iterator[tuple[str, Any]]:
    """Yield how a round of the members ends for one that has spoken in it."""
    name, pending = process.name, process.pending
    assert pending is not None
    number, mine = pending.keys
    words, end = next(each for each in job.worlds if each.world.number == number).rounds[mine - 1]
    said = tuple(word for _, word in words)
    if end == LEFT:
        yield "a member has left this round", lambda move: move.post(name, RoundLeft())
    elif end == ALL and pending.kind == "judged":
        yield "it hears who differs", lambda move: _judge(move, name, said)
    elif end == ALL:
        yield "all have spoken", lambda move: move.post(name, AllSaid(said))
    elif process.replica.knows_newer:
        yield "it leaves this round", lambda move: _leave_round(move, name, number, mine)


def _judge(move: Move, name: str, wrong: tuple[bool, ...]) -> None:
    """Those are wrong who are fewer; if nobody knows who is, all are."""
    move.update(name, pending=None)
    rank = move.processes[name].replica.rank
    if not any(wrong):
        move.post(name, Judged(WhoIsWrong.NOBODY))
    elif wrong[rank] or 2 * sum(wrong) >= len(wrong):
        move.post(name, Judged(WhoIsWrong.THIS))
    else:
        move.post(name, Judged(WhoIsWrong.OTHERS))


def _leave_round(move: Move, name: str, number: int, mine: int) -> None:
    move.leave_round(number, mine)
    move.post(name, RoundLeft())


def _of_script(bounds: Bounds, process: Process, *, has_additions: bool) -> Iterator[tuple[str, Any]]:
    name, replica = process.name, process.replica
    if where := _where_it_asks(bounds, replica):
        label = (replica.until, replica.step, where)
        if process.asked != label:
            yield f"its script asks for a mean, {where}", lambda move: _ask(move, name, label)
            return
    match replica.record:
        case Stepping(is_behind=True):
            yield f"its loop comes round behind step {replica.step}", lambda move: move.post(name, StepMade())
        case Outside() | Passing() | Finished():
            if process.calls < len(bounds.totals):
                total = bounds.totals[process.calls]
                yield f"its script calls run.steps({total})", lambda move: _call(move, name, total)
            elif isinstance(replica.record, Finished):
                yield "its script ends", lambda move: _exit(move, name)
            else:
                raise Broken(f"{name} has passed by all calls of its script")
        case Stepping(is_behind=False):
            if replica.step < replica.until:
                yield f"its script begins step {replica.step}", lambda move: _begin_step(move, name)
            else:
                yield "its script has made all steps of its call", lambda move: move.post(name, CallEnded())
        case Computing(left=left):
            yield f"it computes {sorted(left)}", lambda move: _compute(move, name, sorted(left))
            if bounds.overlaps and len(left) > 0:
                yield from _of_backward(bounds, process, sorted(left), has_additions=has_additions)


def _begin_step(move: Move, name: str) -> None:
    move.lay_out(name, move.processes[name].replica.step)
    move.post(name, StepBegun())


def _where_it_asks(bounds: Bounds, replica: Replica) -> str:
    """Return where its script is, if it asks for a mean there."""
    match replica.record:
        case Stepping(is_behind=True):
            where = "behind"
        case Stepping() if replica.step < replica.until:
            where = "before"
        case Finished() | Passing():
            where = "end"
        case _:
            where = ""
    return where if where in bounds.means else ""


def _ask(move: Move, name: str, label: Label) -> None:
    move.update(name, asked=label, is_offered=False)
    move.post(name, MeanAsked())


def _call(move: Move, name: str, total: int) -> None:
    move.update(name, calls=move.processes[name].calls + 1)
    move.post(name, CallBegun(total))


def _compute(move: Move, name: str, indices: list[int]) -> None:
    for index in indices:
        _compute_one(move, name, index)
    move.post(name, MoreAsked())


def _compute_one(move: Move, name: str, index: int) -> None:
    local = list(move.processes[name].local)
    local[index] += 1
    move.update(name, local=tuple(local))
    move.post(name, Computed(index))


def _of_backward(
    bounds: Bounds, process: Process, left: list[int], *, has_additions: bool
) -> Iterator[tuple[str, Any]]:
    """Yield what happens while it computes: some of its micro-batches, and the first buckets of the next one."""
    name, begun = process.name, len(process.early)
    if len(left) > 1:
        yield f"it computes {left[0]}", lambda move: _compute_one(move, name, left[0])
    if begun < bounds.buckets - 1:
        yield f"bucket {begun} is there", lambda move: move.post(name, BucketReady(begun))
        if has_additions:
            yield f"bucket {begun} seems to be there", lambda move: _seem(move, name, begun)


def _seem(move: Move, name: str, bucket: int) -> None:
    move.additions -= 1
    move.seems_there = True
    move.post(name, BucketReady(bucket))
    move.seems_there = False


def _answer(move: Move, name: str) -> None:
    if move.newest.rank_of(name) is not None:
        if move.processes[name].replica.knows_newer:
            move.hear(name)
        move.update(name, pending=None)
        move.post(name, Answered(is_member=True))
        return
    job = move.done()
    sources = [each for each in job.processes if _has_state(job.newest, each) and not each.has_exited]
    where = (sources[0].replica.until, sources[0].replica.step) if sources else None
    move.post(name, Answered(has_source=bool(sources), where=where))


def _of_copy(job: Job, process: Process) -> Iterator[tuple[str, Any]]:
    name = process.name
    if process.copy is None:
        sources = [each for each in job.processes if _has_state(job.newest, each) and not each.has_exited]
        for source in sources:
            if source.replica.may_be_copied:
                yield f"it begins to copy the state of {source.name}", lambda move, s=source: _copy(move, name, s)
        if not sources:
            yield "nobody gives it a state", lambda move: _miss(move, name)
    elif process.copy[3] and next(each for each in job.processes if each.name == process.copy[0]).refuses:
        yield f"{process.copy[0]} cannot send its state", lambda move: _miss(move, name, is_refused=True)
    elif process.copy[3]:
        yield f"it has the state of {process.copy[0]}", lambda move: _copied(move, name)
    else:
        yield f"{process.copy[0]} has broken off the copy", lambda move: _miss(move, name)


def _copy(move: Move, name: str, source: Process) -> None:
    move.update(name, copy=(source.name, source.replica.until, source.replica.step, True))
    move.post(source.name, HoldBegan())


def _miss(move: Move, name: str, *, is_refused: bool = False) -> None:
    move.release(name)
    move.post(name, NotCopied(is_refused))


def _copied(move: Move, name: str) -> None:
    copy = move.processes[name].copy
    assert copy is not None
    source = move.processes[copy[0]]
    if source.params != copy[2]:
        raise Broken(f"{name} has copied a state of two steps")
    move.update(name, is_wrong=source.is_wrong)
    move.post(name, Copied(copy[1], copy[2]))


def _of_collective(
    bounds: Bounds, job: Job, process: Process, by_name: dict[str, Process]
) -> Iterator[tuple[str, Any]]:
    name, pending = process.name, process.pending
    assert pending is not None
    number, *keys = pending.keys
    world = next(each for each in job.worlds if each.world.number == number)
    slots = dict(world.slots)
    is_whole = True
    for seat in range(bounds.seats):
        if pending.seats[seat] == len(keys):
            continue
        slot = slots[keys[pending.seats[seat]]]
        if _may_end(process, world.world, slot):
            yield f"its {pending.kind} {slot.what} is done in seat {seat}", lambda move, s=seat: move.end(name, s)
        else:
            is_whole = False
    if _is_broken(job, world, by_name):
        yield "what it does with others breaks", lambda move: move.post(name, GroupBroke("closed"))
    elif not is_whole and any(
        (other := by_name.get(each.name)) and other.replica.met is not None and other.replica.met.number > number
        for each in world.world.members
    ):
        yield "it learns that others have gone on", lambda move: move.post(name, Outgrown())


def _may_end(process: Process, world: World, slot: Slot) -> bool:
    come = {rank for rank, _ in slot.given}
    match slot.what:
        case ("state", source, to, False):
            return source in come if process.replica.rank in to else {source, *to} <= come
        case ("bucket", _, source, to) if to is not None:
            return {source, to} <= come
    return len(come) == world.size


def _is_broken(job: Job, world: WorldThere, by_name: dict[str, Process]) -> bool:
    """Whether a collective of this world may break for one that waits in it."""
    if world.is_broken or job.newest.breaks(world.world):
        return True
    for member in world.world.members:
        other = by_name.get(member.name)
        if other is None or other.has_exited:
            return True
    return False


def is_end(job: Any) -> bool:
    """Whether all scripts have ended."""
    return all(each.has_exited for each in job.processes)


def why_wrong_at_end(bounds: Bounds, job: Job) -> str:
    """All have made all steps."""
    if not job.processes:
        return ""  # the last who had the state has missed a step of one that was lost then: all begin again
    total = bounds.totals[-1]
    wrong = [each.name for each in job.processes if each.params != total or each.replica.step != total]
    return f"{', '.join(wrong)} ended with other than {total} steps" if wrong else ""


def key_of(job: Job) -> int:
    """Return a number that is the same for states which differ in nothing that matters."""
    used = {job.newest.number, job.newest.anew, job.newest.parted.world}
    for each in job.processes:
        replica = each.replica
        for world in (replica.heard, replica.met):
            if world is not None:
                used |= {world.number, world.anew, world.parted.world}
        used |= {each.parted_in.world, each.since, _parts_in(replica.record), each.round[0]}
    for there in job.worlds:
        used |= {there.world.number, there.world.anew, there.world.parted.world}
    order = sorted(used)
    names = {each.name: at for at, each in enumerate(job.processes)}

    known: dict[int, Any] = {id(None): None}  # of worlds: most are known to several processes

    def world_key(world: World | None) -> Any:
        if id(world) not in known:
            assert world is not None
            known[id(world)] = key_of_world(world)
        return known[id(world)]

    def key_of_world(world: World) -> Any:
        members = tuple(names.get(each.name, -1) for each in world.members)
        marks = (world.number, world.anew, world.parted.world)
        return (*(bisect_left(order, each) for each in marks), world.parted.total, world.over > 0, members)

    def process_key(process: Process) -> Any:
        replica = process.replica
        copy = process.copy
        return (
            _record_key(replica.record, order),
            (replica.until, replica.step, replica.work, replica.heard_rank, replica.rank, replica.is_connected),
            (replica.holders, world_key(replica.heard), world_key(replica.met)),
            (process.local, process.sums, process.params, process.calls, process.counts, process.is_over),
            None if process.pending is None else _pending_key(process.pending, order),
            (bisect_left(order, process.round[0]), process.round[1]),
            (bisect_left(order, process.parted_in.world), process.parted_in.total, bisect_left(order, process.since)),
            None if copy is None else (names.get(copy[0], -1), *copy[1:]),
            (process.has_exited, process.asked, process.mean, process.means, process.is_offered),
            (process.is_wrong, process.refuses, process.trains_other, process.early, process.must_repeat),
        )

    worlds = tuple((world_key(each.world), each.rounds, each.slots, each.is_broken) for each in job.worlds)
    rest = (job.losses, job.breaks, job.newcomers, job.flips, job.refusals, job.additions, job.has_ended)
    return hash((tuple(map(process_key, job.processes)), worlds, world_key(job.newest), rest))


def _parts_in(record: Any) -> int:
    return int(getattr(getattr(record, "meeting", record), "parts_in", 0))


def _record_key(record: Any, order: list[int]) -> Any:
    if isinstance(record, Handing | Moving):
        return type(record), replace(record, meeting=_relative(record.meeting, order))
    return type(record), _relative(record, order) if isinstance(record, InMeeting) else record


def _relative(meeting: InMeeting, order: list[int]) -> InMeeting:
    return replace(meeting, parts_in=bisect_left(order, meeting.parts_in)) if meeting.parts_in else meeting


def _pending_key(pending: Any, order: list[int]) -> Any:
    if not pending.keys:
        return pending.kind
    return pending.kind, bisect_left(order, pending.keys[0]), pending.keys[1:], pending.seats
