"""Between the protocol, which decides, and a run's parts, which act: it is told what happens, and they what to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from unicron_elastic.engine.protocol.handle import ProtocolError, handle
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

_TO_SCRIPT = (Compute, BeginReduce, Commit, LetGo, ReturnMean)
Result: TypeAlias = ReplicaEvent | None  # None: the waiting has ended with news, which are told anyway


class ReplicaDriver:
    """`ReplicaDriver` keeps what a replica knows. ``act`` does what the protocol decides, and returns how that ended.

    All is decided in the thread of the script, which goes on when nothing is left to do. Other threads only copy the
    state: while something is decided, nobody begins to.
    """

    def __init__(
        self, membership: Membership, gate: StateGate, act: Callable[[ReplicaCommand], Iterable[Result]]
    ) -> None:
        self.replica = Replica(micro_batches=1, buckets=1)
        self._membership = membership
        self._gate = gate
        self._act = act

    def begin(self, micro_batches: int) -> None:
        """Take it that all steps have so many."""
        self.replica = self.replica._replace(micro_batches=micro_batches)

    def lay_out(self, buckets: int) -> None:
        """Tell that the gradients are in so many other buckets."""
        self._decide(LaidOut(buckets))

    def count(self, step: int) -> None:
        """Take it that the state has so many steps behind it, as the script or who has given the state says."""
        self.replica = self.replica._replace(step=step)

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
                self._act(command)  # at once: only what is last takes time, or goes back to the script
            if self.replica.may_be_copied:  # and not before the step has been cleared, say
                self._gate.open(self.replica.step)
            for command in commands[-1:]:
                if isinstance(command, _TO_SCRIPT):
                    to_script = command
                else:
                    results.extend(self._act(command))
        return to_script

    def _hear(self) -> tuple[ReplicaCommand, ...]:
        """Take in what has happened beside the script, and return what follows."""
        self._gate.close()
        return tuple(command for event in self._news() for command in self._decide(event))

    def _news(self) -> Iterator[ReplicaEvent]:
        holds = self._gate.holds
        for _ in range(holds - self.replica.holders):
            yield HoldBegan()
        for _ in range(self.replica.holders - holds):
            yield HoldEnded()
        heard = self.replica.heard
        newer = self._membership.newer_than(0 if heard is None else heard.number)
        if newer is not None:
            yield WorldHeard(*newer)

    def _decide(self, event: ReplicaEvent) -> tuple[ReplicaCommand, ...]:
        self.replica, commands = handle(self.replica, event)
        return commands
