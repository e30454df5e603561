"""Between the protocol, which decides, and a run's parts, which act: it is told what happens, and they what to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeAlias, TypeVar

from unicron_elastic.base.world import World
from unicron_elastic.engine.protocol.handle import handle
from unicron_elastic.engine.protocol.handle_by import ProtocolError
from unicron_elastic.engine.protocol.member_command import Evaluate, MakeStep
from unicron_elastic.engine.protocol.replica_command import (
    BeginReduce,
    Commit,
    Compute,
    LetGo,
    ReplicaCommand,
    ReturnMean,
)
from unicron_elastic.engine.protocol.replica_event import HoldBegan, HoldEnded, LaidOut, ReplicaEvent, WorldHeard
from unicron_elastic.engine.protocol.replica_phase import Replica
from unicron_elastic.training.group.membership import Membership
from unicron_elastic.training.snapshot.gate import StateGate

_TO_SCRIPT = (Compute, BeginReduce, Commit, LetGo, ReturnMean, MakeStep, Evaluate)
Result: TypeAlias = ReplicaEvent | None  # None: the waiting has ended with news, which are told anyway
Act: TypeAlias = Callable[[ReplicaCommand], Iterable[Result]]


class _Hears(Protocol):
    @property
    def heard(self) -> World | None:
        """Return the newest world of which it was told."""


Decider = TypeVar("Decider", bound=_Hears)


class Driver(Generic[Decider]):
    """`Driver` keeps what a ``replica``, or a member of one, knows.

    ``decide`` is the protocol; ``act`` does what that decides, and returns how it ended. All is decided in the thread
    of the script, which goes on when nothing is left to do.
    """

    def __init__(
        self,
        membership: Membership,
        replica: Decider,
        decide: Callable[[Decider, ReplicaEvent], tuple[Decider, tuple[ReplicaCommand, ...]]],
        act: Act = lambda _command: (),
    ) -> None:
        self.replica = replica
        self._membership = membership
        self._decide_by = decide
        self.act = act

    def post(self, event: ReplicaEvent) -> ReplicaCommand | None:
        """Tell what the script does; return what it is to do next. Raises what ``act`` raises."""
        to_script: ReplicaCommand | None = None
        results = deque[Result]([event])
        while results:
            result = results.popleft()
            commands = self._hear()
            if commands and result is event:
                raise ProtocolError(f"{type(event).__name__} came while the script had to wait")
            # News end what is waited for: then it does not matter any more how that ended.
            if not commands and result is not None:
                commands = self._decide(result)
            for command in commands[:-1]:
                self.act(command)  # at once: only what is last takes time, or goes back to the script
            self._is_about_to_act()
            for command in commands[-1:]:
                if isinstance(command, _TO_SCRIPT):
                    to_script = command
                else:
                    results.extend(self.act(command))
        return to_script

    def _is_about_to_act(self) -> None:
        """Nothing is decided for a while."""

    def _hear(self) -> tuple[ReplicaCommand, ...]:
        """Take in what has happened beside the script, and return what follows."""
        return tuple(command for event in self._news() for command in self._decide(event))

    def _news(self) -> Iterator[ReplicaEvent]:
        heard = self.replica.heard
        newer = self._membership.newer_than(0 if heard is None else heard.number)
        if newer is not None:
            yield WorldHeard(*newer)

    def _decide(self, event: ReplicaEvent) -> tuple[ReplicaCommand, ...]:
        self.replica, commands = self._decide_by(self.replica, event)
        return commands


class ReplicaDriver(Driver[Replica]):
    """`ReplicaDriver` is that of a replica whose state others copy while it trains.

    They do so in other threads: while something is decided, nobody begins to.
    """

    def __init__(self, membership: Membership, gate: StateGate, act: Act, seats: int = 1) -> None:
        super().__init__(membership, Replica(micro_batches=1, buckets=1, seats=seats), handle, act)
        self._gate = gate

    def begin(self, micro_batches: int) -> None:
        """Take it that the present step has so many, and all that come."""
        self.replica = self.replica._replace(micro_batches=micro_batches)

    def lay_out(self, buckets: int) -> None:
        """Tell that the gradients are in so many other buckets."""
        self._decide(LaidOut(buckets))

    def count(self, step: int) -> None:
        """Take it that the state has so many steps behind it, as the script or who has given the state says."""
        self.replica = self.replica._replace(step=step)

    def _is_about_to_act(self) -> None:
        if self.replica.may_be_copied:  # and not before the step has been cleared, say
            self._gate.open(self.replica.step)

    def _hear(self) -> tuple[ReplicaCommand, ...]:
        self._gate.close()
        return super()._hear()

    def _news(self) -> Iterator[ReplicaEvent]:
        holds = self._gate.holds
        for _ in range(holds - self.replica.holders):
            yield HoldBegan()
        for _ in range(self.replica.holders - holds):
            yield HoldEnded()
        yield from super()._news()
