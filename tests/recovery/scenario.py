"""A job whose events are fed by hand, with every invariant checked after each."""

from __future__ import annotations

import signal
from typing import Any, TypeVar

from unicron_elastic.base.incident import Incident
from unicron_elastic.faults import Failure, HangKind, Severity, Status
from unicron_elastic.recovery.commands import Command, RecordIncident, StartWorkers
from unicron_elastic.recovery.departure import JOIN_DELAY_S
from unicron_elastic.recovery.events import (
    Event,
    EvidenceGathered,
    FirstStepDone,
    LeaveAnswered,
    MembershipChanged,
    NodeRecalled,
    NodesDepart,
    NodesSilent,
    NodeUnhealthy,
    OtherNodesLost,
    PeerFailed,
    StartedWorker,
    StepEnded,
    TakenForLost,
    TimePassed,
    WatchBegan,
    WorkerEnding,
    WorkerExited,
    WorkerOutOfStep,
    WorkerRaised,
    WorkersGoOn,
    WorkersHung,
    WorkersStarted,
)
from unicron_elastic.recovery.machine import handle
from unicron_elastic.recovery.policy import Policy
from unicron_elastic.recovery.state import JobState

GLOO_CLOSED = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44696"
KILLED, TERMINATED, CRASHED = -int(signal.SIGKILL), -int(signal.SIGTERM), -int(signal.SIGSEGV)
FIRST_RANK = 4  # of this node, so that a rank is never mistaken for a local rank
HANGS = "rank 5 hangs: no step for 100 ms, 5x the usual 20 ms; it is not at work."
LEFT_OUT = "rank 5 left out an all_reduce of the group of all ranks in step 300."
GO_ON = "rank 5 goes on after 2.1 s."
FELL_OFF = "GPU 3 has fallen off the bus (XID 79)."
PEERS_FAULT = "node n2 is gone."
LOST = "n2 is lost: its process has ended."
RECALLED = "Node n1 is recalled: job b gains more."
OTHER_RECALLED = "Node n2 is recalled: job b gains more."
DRAINED = "Node n1 is drained by ada: a loud fan."
TAKEN_FOR_LOST = "This node was taken out of the job: it answers neither on its connection nor on a new one."

_C = TypeVar("_C")


