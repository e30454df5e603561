"""The protocol beside the engine of a rank: told what that is told, it must say, compute and commit the same.

It decides when the engine acts, and with the news that the engine has looked at until then. The engine looks several
times on its way to one decision; if news come in between, both are right, and differ: then it is ``lost``, and follows
this rank no more. Who copies the state is not told to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from unicron_elastic.base.world import World
from unicron_elastic.engine.protocol.handle import handle
from unicron_elastic.engine.protocol.replica_command import ReplicaCommand, Say
from unicron_elastic.engine.protocol.replica_event import (
    AllSaid,
    Answered,
    CallBegun,
    CallEnded,
    Computed,
    Connected,
    Copied,
    Gathered,
    GroupBroke,
    Handed,
    HoldEnded,
    MoreAsked,
    Moved,
    NotCopied,
    PatienceOver,
    Reduced,
    ReplicaEvent,
    RoundLeft,
    StepBegun,
    StepMade,
    WorldHeard,
)
from unicron_elastic.engine.protocol.replica_phase import (
    Arriving,
    Committed,
    Computing,
    Errand,
    Finished,
    Handing,
    InMeeting,
    Moving,
    Parting,
    Passing,
    Reducing,
    Replica,
    Stepping,
    Talk,
    WaitFor,
)

SAID = ("state", "start", "until", "is_new", "is_between", "has_parted", "held", "done", "keeps_last", "buckets")


class Shadow:
    """`Shadow` follows one rank. ``compared`` counts what was the same."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.replica: Replica | None = None
        self.queue: list[ReplicaEvent] = []
        self.trail: list[str] = []
        self.says: Say | None = None  # and has not been compared
        self.asks = False  # whether the script has been given micro-batches
        self.lost = ""
        self.compared = 0
        self._attach(engine)

    # -- what it is told ----------------------------------------------------------------------------------------------

    def now(self, event: ReplicaEvent) -> None:
        """Tell it at once, behind what it was to be told before."""
        self.flush()
        self._post(event)

    def flush(self) -> None:
        queue, self.queue = self.queue, []
        for event in queue:
            self._post(event)

    def hear(self, world: World, name: str) -> None:
        """The engine has looked at this world."""
        if self.replica is None and not self.lost:
            self._make()
        if self.replica is not None and (self.replica.heard is None or world.number > self.replica.heard.number):
            self._post(WorldHeard(world, world.rank_of(name)))

    def _post(self, event: ReplicaEvent) -> None:
        if self.lost:
            return
        if self.replica is None:
            self._make()
        assert self.replica is not None
        self.trail.append(f"{self.replica.record} <- {event}"[:600])
        self.replica, commands = handle(self.replica, event)
        self._carry_out(commands)

    def _make(self) -> None:
        gradients = self.engine._gradients
        if gradients is not None:
            self.replica = Replica(micro_batches=gradients.micro_batches, buckets=len(gradients.buckets))

    def _carry_out(self, commands: tuple[ReplicaCommand, ...]) -> None:
        for command in commands:
            self.trail.append(f"    {command}"[:400])
            if isinstance(command, Say):
                self.says = command

    # -- what it must do ----------------------------------------------------------------------------------------------

    @property
    def record(self) -> Any:
        return None if self.replica is None or self.lost else self.replica.record

    def same(self, what: str, ours: Any, theirs: Any) -> None:
        """The protocol has ``ours``, and the engine ``theirs``."""
        if not self.lost:
            assert ours == theirs, f"{what}: the protocol has {ours}, the engine {theirs}\n" + "\n".join(
                self.trail[-30:]
            )
            self.compared += 1

    def must_be(self, kind: type, what: str) -> bool:
        """Whether it is there; else news have come in between."""
        if not self.lost and not isinstance(self.record, kind):
            self.lost = f"{what}, and the protocol is {self.record}"
        return not self.lost

    # -- where it is told ---------------------------------------------------------------------------------------------

    def _attach(self, engine: Any) -> None:
        for name in ("join", "begin_step", "backward", "reduce", "end_step", "end_optimizer_step", "part"):
            self._wrap(engine, name)
        for name in ("_said", "_transfer", "_gather_end", "_make_parts"):
            self._wrap(engine, name)

    def _wrap(self, owner: Any, name: str) -> None:
        setattr(owner, name, _Wrapped(getattr(owner, name), getattr(self, f"on_{name.strip('_')}")))

    def on_make_parts(self, call: Callable[..., Any], *arguments: Any) -> Any:
        result = call(*arguments)
        self._wrap(self.engine._assembly, "_compare")
        self.engine._assembly.reduce = _Wrapped(self.engine._assembly.reduce, self.on_sum)
        return result

    def on_join(self, call: Callable[..., Any], until: int, micro_batches: int) -> Any:
        self.queue.append(CallBegun(until))
        result = call(until, micro_batches)
        self.flush()
        self.must_be(Stepping if result else Passing, f"run.steps({until}) begins: {result}")
        return result

    def on_entered(self, invitation: Any) -> None:
        self.flush()
        if isinstance(self.record, Arriving) and self.record.errand is Errand.ANSWER:
            self.now(Answered(is_member=invitation is None, has_source=True))

    def on_fetched(self, has_state: bool) -> None:
        if isinstance(self.record, Arriving):
            engine = self.engine
            self.now(Copied(engine._registered.taken_until, engine.state) if has_state else NotCopied())

    def on_said(self, call: Callable[..., Any]) -> Any:
        said = call()
        self.flush()
        if self.says is None and isinstance(self.record, InMeeting) and self.record.talk is Talk.ALL:
            self._post(RoundLeft())
        number = self.engine._assembly.world.number
        if self.says is not None and self.says.number < number:  # it spoke in one that a newer one has replaced since
            self._post(RoundLeft())
        self._go()
        if self.must_be(InMeeting, "the engine meets the others") and self.says is not None:
            self.same("the world", self.says.number, number)
            for name in SAID:
                self.same(f"what is said of {name}", getattr(self.says.said, name), getattr(said, name))
            self.says = None
        return said

    def on_compare(self, call: Callable[..., Any], said: Any, everybody: Any) -> Any:
        result = call(said, everybody)
        if self.must_be(InMeeting, "all have spoken"):
            self.now(AllSaid(tuple(everybody)))
        return result

    def on_connected(self) -> None:
        if isinstance(self.record, InMeeting) and self.record.talk is Talk.GROUP:
            self.now(Connected())

    def on_handed(self) -> None:
        if isinstance(self.record, Handing):
            self._stay()
            self.now(Handed())

    def on_transfer(self, call: Callable[..., Any], *arguments: Any) -> Any:
        result = call(*arguments)
        if isinstance(self.record, Moving):
            self.now(Moved())
        return result

    def on_begin_step(self, call: Callable[..., Any]) -> Any:
        self.queue.append(StepBegun())
        return self._computes(call())

    def _computes(self, indices: Any) -> Any:
        self.asks = bool(indices)
        if indices:
            self.flush()
            if self.must_be(Computing, f"the engine computes {indices}"):
                self.same("what is computed", sorted(self.record.left), list(indices))
        return indices

    def on_backward(self, call: Callable[..., Any], index: int, loss: Any) -> Any:
        result = call(index, loss)
        self.queue.append(Computed(index))
        return result

    def on_reduce(self, call: Callable[..., Any]) -> Any:
        if self.asks:
            self.queue.append(MoreAsked())
        return self._computes(call())

    def on_sum(self, call: Callable[..., Any], step: int, *, is_awaited: bool) -> Any:
        self.flush()
        self.must_be(Reducing, "the engine reduces")
        if self.replica is not None:
            self.same("the step that is reduced", self.replica.step, step)
        result = call(step, is_awaited=is_awaited)
        if result:
            self._tell_reduced()
        return result

    def _tell_reduced(self) -> None:
        gradients = self.engine._gradients
        while isinstance(self.record, Reducing):
            buckets = sorted(bucket for bucket, _ in self.record.left if bucket in gradients.done)
            if not buckets:
                return
            if len(gradients.done) == len(gradients.buckets):
                self._stay()
            for bucket in buckets:
                self._post(Reduced(bucket, is_awaited=gradients.any_awaited()))

    def _stay(self) -> None:
        """Let it stay in the step until the engine leaves it, which looks for news before."""
        assert self.replica is not None
        self.replica = replace(self.replica, holders=1)

    def _go(self) -> None:
        if self.replica is not None:
            self.replica = replace(self.replica, holders=0)

    def on_broke(self, event: ReplicaEvent) -> None:
        """What the engine does with others has broken, as it knows now."""
        self.flush()
        self._tell_reduced()
        record = self.record
        is_together = isinstance(record, Reducing | Handing | Moving | Parting)
        if is_together or (isinstance(record, InMeeting) and record.talk is Talk.GROUP):
            self._post(event)
        elif isinstance(event, GroupBroke):
            self.must_be(Reducing, "the engine's world broke")

    def on_patience(self) -> None:
        record = self.record
        if isinstance(record, Committed | Parting) and record.wait is WaitFor.NEWCOMER:
            self._post(PatienceOver())

    def on_end_step(self, call: Callable[..., Any]) -> Any:
        self.flush()
        if isinstance(self.record, Committed) and self.record.wait is not WaitFor.NEWCOMER:
            self._post(HoldEnded())
        if self.must_be(Stepping, "the engine commits"):
            self._go()
            assert self.replica is not None
            self.same(
                "the step that is committed", (self.replica.step, True), (self.engine.state, self.record.is_behind)
            )
            self.same("what is reduced", set(self.replica.work.done), self.engine._gradients.done)
        return call()

    def on_end_optimizer_step(self, call: Callable[..., Any], number: int) -> Any:
        self.queue.append(StepMade())
        return call(number)

    def on_part(self, call: Callable[..., Any]) -> Any:
        self.queue.append(CallEnded())
        result = call()
        self.flush()
        self.must_be(Finished, "the engine has parted")
        return result

    def on_gather_end(self, call: Callable[..., Any], end: str, is_awaited: bool, awaited: list[bool]) -> Any:
        self._go()
        self.flush()
        self.must_be(Parting, "the engine waits at the end")
        result = call(end, is_awaited, awaited)
        if isinstance(self.record, Parting):
            self._post(Gathered(is_awaited=any(awaited)))
        return result


class _Wrapped:
    """`_Wrapped` is a method that the shadow is told of."""

    def __init__(self, call: Callable[..., Any], told: Callable[..., Any]) -> None:
        self.call, self.told = call, told

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.told(self.call, *arguments, **options)
