"""All interleavings of a few replicas of several processes that run the real ``handle_member``.

It is as in `interleavings`, whose rounds, collectives and worlds it uses, with these differences:

- *a process* is one member of a replica; passes are a collective of the replica, which all its members must make alike;
- *groups*: a collective is of all who train, of a seat, of a replica, or of two; who trains with whom is agreed on;
- *connections* are cut by each process for itself: when it is told so, or when its agent tells it of a newer world, in
  the thread that hears it, unless the protocol says that what goes on may end. A collective may break for one if it, or
  another one that takes part, has cut its connections, or is gone; and may have ended for others all the same;
- *memory*: what is in the sums of each bucket, what is kept of them before a reduction, and what breaks leaves garbage;
- *the norm* is found with the other members of a replica before the optimizer steps, and the step may come later;
- *the end* is announced in the store of the members by those who know that all have come to it.

What is not modelled: reductions that begin in passes, parts of the optimizer's state (only what all do with them),
checkpoints, and scripts that do not make the steps that they are given. One that waits for nothing but a newer world
hears of it at once, and what it has cut breaks at once for it. Once no fault can come any more, and all are in the
newest world, one order stands for all.

A process is lost only if all seats are left with a state that the others can go on from, as far as that is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import interleavings
from interleavings import ALL, GARBAGE, LEFT, Broken, Decide, Pending, Slot, WorldThere

from unicron_elastic.base.world import Member, World
from unicron_elastic.engine.protocol.handle_member import handle_member
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
from unicron_elastic.engine.protocol.replica_command import (
    AskAgent,
    Average,
    AwaitWorld,
    Clear,
    Commit,
    Compute,
    Gather,
    HandOver,
    LetGo,
    MakeGroup,
    MoveState,
    NoteMeeting,
    Raise,
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
from unicron_elastic.engine.protocol.replica_layout import ReplicaShape, first_layout, name_of
from unicron_elastic.engine.protocol.replica_member import ReplicaMember, Stranded
from unicron_elastic.engine.protocol.replica_phase import Ended, Finished, Outside, Standing, Stepping


@dataclass(frozen=True, slots=True)
class MemberBounds:
    """`MemberBounds` are those of one exploration. ``newcomers`` take the place of lost ones."""

    replicas: int
    seats: int
    steps: int = 1
    micro_batches: int = 2
    buckets: int = 1
    losses: int = 0
    breaks: int = 0  # connections that break though nobody is lost
    newcomers: int = 0
    is_sharded: bool = False
    sums: bool = False  # the script asks for a sum behind each step
    evaluates: bool = False  # it makes other passes before each step
    enters: bool = False  # processes enter one after another; else all are in their first passes to begin with
    first: int = 0  # so many steps are taken before any fault, each the first that can be
    window: int = 0  # so many steps after these the first fault comes, or none does; 0: at any time
    victims: tuple[int, ...] = ()  # slots of those who may be lost, or lose their connections; (): all
    hasty: bool = False  # agents connect all anew when connections break of one that is lost, and not only without it

    @property
    def shape(self) -> ReplicaShape:
        """How a replica is cut."""
        return ReplicaShape(tensor=1, pipeline=self.seats)


class MemberProcess(NamedTuple):
    """`MemberProcess` is one process: what it has decided, its memory, and how its script and its agent see it."""

    name: str
    slot: int
    replica: ReplicaMember
    sums: tuple[tuple[Any, Any], ...]  # of each bucket: what is in it, and what is kept of it; (): nothing is
    computed: int = 0  # micro-batches of which the tokens are counted here
    params: int = 0
    has_stepped: bool = False  # the optimizer's own part, since gradients were whole
    is_mixed: bool = False  # of the parameters it has made the step with its own part alone
    confirmed_by: frozenset[str] = frozenset()  # processes that came with it to the end of its latest step
    pending: Pending | None = None
    round: tuple[int, int] = (0, 0)
    counts: tuple[tuple[Any, int], ...] = ()
    group: int = 1  # the world to which it is connected, or was last
    cut: frozenset[int] = frozenset()  # worlds to which it has cut its connections
    has_parted: bool = False
    has_exited: bool = False
    asked: int = -1  # behind which step it has asked for a sum
    evaluated: int = -1
    early: tuple[Any, ...] = ()


class MemberJob(NamedTuple):
    """`MemberJob` is one state of everything. ``made`` are the seats of which a process has made all steps."""

    processes: tuple[MemberProcess, ...]
    worlds: tuple[WorldThere, ...]
    newest: World
    losses: int
    breaks: int
    newcomers: int
    is_over: bool = False  # somebody has announced the end
    made: frozenset[int] = frozenset()
    born: int = 0
    patience: int = 0  # for the first fault


SIMPLE: dict[str, ReplicaEvent] = {"group": Connected(), "confirmed": Confirmed(), "evaluated": Evaluated()}


class MemberMove(interleavings.Move):
    """`MemberMove` carries out one step on a copy of a job."""

    bounds: Any
    processes: dict[str, Any]

    def __init__(
        self, bounds: MemberBounds, job: MemberJob, decide: Decide = handle_member, told: list[str] | None = None
    ) -> None:
        self.bounds, self.decide = bounds, decide
        self.processes = {each.name: each for each in job.processes}
        self.worlds = {each.world.number: each for each in job.worlds}
        self.newest = job.newest
        self.losses, self.breaks, self.newcomers = job.losses, job.breaks, job.newcomers
        self.is_over, self.made, self.born, self.patience = job.is_over, job.made, job.born, job.patience
        self.told = told

    def done(self) -> Any:
        processes = tuple(sorted(self.processes.values(), key=lambda each: (each.slot, each.name)))
        numbers = {self.newest.number}
        for each in processes:
            numbers |= {world.number for world in (each.replica.heard, each.replica.met) if world is not None}
            if not each.has_exited:
                numbers.add(each.group)
        worlds = tuple(_pruned(self.worlds[number], self.processes) for number in sorted(numbers & self.worlds.keys()))
        processes = tuple(each if each.cut <= numbers else each._replace(cut=each.cut & numbers) for each in processes)
        is_first = (self.losses, self.breaks) == (self.bounds.losses, self.bounds.breaks)
        if self.bounds.window and is_first:
            self.patience -= 1
            if not self.patience:
                self.losses = self.breaks = 0
        left = (self.losses, self.breaks, self.newcomers)
        return MemberJob(processes, worlds, self.newest, *left, self.is_over, self.made, self.born, self.patience)

    # -- processes ----------------------------------------------------------------------------------------------------

    def post(self, name: str, event: ReplicaEvent) -> None:
        """Let a member decide, and carry out what it says."""
        process = self.processes[name]
        replica, commands = self.decide(process.replica, event)
        if self.told is not None:
            self.told.append(f"    {name}: {_word(event)}")
            self.told += [f"        {_word(each)}: {each.reason}" for each in commands]
        self.processes[name] = process._replace(replica=replica)
        if isinstance(event, AllSaid) and isinstance(replica.record, Stranded) and not self.is_over:
            self.check_lost(name, event.said)
        for command in commands:
            if name in self.processes:
                self.carry_out(name, command)

    def carry_out(self, name: str, command: ReplicaCommand) -> str:
        match command:
            case Raise(kind=kind, reason=reason):
                if kind != "no state left" or self.is_over or len(self.made) == self.bounds.seats:
                    raise Broken(f"{name} is told an error: {kind}: {reason}")
                self.processes = {}  # all begin again
            case Commit() | LetGo() | Compute() | ReturnMean() | MakeStep() | Evaluate():
                self.update(name, pending=None)
                self.give_to_script(name, command)
            case EndProcess():
                self.update(name, has_exited=True, pending=None)
            case AskAgent():
                self.update(name, pending=Pending("ask"))
            case AwaitWorld():
                self.update(name, pending=Pending("world"))
            case SitOut():
                self.update(name, pending=Pending("spare"))
            case AskEnd():
                self.update(name, pending=Pending("end?"))
            case Say(number=number, said=said):
                self.speak(name, number, said, "said")
            case TellReady() | TellBroke() | TellParted() | Disconnect() | NoteMeeting():
                self.note(name, command)
            case Clear() | Drop() | Restore():
                self.change_sums(name, command)
            case _:
                self.begin_collective(name, command)
        return name

    def give_to_script(self, name: str, command: ReplicaCommand) -> None:
        process = self.processes[name]
        if process.is_mixed:
            raise Broken(f"the script of {name} is given parameters of which a part is of the step before")
        match command:
            case Compute(indices=indices, may_reduce=may_reduce):
                is_first = all(not any(data) for data, _ in process.sums if data != GARBAGE)
                if may_reduce != (is_first and not process.replica.work.done):
                    raise Broken(f"{name} may reduce in passes what is not whole then")
                self.arrive(
                    name, "passes", [(self.group_of(name, "replica"), ("passes", process.params, indices), None)]
                )
            case MakeStep():
                self.check_step(name)
                if process.replica.work.norm is None and self.bounds.seats > 1:
                    self.arrive(name, "norm", [(self.group_of(name, "replica"), ("norm", process.params), None)])
                elif process.replica.work.norm is None:
                    self.update(name, pending=Pending("norm alone"))
                else:
                    self.step(name)
            case Evaluate():
                self.arrive(name, "evaluated", [(self.group_of(name, "replica"), ("evaluate", process.params), None)])

    def note(self, name: str, command: ReplicaCommand) -> None:
        process = self.processes[name]
        match command:
            case TellReady():
                self.update(name, pending=Pending("a world"))
                self.change(joined=(Member(name=name, node="n", local_rank=process.slot),))
            case TellBroke(number=number):
                self.cut(name, number)
                is_explained = not self.bounds.hasty and any(
                    each.name not in self.processes for each in self.newest.members
                )
                if self.newest.number == number and not is_explained:
                    self.change(anew=True)
            case Disconnect(number=number):
                self.cut(name, number)
            case TellParted():
                self.update(name, has_parted=True)
                if process.replica.met is not None and process.replica.met.number != self.newest.number:
                    self.change()

    def group_of(self, name: str, of: str) -> tuple[int, ...]:
        """Return the members of its replica, of its seat, or all who train."""
        member = self.processes[name].replica
        layout = member.layout
        match of:
            case "replica":
                found: tuple[int, ...] = layout.replicas[member.number]
            case "seat":
                found = layout.in_seat(member.seat)
            case _:
                found = tuple(sorted(each for members in layout.replicas for each in members))
        return found

    def cut(self, name: str, number: int) -> None:
        self.update(name, cut=self.processes[name].cut | {number})

    def hear(self, name: str) -> None:
        """Let it hear of the newest world: the thread that hears it cuts connections at once, or leaves them."""
        process = self.processes[name]
        member = process.replica
        if member.met is not None and not member.may_go_on(self.newest):
            self.cut(name, process.group)
        self.post(name, WorldHeard(self.newest, self.newest.rank_of(name)))
        self.break_what_is_cut(name)

    def break_what_is_cut(self, name: str) -> None:
        """Let what cannot end any more break at once, and a round be left: what all have come to may end still."""
        process = self.processes.get(name)
        if process is None or process.pending is None or not process.pending.keys:
            return
        number, *keys = process.pending.keys
        if process.pending.kind == "said":
            _, end = self.worlds[number].rounds[keys[0] - 1]
            if not end and process.replica.knows_newer:
                self.leave_round(number, keys[0])
                self.post(name, RoundLeft())
        elif number in process.cut:
            slot = dict(self.worlds[number].slots)[keys[process.pending.seats[0]]] if keys else None
            if slot is None or len(slot.given) < len(keys[process.pending.seats[0]][0]):
                self.break_one(name)

    def hear_if_awaited(self, name: str) -> None:
        """Let one that waits for nothing but a newer world hear of it at once."""
        process = self.processes.get(name)
        if process is None or process.pending != Pending("world") or self.newest.rank_of(name) is None:
            return
        if process.replica.heard is None or process.replica.heard.number < self.newest.number:
            self.hear(name)

    # -- worlds -------------------------------------------------------------------------------------------------------

    def change(self, *, lost: tuple[str, ...] = (), joined: tuple[Member, ...] = (), anew: bool = False) -> None:
        """Make the next world, without those who have parted; none if nobody would be in it."""
        parted = {each.name for each in self.processes.values() if each.has_parted}
        if parted:
            for each in list(self.processes.values()):
                if self.newest.rank_of(each.name) is None and not each.has_exited and not each.has_parted:
                    del self.processes[each.name]  # newcomers end
            joined = ()
        gone, names = {*lost, *parted}, {each.name for each in self.newest.members}
        if (not names & gone and not joined and not anew) or not names - gone:
            return
        self.newest = self.newest.after(store="h:1", reason="", lost=sorted(gone), joined=joined, anew=anew)
        self.worlds[self.newest.number] = WorldThere(self.newest)
        for name in list(self.processes):
            self.hear_if_awaited(name)

    def lose(self, name: str) -> None:
        del self.processes[name]

    # -- collectives --------------------------------------------------------------------------------------------------

    def arrive(self, name: str, kind: str, begun: list[tuple[Any, Any, Any]]) -> None:
        process = self.processes[name]
        if process.replica.met is not None and process.replica.met.number in process.cut and kind != "group":
            self.update(name, pending=Pending(kind, (process.replica.met.number,), (0,)))  # it breaks
            return
        number, keys = self.come(name, begun)
        self.update(name, pending=Pending(kind, (number, *keys), (0,)))

    def begin_collective(self, name: str, command: ReplicaCommand) -> None:
        process = self.processes[name]
        everybody = self.group_of(name, "all") if not isinstance(command, MakeGroup) else ()
        match command:
            case MakeGroup(layout=layout):
                assert layout is not None
                self.make_group(name, layout)
            case CountTokens():
                tokens = process.computed if process.replica.seat == 0 else 0
                self.arrive(name, "counted", [(everybody, ("count",), tokens)])
            case Reduce(buckets=buckets):
                self.reduce(name, buckets)
            case SumWithin(keeps=keeps):
                self.sum_within(name, keeps=keeps)
            case Confirm():
                names = [each.name for each in process.replica.met.members]
                self.update(name, confirmed_by=frozenset(names[each] for each in everybody))
                self.arrive(name, "confirmed", [(everybody, ("confirm", process.params), None)])
            case Gather():
                self.arrive(name, "gathered", [(everybody, ("end",), None)])
            case Average():
                self.arrive(name, "averaged", [(everybody, ("mean", process.params), process.replica.rank)])
            case HandOver(bucket=bucket, source=source):
                self.fill(name, bucket, source)
            case MoveState(source=source, to=(to,)):
                given = (process.params, process.is_mixed) if process.replica.rank == source else None
                self.arrive(name, "moved", [((source, to), ("state", source), given)])
            case FindNorm():
                self.arrive(name, "learned", [(everybody, ("find norm",), process.params)])
            case Settle():
                self.arrive(name, "settled", [(everybody, ("settle",), None)])

    def make_group(self, name: str, layout: Any) -> None:
        process = self.processes[name]
        number = process.replica.met.number
        rank = process.replica.rank
        self.update(name, counts=(), group=number)
        if layout.replica_of(rank) is None:
            self.post(name, Connected())
            return
        everybody = tuple(sorted(each for members in layout.replicas for each in members))
        self.arrive(name, "group", [(everybody, ("group", layout.replicas), None)])

    def bucket(self, name: str, bucket: int, data: Any, kept: Any = None) -> None:
        sums = list(self.processes[name].sums)
        sums[bucket] = (data, sums[bucket][1] if kept is None else kept)
        self.update(name, sums=tuple(sums))

    def reduce(self, name: str, buckets: tuple[int, ...]) -> None:
        process = self.processes[name]
        begun = []
        for bucket in buckets:
            data, _ = process.sums[bucket]
            begun.append((self.group_of(name, "seat"), ("sum", bucket), (process.params, data)))
        self.arrive(name, "reduced", begun)
        for bucket in buckets:
            self.bucket(name, bucket, GARBAGE, process.sums[bucket][0])

    def sum_within(self, name: str, *, keeps: bool) -> None:
        process = self.processes[name]
        data, kept = process.sums[0]
        if self.bounds.seats == 1 and not self.bounds.is_sharded:
            self.update(name, pending=Pending("within alone"))
            return
        of = "all" if self.bounds.is_sharded else "replica"  # with parts, gradients go to other replicas, too
        self.arrive(name, "within", [(self.group_of(name, of), ("within", process.params), data)])
        self.bucket(name, 0, GARBAGE, data if keeps else kept)

    def fill(self, name: str, bucket: int | None, source: int) -> None:
        assert bucket is not None
        process = self.processes[name]
        data, _ = process.sums[bucket]
        has_it = bucket in process.replica.work.done
        self.arrive(name, "handed", [(self.group_of(name, "seat"), ("fill", bucket, source), data if has_it else None)])
        if not has_it:
            self.bucket(name, bucket, GARBAGE, data)

    def change_sums(self, name: str, command: ReplicaCommand) -> None:
        process = self.processes[name]
        done = process.replica.work.done
        nothing = (0,) * self.bounds.micro_batches
        match command:
            case Clear():
                self.update(name, sums=((nothing, nothing),) * self.bounds.buckets, computed=0)
            case Drop():
                for bucket in range(self.bounds.buckets):
                    if bucket not in done:
                        self.bucket(name, bucket, nothing)
                self.update(name, computed=0)
            case Restore(is_within=is_within):
                for bucket, (data, kept) in enumerate(process.sums):
                    was_reduced = data == GARBAGE or data[0] == "sum" or data[0] == "within"
                    if (bucket not in done and was_reduced) or (is_within and bucket == 0):
                        self.bucket(name, bucket, kept)

    def right(self, bucket: int, step: int) -> Any:
        """What is in a bucket if all is right."""
        word = "within" if bucket == 0 and (self.bounds.seats > 1 or self.bounds.is_sharded) else "sum"
        return (word, step, (1,) * self.bounds.micro_batches)

    def check_step(self, name: str) -> None:
        """The gradients that are applied have each micro-batch once, and what the replica shares."""
        process = self.processes[name]
        member = process.replica
        if process.params != member.step:
            raise Broken(f"{name} makes step {member.step} with the parameters of step {process.params}")
        for bucket, (data, _) in enumerate(process.sums):
            if data != self.right(bucket, member.step):
                raise Broken(f"{name} applies in step {member.step} as bucket {bucket} {data}")
        if member.work.tokens != self.bounds.micro_batches:
            raise Broken(f"{name} divides by {member.work.tokens} tokens, and there are {self.bounds.micro_batches}")
        if member.work.norm not in (None, float(member.step)):
            raise Broken(f"{name} makes step {member.step} with the norm of step {member.work.norm}")

    def step(self, name: str) -> None:
        """The optimizer has the norm: now it may step, some time."""
        self.update(name, pending=Pending("step"))

    def make(self, name: str) -> None:
        process = self.processes[name]
        member = process.replica
        if self.bounds.is_sharded and process.replica.record.standing is not Standing.APART:
            self.arrive(name, "parameters", [(self.group_of(name, "seat"), ("parameters", process.params), None)])
            self.update(name, has_stepped=True)
            return
        self.update(name, pending=None, has_stepped=False)
        self.finish_step(name, member)

    def finish_step(self, name: str, member: ReplicaMember) -> None:
        is_apart = member.record.standing is Standing.APART
        self.update(
            name,
            params=self.processes[name].params + 1,
            has_stepped=False,
            is_mixed=self.bounds.is_sharded and is_apart,
        )
        if member.step + 1 == self.bounds.steps:
            self.made |= {member.seat}
        self.post(name, StepMade())

    def check_lost(self, name: str, said: Any) -> None:
        """Nobody gives up while there is a whole replica with the state, or one that can make the step."""
        step = max(each.heads_for for each in said)
        norm = any(each.norm is not None for each in said if each.heads_for == step)
        have = {each.seat for each in said if each.state == step}
        ready = {each.seat for each in said if each.state == step - 1 and each.is_finished}
        every = set(range(self.bounds.seats))
        if step < self.bounds.steps and (every in (have, ready) or (norm and have | ready == every)):
            raise Broken(f"{name} says that nobody has the state, but some have it: {said}")
        states = {each.state for each in said} - {None}
        if len(states) == 1 and {each.seat for each in said if each.state is not None} == every:
            raise Broken(f"{name} says that nobody has the state, and all have the same: {said}")

    def end_one(self, name: str) -> None:
        """Let the next collective end well."""
        process = self.processes[name]
        pending = process.pending
        assert pending is not None
        number, *keys = pending.keys
        slot = dict(self.worlds[number].slots)[keys[pending.seats[0]]]
        done = pending.seats[0] + 1
        waits = None if done == len(keys) else pending._replace(seats=(done,))
        self.update(name, pending=waits)
        given = dict(slot.given)
        self.end_of(name, pending.kind, slot.what, given)
        self.run_on(name)

    def run_on(self, name: str) -> None:
        """Let its script go on to what it does with others next: nobody sees the difference between lost here or there.

        Unless it is about to hear of a newer world, which it may do anywhere in between.
        """
        while name in self.processes:
            process = self.processes[name]
            is_alone = process.pending is None or process.pending.kind in ALONE
            if process.has_exited or process.replica.heard != self.newest or not is_alone:
                return
            moves = list(_of_script(self.bounds, process) if process.pending is None else _alone(process))
            if not moves:
                return
            if self.told is not None:
                self.told.append(f"    {name}: {moves[0][0]}")
            moves[0][1](self)

    def end_of(self, name: str, kind: str, what: Any, given: dict[int, Any]) -> None:
        """Tell how a collective has ended, that ``what`` was, and what all have ``given``."""
        member = self.processes[name].replica
        if kind in SIMPLE:
            self.post(name, SIMPLE[kind])
            return
        match kind, what:
            case "passes", (_, _, indices):
                self.add(name, indices)
            case "reduced", (_, bucket):
                steps, local = zip(*given.values(), strict=True)
                if len(set(steps)) > 1 or any(each == GARBAGE or each[0] in ("sum", "within") for each in local):
                    raise Broken(f"{name} sums {given} in bucket {bucket}")
                self.bucket(name, bucket, ("sum", steps[0], tuple(map(sum, zip(*local, strict=True)))))
                self.post(name, Reduced(bucket))
            case "within", _:
                self.end_within(name, given)
            case "norm", _:
                self.post(name, NormFound(float(member.step)))
                self.step(name)
            case "learned", _:
                self.post(name, NormFound(float(min(each for each in given.values() if each != UNLIKE))))
            case "settled", _:
                self.update(name, is_mixed=False)
                self.post(name, Settled(self.bounds.buckets))
            case "handed", (_, bucket, source):
                if bucket not in member.work.done:
                    self.bucket(name, bucket, given[source])
                self.post(name, Handed())
            case "moved", (_, source):
                self.end_move(name, source, given)
            case _:
                self.end_for_script(name, kind, given)

    def end_for_script(self, name: str, kind: str, given: dict[int, Any]) -> None:
        match kind:
            case "counted":
                self.post(name, TokensCounted(sum(given.values())))
            case "parameters":
                self.finish_step(name, self.processes[name].replica)
            case "averaged":
                if set(given) != set(given.values()):
                    raise Broken(f"{name} is given a sum of {given}")
                self.check_sum(name, given)
                self.post(name, Averaged())
            case "gathered":
                self.is_over = True
                self.post(name, Gathered())

    def check_sum(self, name: str, given: dict[int, Any]) -> None:
        """All have given their share who have a share in the latest step."""
        process = self.processes[name]
        there = {process.replica.met.members[each].name for each in given}
        if lost := process.confirmed_by - there:
            raise Broken(f"{name} is given a sum without {sorted(lost)}")

    def end_within(self, name: str, given: dict[int, Any]) -> None:
        _, kept = self.processes[name].sums[0]
        if any(each[0] != "sum" for each in given.values()):
            raise Broken(f"{name} sums {given} up within its replica")
        mine = given[self.processes[name].replica.rank]
        self.bucket(name, 0, ("within", *mine[1:]), kept)
        self.post(name, SummedWithin())

    def end_move(self, name: str, source: int, given: dict[int, Any]) -> None:
        member = self.processes[name].replica
        step = member.record.meeting.agreement.step
        state, is_mixed = given[source]
        if state != step:
            raise Broken(f"{name} is given the state of step {state} for that of step {step}")
        if member.rank != source:
            self.update(name, params=step, is_mixed=is_mixed)
        self.post(name, Moved())

    def add(self, name: str, indices: tuple[int, ...]) -> None:
        """Add the gradients of these micro-batches to the sums that are not reduced."""
        process = self.processes[name]
        for bucket, (data, _) in enumerate(process.sums):
            if bucket not in process.replica.work.done:
                if data == GARBAGE or data[0] in ("sum", "within"):
                    raise Broken(f"{name} adds to {data}")
                self.bucket(name, bucket, tuple(each + (at in indices) for at, each in enumerate(data)))
        self.update(name, computed=process.computed + len(indices))
        for index in indices:
            self.post(name, Computed(index))
        self.post(name, MoreAsked())

    def break_one(self, name: str) -> None:
        """Let what it waits for break: passes leave garbage."""
        process = self.processes[name]
        assert process.pending is not None
        if process.pending.kind == "passes":
            for bucket in range(self.bounds.buckets):
                if bucket not in process.replica.work.done:
                    self.bucket(name, bucket, GARBAGE)
        if process.pending.kind == "group":
            self.cut(name, process.pending.keys[0])
        self.post(name, GroupBroke("closed"))
        self.hear_if_awaited(name)


Move = MemberMove  # as it is called in each model


def _word(value: Any) -> str:
    """Write an event or command for people."""
    match value:
        case WorldHeard(world=world, rank=rank):
            return f"WorldHeard {world.number} [{', '.join(each.name for each in world.members)}] rank={rank}"
        case AllSaid(said=said):
            return "AllSaid " + " | ".join(map(_of_said, said))
        case Say(number=number, said=said):
            return f"Say in {number}: {_of_said(said)}"
        case MakeGroup(number=number, layout=layout):
            assert layout is not None
            return f"MakeGroup {number}: {layout.replicas}, spares {layout.spares}"
    fields = [each for each in type(value).__dataclass_fields__ if each != "reason"]
    return " ".join([type(value).__name__, *(f"{each}={getattr(value, each)}" for each in fields)])


def _of_said(said: Any) -> str:
    words = [f"{said.seat} of {said.replica} state={said.state} held={sorted(said.held)} done={sorted(said.done)}"]
    words += [each for each in ("is_finished", "is_committed") if getattr(said, each)]
    words += [f"norm={said.norm}"] if said.norm is not None else []
    return " ".join(words)


def _pruned(there: WorldThere, processes: dict[str, MemberProcess]) -> WorldThere:
    """Forget rounds and collectives to which nobody can come any more, and for which nobody waits."""
    number = there.world.number
    alive = [each for each in processes.values() if not each.has_exited]
    members = [processes[each.name] for each in there.world.members if each.name in processes]
    members = [each for each in members if each.replica.met is None or each.replica.met.number <= number]
    waits = [each.pending.keys for each in alive if each.pending is not None and each.pending.keys]
    waits = [keys for keys in waits if keys[0] == number]
    least = min((each.round[1] if each.round[0] == number else 0 for each in members), default=len(there.rounds))
    rounds = tuple(
        each if at >= least or (number, at) in waits else ((), LEFT) for at, each in enumerate(there.rounds, 1)
    )
    waited = {key for keys in waits for key in keys[1:]}
    ranks = {each.name: rank for rank, each in enumerate(there.world.members)}
    may_come = {ranks[each.name] for each in members if each.name in ranks and number not in each.cut}
    slots = tuple(
        (key, slot._replace(given=tuple(sorted(slot.given, key=lambda each: each[0]))))
        for key, slot in there.slots
        if key in waited or (may_come & set(key[0])) - {rank for rank, _ in slot.given}
    )
    return there._replace(rounds=rounds, slots=slots)


def begin(bounds: MemberBounds) -> MemberJob:
    """Return the job before its scripts begin."""
    size = bounds.replicas * bounds.seats
    members = tuple(Member(name=str(slot), node="n", local_rank=slot) for slot in range(size))
    world = World(number=1, members=members, store="h:1")
    processes = tuple(_process(bounds, each.name, each.local_rank) for each in members)
    left = (bounds.losses, bounds.breaks, bounds.newcomers)
    job = MemberJob(processes, (WorldThere(world),), world, *left)
    if bounds.enters:
        return job
    move = MemberMove(bounds, job)
    for process in processes:
        _enter(move, process.name)
        move.run_on(process.name)
    job = move.done()
    quiet = replace(bounds, losses=0, breaks=0, window=0)
    for _ in range(bounds.first):
        _, _, do = next(steps(quiet, job._replace(losses=0, breaks=0)))
        move = MemberMove(quiet, job)
        do(move)
        job = move.done()
    return job._replace(losses=bounds.losses, breaks=bounds.breaks, patience=bounds.window)


def _process(bounds: MemberBounds, name: str, slot: int) -> MemberProcess:
    size = bounds.replicas * bounds.seats
    seat, number = bounds.shape.seat_of(slot, size)
    member = ReplicaMember(
        shape=bounds.shape,
        seat=seat,
        micro_batches=bounds.micro_batches,
        layout=first_layout(bounds.shape, size),
        rank=slot,
        replica=name_of(0, number),
        buckets=bounds.buckets,
        is_sharded=bounds.is_sharded,
    )
    nothing = (0,) * bounds.micro_batches
    return MemberProcess(name, slot, member, ((nothing, nothing),) * bounds.buckets)


def steps(bounds: MemberBounds, job: MemberJob) -> Iterator[tuple[str, bool, Any]]:
    """Yield all that can happen next: what it is, whether it is a fault, and what carries it out on a `MemberMove`."""
    by_name = {each.name: each for each in job.processes}
    is_quiet = not (job.losses or job.breaks or _is_disturbed(job, by_name))
    for process in job.processes:
        if process.has_exited:
            continue
        for what, do in _of_process(bounds, job, process, by_name):
            yield f"{process.name}: {what}", False, do
            if is_quiet:  # nothing can disturb what goes on any more, and in what order it ends does not matter
                return
    for member in job.newest.members:
        if member.name not in by_name:
            yield f"the agents notice that {member.name} is lost", False, lambda move, m=member: _notice(move, m)
    if job.losses:
        for process in (each for each in job.processes if not bounds.victims or each.slot in bounds.victims):
            if _may_be_lost(bounds, job, process):
                yield f"{process.name} is lost", True, lambda move, n=process.name: _lose(move, n)
    if job.breaks:
        for process in (each for each in job.processes if not bounds.victims or each.slot in bounds.victims):
            if process.replica.is_connected and process.group not in process.cut and not process.has_exited:
                yield f"{process.name} loses its connections", True, lambda move, n=process.name: _cut(move, n)


def _is_disturbed(job: MemberJob, by_name: dict[str, MemberProcess]) -> bool:
    """Whether anything is on its way that may meet what goes on in another order."""
    newest = job.newest
    if any(member.name not in by_name for member in newest.members):
        return True
    return any(
        each.replica.heard != newest
        or each.replica.met != newest
        or newest.number in each.cut
        or isinstance(each.replica.record, Outside)
        for each in job.processes
        if not each.has_exited
    )


def _may_be_lost(bounds: MemberBounds, job: MemberJob, process: MemberProcess) -> bool:
    """Whether others are left in each seat from whose state a job can go on, as far as that is known."""
    if process.has_exited or process.has_parted:
        return False
    top = max(each.params for each in job.processes)
    left = [each for each in job.processes if each is not process and each.params >= top - 1]
    return len({each.replica.seat for each in left if each.replica.has_state}) == bounds.seats


def _lose(move: MemberMove, name: str) -> None:
    move.losses -= 1
    move.lose(name)


def _cut(move: MemberMove, name: str) -> None:
    move.breaks -= 1
    move.cut(name, move.processes[name].group)


def _notice(move: MemberMove, member: Member) -> None:
    move.change(lost=(member.name,))
    if move.newcomers and not any(each.has_parted for each in move.processes.values()):
        move.newcomers -= 1
        move.born += 1
        name = f"{member.local_rank}+{move.born}"
        move.processes[name] = _process(move.bounds, name, member.local_rank)._replace(params=UNLIKE)


def _of_process(
    bounds: MemberBounds, job: MemberJob, process: MemberProcess, by_name: dict[str, MemberProcess]
) -> Iterator[tuple[str, Any]]:
    name, member, pending = process.name, process.replica, process.pending
    newer = member.heard is None or job.newest.number > member.heard.number
    if newer and job.newest.rank_of(name) is not None and not isinstance(member.record, Outside):
        yield f"it hears of world {job.newest.number}", lambda move: move.hear(name)
    if isinstance(member.record, Ended):
        return
    if pending is None:
        yield from _of_script(bounds, process)
        return
    match pending.kind:
        case "said":
            yield from _of_round(job, process)
        case "spare" if job.is_over:
            yield "it sees that others have ended", lambda move: move.post(name, OthersEnded())
        case "end?":
            event = OthersEnded() if job.is_over else OthersTrain()
            yield "it looks whether others have ended", lambda move: move.post(name, event)
        case kind if kind in ALONE:
            yield from _alone(process)
        case _ if pending.keys:
            yield from _of_collective(job, process, by_name)


UNLIKE = -9  # the parameters of a newcomer are nobody's
ALONE = ("norm alone", "within alone", "step")


def _alone(process: MemberProcess) -> Iterator[tuple[str, Any]]:
    """Yield what it does by itself."""
    name = process.name
    assert process.pending is not None
    match process.pending.kind:
        case "norm alone":
            yield "it finds the norm", lambda move: _find_norm(move, name)
        case "within alone":
            yield "it has nothing to sum up within", lambda move: _sum_alone(move, name)
        case "step":
            yield "its optimizer steps", lambda move: move.make(name)


def _find_norm(move: MemberMove, name: str) -> None:
    move.post(name, NormFound(float(move.processes[name].replica.step)))
    move.step(name)


def _sum_alone(move: MemberMove, name: str) -> None:
    move.post(name, SummedWithin())


def _enter(move: MemberMove, name: str) -> None:
    """Let it enter, and its agent say what it is; the newest world comes with that."""
    move.post(name, CallBegun(move.bounds.steps))
    if move.newest.rank_of(name) is None:
        move.post(name, Answered())
        return
    if move.processes[name].replica.heard != move.newest:
        move.post(name, WorldHeard(move.newest, move.newest.rank_of(name)))
    move.post(name, Answered(is_member=True))


def _of_round(job: MemberJob, process: MemberProcess) -> Iterator[tuple[str, Any]]:
    name, pending = process.name, process.pending
    assert pending is not None
    number, mine = pending.keys
    words, end = next(each for each in job.worlds if each.world.number == number).rounds[mine - 1]
    if end == LEFT:
        yield "a member has left this round", lambda move: move.post(name, RoundLeft())
    elif end == ALL:
        said = tuple(word for _, word in words)
        yield "all have spoken", lambda move: move.post(name, AllSaid(said))
    elif process.replica.knows_newer:
        yield "it leaves this round", lambda move: _leave_round(move, name, number, mine)


def _leave_round(move: MemberMove, name: str, number: int, mine: int) -> None:
    move.leave_round(number, mine)
    move.post(name, RoundLeft())


def _of_script(bounds: MemberBounds, process: MemberProcess) -> Iterator[tuple[str, Any]]:
    name, member = process.name, process.replica
    match member.record:
        case Outside():
            yield "its script begins", lambda move: _enter(move, name)
        case Stepping(is_behind=True):
            yield "its script calls the optimizer", lambda move: move.post(name, StepAsked())
        case Stepping() | Finished() if bounds.sums and process.asked < member.step:
            yield "its script asks for a sum", lambda move: _ask(move, name, member.step)
        case Stepping() if bounds.evaluates and process.evaluated < member.step:
            yield "its script evaluates", lambda move: _evaluate(move, name, member.step)
        case Stepping():
            yield f"its script begins step {member.step}", lambda move: move.post(name, StepBegun())
        case Finished():
            yield "its script ends", lambda move: _exit(move, name)


def _ask(move: MemberMove, name: str, step: int) -> None:
    move.update(name, asked=step)
    move.post(name, MeanAsked())


def _evaluate(move: MemberMove, name: str, step: int) -> None:
    move.update(name, evaluated=step)
    move.post(name, EvaluationAsked())
    process = move.processes[name]
    if move.bounds.seats == 1 and process.replica.has_state and process.pending is None:
        raise Broken(f"{name} is given nothing to evaluate, and needs nobody for it")


def _exit(move: MemberMove, name: str) -> None:
    move.update(name, has_exited=True, pending=None)


def _of_collective(
    job: MemberJob, process: MemberProcess, by_name: dict[str, MemberProcess]
) -> Iterator[tuple[str, Any]]:
    name, pending = process.name, process.pending
    assert pending is not None
    number, *keys = pending.keys
    there = next(each for each in job.worlds if each.world.number == number)
    if not keys:
        yield f"its {pending.kind} breaks", lambda move: move.break_one(name)
        return
    key = keys[pending.seats[0]]
    slot: Slot = dict(there.slots)[key]
    come = {rank for rank, _ in slot.given}
    is_giver = slot.what[0] == "state" and process.replica.rank == slot.what[1]
    wanted = set(key[0])
    if come >= wanted or is_giver:
        yield f"its {pending.kind} {slot.what} ends", lambda move: move.end_one(name)
    if _is_broken(process, there.world, wanted, by_name):
        yield f"its {pending.kind} breaks", lambda move: move.break_one(name)


def _is_broken(process: MemberProcess, world: World, ranks: set[int], by_name: dict[str, MemberProcess]) -> bool:
    """Whether a collective of these ranks of this world may break for one that waits in it."""
    if world.number in process.cut:
        return True
    if process.pending is not None and process.pending.kind == "group" and process.replica.knows_newer:
        return True
    for rank in ranks:
        other = by_name.get(world.members[rank].name)
        if other is None or other.has_exited or world.number in other.cut:
            return True
    return False


def why_wrong_at_end(bounds: MemberBounds, job: MemberJob) -> str:
    """Say what does not hold at the end: all steps are made, by a process in each seat at least."""
    if not job.processes:
        return ""  # the state was lost: all begin again
    wrong = [
        each.name
        for each in job.processes
        if each.params != bounds.steps and each.replica.record != Finished(Standing.APART)
    ]
    if wrong:
        return f"{', '.join(wrong)} ended with other than {bounds.steps} steps"
    return "" if len(job.made) == bounds.seats else "all have ended, and not one replica has made all steps"


def key_of(job: MemberJob) -> int:
    """Return a number that is the same for states which differ in nothing that matters."""
    used = {job.newest.number, job.newest.anew, 1}
    for each in job.processes:
        for world in (each.replica.heard, each.replica.met):
            if world is not None:
                used |= {world.number, world.anew}
        used |= {each.round[0], each.group, *each.cut}
    for there in job.worlds:
        used |= {there.world.number, there.world.anew}
    order = {number: at for at, number in enumerate(sorted(used))}
    names = {each.name: at for at, each in enumerate(job.processes)}

    def world_key(world: World | None) -> Any:
        if world is None:
            return None
        return order[world.number], order[world.anew], tuple(names.get(each.name, -1) for each in world.members)

    def process_key(process: MemberProcess) -> Any:
        member = process.replica
        replica = member._replace(heard=None, met=None, replica=None)
        pending = process.pending
        numbered = pending is not None and pending.keys
        return (
            (replica, _name_key(member.replica), world_key(member.heard), world_key(member.met)),
            process[3:7],
            None if pending is None else (pending.kind, order.get(pending.keys[0], -1) if numbered else 0),
            None if pending is None else (pending.keys[1:], pending.seats),
            (order[process.round[0]], process.round[1], process.counts, order[process.group]),
            (frozenset(order[each] for each in process.cut), *process[12:]),
        )

    # Who belongs to one replica matters, and not what it is called.
    called: dict[str | None, int] = {None: -1}

    def _name_key(name: str | None) -> int:
        return called.setdefault(name, len(called))

    def said_key(said: Any) -> Any:
        return replace(said, replica=None), _name_key(said.replica)

    def rounds_key(there: WorldThere) -> Any:
        return tuple((tuple((rank, said_key(said)) for rank, said in words), end) for words, end in there.rounds)

    processes = tuple(map(process_key, job.processes))
    worlds = tuple((world_key(each.world), rounds_key(each), each.slots) for each in job.worlds)
    rest = (job.losses, job.breaks, job.newcomers, job.is_over, job.made, job.patience)
    return hash((processes, worlds, world_key(job.newest), rest))