class Job:
    """Feeds a machine events and keeps the commands; time goes on by itself, a hundredth of a second per event."""

    def __init__(self, workers: int = 2, **policy: Any) -> None:
        self.state = JobState(policy=Policy(**{"max_restarts": 3, **policy}), run_id="r1", job="train.py", host="n1")
        self.now = 100.0
        self.log: list[Command] = []
        self.workers = workers

    def feed(self, event: Event) -> list[Command]:
        self.state, commands = handle(self.state, event)
        self.state.validate()
        self.log += commands
        return commands

    def _at(self, at: float | None) -> float:
        self.now = round(self.now + 0.01, 6)
        return self.now if at is None else at

    def pid(self, local_rank: int, generation: int | None = None) -> int:
        return 1000 * (self.state.generation if generation is None else generation) + local_rank

    def start(
        self,
        restarts_used: int = 0,
        at: float | None = None,
        why_stay: str = "it is the only node of the job.",
        *,
        do_others_train: bool = False,
        why_lost: str = "",
    ) -> list[Command]:
        generation = self.state.generation + 1
        workers = tuple(
            StartedWorker(local_rank=local, rank=FIRST_RANK + local, pid=self.pid(local, generation))
            for local in range(self.workers)
        )
        return self.feed(
            WorkersStarted(
                at=self._at(at),
                restarts_used=restarts_used,
                workers=workers,
                why_stay=why_stay,
                do_others_train=do_others_train,
                why_lost=why_lost,
            )
        )

    def ending(self, local_rank: int, *, at: float | None = None, generation: int | None = None) -> list[Command]:
        return self.feed(WorkerEnding(at=self._at(at), local_rank=local_rank, generation=generation))

    def exited(
        self,
        local_rank: int,
        code: int = 0,
        *,
        at: float | None = None,
        ended_at: float | None = None,
        step: int | None = None,
        generation: int | None = None,
    ) -> list[Command]:
        at = self._at(at)
        return self.feed(
            WorkerExited(
                at=at,
                ended_at=at if ended_at is None else ended_at,
                local_rank=local_rank,
                exit_code=code,
                step=step,
                generation=generation,
            )
        )

    def raised(
        self,
        local_rank: int,
        message: str = "bad input",
        *,
        kind: str = "ValueError",
        at: float | None = None,
        said_at: float | None = None,
        pid: int | None = None,
        step: int | None = None,
    ) -> list[Command]:
        at = self._at(at)
        failure = Failure(
            at=at if said_at is None else said_at,
            rank=FIRST_RANK + local_rank,
            local_rank=local_rank,
            pid=self.pid(local_rank) if pid is None else pid,
            exception_type=kind,
            message=message,
            location="train.py:88 in step",
            stack=f"Traceback (most recent call last):\n{kind}: {message}\n",
            step=step,
        )
        return self.feed(WorkerRaised(at=at, failure=failure))

    def stepped(self, local_rank: int, *, generation: int | None = None) -> list[Command]:
        return self.feed(FirstStepDone(at=self._at(None), local_rank=local_rank, generation=generation))

    def peer_failed(self, *, at: float | None = None, generation: int | None = None) -> list[Command]:
        return self.feed(PeerFailed(at=self._at(at), reason=PEERS_FAULT, generation=generation))

    def nodes_wait(
        self, nodes_waiting: int = 1, *, at: float | None = None, generation: int | None = None
    ) -> list[Command]:
        """And the moment after which they are let in."""
        heard_at = self._at(at)
        waits = self.feed(MembershipChanged(at=heard_at, nodes_waiting=nodes_waiting, generation=generation))
        return self.feed(TimePassed(at=heard_at + JOIN_DELAY_S)) if waits else []

    def waits(self, nodes_waiting: int = 1, *, at: float | None = None, generation: int | None = None) -> list[Command]:
        """Only that they wait; when the moment is over is another event."""
        return self.feed(MembershipChanged(at=self._at(at), nodes_waiting=nodes_waiting, generation=generation))

    def recalled(self, why_stay: str = "", *, reason: str = RECALLED) -> list[Command]:
        """This node is wanted elsewhere; "" as the reason: not any more."""
        return self.feed(NodeRecalled(at=self._at(None), reason=reason, why_stay=why_stay))

    def drained(self, why_stay: str = "", *, reason: str = DRAINED) -> list[Command]:
        """This node is to work in no job."""
        return self.feed(NodeRecalled(at=self._at(None), reason=reason, why_stay=why_stay, is_drained=True))

    def step_ended(self) -> list[Command]:
        return self.feed(StepEnded(at=self._at(None), generation=self.state.generation))

    def departs(self, *nodes: str, reason: str = OTHER_RECALLED) -> list[Command]:
        """Other nodes, which are well, leave."""
        generation = self.state.generation
        return self.feed(NodesDepart(at=self._at(None), nodes=nodes or ("n2",), reason=reason, generation=generation))

    def loses(self, *nodes: str, reason: str = LOST) -> list[Command]:
        """Other nodes are gone."""
        generation = self.state.generation
        return self.feed(
            OtherNodesLost(at=self._at(None), nodes=nodes or ("n2",), reason=reason, generation=generation)
        )

    def silent(self, *nodes: str) -> list[Command]:
        """These other nodes give no sign of life now; none: all do."""
        return self.feed(NodesSilent(at=self._at(None), nodes=nodes, generation=self.state.generation))

    def taken_for_lost(self) -> list[Command]:
        generation = self.state.generation
        return self.feed(TakenForLost(at=self._at(None), reason=TAKEN_FOR_LOST, generation=generation))

    def later(self, seconds: float) -> list[Command]:
        return self.time(self.now + seconds)

    def hung(
        self,
        *local_ranks: int,
        kind: HangKind = HangKind.STOPPED,
        at: float | None = None,
        since: float | None = None,
        generation: int | None = None,
    ) -> list[Command]:
        at = self._at(at)
        event = WorkersHung(
            at=at,
            since=at - 0.1 if since is None else since,
            local_ranks=local_ranks,
            reason=HANGS,
            kind=kind,
            generation=generation,
        )
        return self.feed(event)

    def out_of_step(self, local_rank: int, *, generation: int | None = None) -> list[Command]:
        at = self._at(None)
        return self.feed(
            WorkerOutOfStep(
                at=at, since=at - 0.1, step=300, local_rank=local_rank, reason=LEFT_OUT, generation=generation
            )
        )

    def finds(
        self,
        *,
        status: Status = Status.GPU_DRIVER_ERROR,
        severity: Severity = Severity.SEV1,
        reason: str = FELL_OFF,
        at: float | None = None,
    ) -> list[Command]:
        """A probe of this node does."""
        return self.feed(NodeUnhealthy(at=self._at(at), status=status, severity=severity, reason=reason))

    def may_leave(self, why_not: str = "") -> list[Command]:
        """The answer to ``AskToLeave``."""
        return self.feed(LeaveAnswered(at=self._at(None), why_not=why_not))

    def watched_anew(self, *, at: float | None = None, generation: int | None = None) -> list[Command]:
        return self.feed(WatchBegan(at=self._at(at), generation=generation))

    def goes_on(self, *, generation: int | None = None) -> list[Command]:
        return self.feed(WorkersGoOn(at=self._at(None), reason=GO_ON, generation=generation))

    def evidence(self, *local_ranks: int, at: float | None = None, generation: int | None = None) -> list[Command]:
        stacks = tuple((local_rank, f"stack of {local_rank}") for local_rank in local_ranks)
        return self.feed(
            EvidenceGathered(at=self._at(at), report="/logs/evidence.txt", stacks=stacks, generation=generation)
        )

    def time(self, at: float) -> list[Command]:
        self.now = at
        return self.feed(TimePassed(at=at))

    def terminated(self, *local_ranks: int) -> list[Command]:
        """These end by our SIGTERM; all commands of it."""
        return [command for local_rank in local_ranks for command in self.exited(local_rank, TERMINATED)]

    def fail_once(self, code: int = 1, *, step: int | None = None, kind: str | None = None) -> list[Command]:
        """One generation, from its start to its end, in which every worker exits with ``code``.

        The first one raises an exception of this ``kind``, if any, before it does.
        """
        self.start(self.state.restarts_used if self.state.generation == 0 else self.started()[-1].restarts_used)
        commands: list[Command] = [] if kind is None else self.raised(0, kind=kind, step=step)
        for local_rank in range(self.workers):
            commands += self.exited(local_rank, code, step=step)
        return commands

    def started(self) -> list[StartWorkers]:
        return [command for command in self.log if isinstance(command, StartWorkers)]

    def records(self, number: int | None = None) -> list[Incident]:
        """Every record of all incidents, or of one, in order."""
        found = [command.incident for command in self.log if isinstance(command, RecordIncident)]
        return [incident for incident in found if number in (None, incident.number)]


def only(commands: list[Command], kind: type[_C]) -> _C:
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, commands
    return found[0]


def none(commands: list[Command], *kinds: type) -> bool:
    return not any(isinstance(command, kinds) for command in commands)
