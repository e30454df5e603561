"""From what workers do and say to the events that the state machine decides upon."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unicron_elastic.base.text import one_line
from unicron_elastic.compat.agent import RunResult, WorkerGroup, WorkerState
from unicron_elastic.faults import Failure
from unicron_elastic.launcher.agent.core import failures
from unicron_elastic.launcher.agent.process.processes import Exit
from unicron_elastic.launcher.agent.process.whereabouts import FLOPS_MAX, limits_of
from unicron_elastic.launcher.agent.process.workers import WorkerProcess
from unicron_elastic.launcher.view.incidents.state_moves import StateMove, state_move
from unicron_elastic.recovery.events import (
    Event,
    FirstStepDone,
    MemberEntered,
    MemberLeft,
    MemberParted,
    MemberWentOn,
    StateFetched,
    WorkerEnding,
    WorkerExited,
    WorkerRaised,
    WorldBroke,
)
from unicron_elastic.worker.channel import close_all
from unicron_elastic.worker.message import Odd
from unicron_elastic.worker.notices import (
    Broke,
    ControlWanted,
    Entered,
    FirstStep,
    FlopsPerStep,
    LatestCollectives,
    Left,
    Notice,
    Parted,
    Position,
    Raised,
    Ready,
    Restored,
    Saving,
    SectionLimits,
    SectionOverdue,
    Served,
    SnapshotMade,
    SnapshotsWanted,
    StateTaken,
    WentOn,
)

_NAME_CHARACTERS = 80  # of what a script calls its sections
_SENTENCE_CHARACTERS = 600  # of what a run says of the state from which it goes on


class WorkerMessages:
    """`WorkerMessages` makes events of what one generation of workers says and of how its processes end."""

    def __init__(
        self,
        generation: int,
        group: WorkerGroup,
        host: str,
        *,
        post: Callable[[Event], None],
        say: Callable[[str], None],
        say_once: Callable[[str, str], None],
        why_killed: Callable[[int, float], str],
    ) -> None:
        """``say_once`` takes a topic before the sentence; ``why_killed`` explains an exit code and its time."""
        self._generation = generation
        self._workers = group.workers  # the group has others in the next generation
        self._host = host
        self._post = post
        self._say = say
        self._say_once = say_once
        self._why_killed = why_killed
        self._replica_size: int | None = None  # as the first of them has said it that has entered
        self.error_files: Mapping[int, str] = {}  # where torchrun has them, by local rank
        self.may_enter: Callable[[int], bool] = lambda _local_rank: True  # as a member of a world that may change
        self.on_served: Callable[[int, Mapping[str, Any] | None], None] = lambda _newcomer, _address: None
        self.on_moved: Callable[[StateMove], None] = lambda _move: None
        self.on_saving: Callable[[WorkerProcess, bool], None] = lambda _worker, _will_save: None
        self.on_snapshot: Callable[[WorkerProcess, SnapshotMade], None] = lambda _worker, made: close_all(made.fds)
        self.on_snapshots_wanted: Callable[[WorkerProcess, int, int], None] = lambda _worker, _rank, _size: None

    def exited(self, worker: WorkerProcess, ended: Exit) -> None:
        """A worker process ended."""
        if ended.exit_code != 0 and worker.page is None:
            self._recall_exception(worker.local_rank, worker.pid, ended.at)
        reading = worker.reading()
        event = WorkerExited(
            at=time.monotonic(),
            ended_at=ended.at,
            local_rank=worker.local_rank,
            exit_code=ended.exit_code,
            step=self._step(worker),
            has_saved=None if reading is None else reading.has_saved,
            has_restored=None if reading is None else reading.has_restored,
            generation=self._generation,
            why_killed=self._why_killed(ended.exit_code, ended.at),
        )
        self._post(event)

    def ending(self, worker: WorkerProcess) -> None:
        """A worker ends by itself; its exit code is to come."""
        self._post(WorkerEnding(at=time.monotonic(), local_rank=worker.local_rank, generation=self._generation))

    def replaced(self, worker: WorkerProcess) -> None:
        """A worker put another program into its process, which has none of our parts."""
        self._say_once(
            "replaced",
            f"rank {self._rank(worker)} has put another program into its process (exec). "
            "Steps, exceptions and hangs of such a worker are not seen; its end is.",
        )

    def said(self, worker: WorkerProcess, said: Notice | Odd) -> None:
        """Take what a worker said; what is odd is told once, for the script may write to our socket."""
        now = time.monotonic()
        if isinstance(said, Odd):
            rank = self._rank(worker)
            self._say_once(
                "odd", f"rank {rank} said what is no message of ours, which is left out: {one_line(said.why)}."
            )
        elif not self._about_world(worker, said, now) and not self._about_script(worker, said):
            self._about_state(worker, said, now)

    def _about_script(self, worker: WorkerProcess, said: Notice) -> bool:
        """Take what a script says of itself, and where it is; whether it was that."""
        match said:
            case Position():
                worker.answered(said)
            case LatestCollectives():
                worker.answered_arrivals(said)
            case SectionLimits():
                worker.phase_limits_s = limits_of(said)
            case FlopsPerStep(flops=flops) if 0.0 < flops <= FLOPS_MAX:
                worker.flops_per_step = flops
            case SectionOverdue():
                self._say(_overdue(self._rank(worker), said))
            case ControlWanted(action=action):
                wish = one_line(action, _NAME_CHARACTERS)
                self._say(
                    f"rank {self._rank(worker)} asks for {wish} through its RankMonitorClient: that is not done here."
                )
            case _:
                return False
        return True

    def _about_state(self, worker: WorkerProcess, said: Notice, now: float) -> None:
        """Take what a worker says of its steps, its state and its end."""
        match said:
            case FirstStep(stack_fd=stack_fd):
                worker.stack_fd = stack_fd
                self._post(FirstStepDone(at=now, local_rank=worker.local_rank, generation=self._generation))
            case Restored(sentence=sentence):
                self._say(one_line(sentence, _SENTENCE_CHARACTERS))
                if said.sources:
                    self._moved(said.took_s, said.bytes_taken, said.sources, now)
            case StateTaken():
                self._moved(said.took_s, said.bytes_taken, said.sources, now)
            case Saving(will_save=will_save):
                self.on_saving(worker, will_save)
            case SnapshotMade():
                self.on_snapshot(worker, said)
            case SnapshotsWanted(rank=rank, world_size=world_size):
                self.on_snapshots_wanted(worker, rank, world_size)
            case Raised(is_final=True):
                reading = worker.reading()
                event = WorkerRaised(
                    at=now,
                    failure=self._raised(worker, said, now),
                    has_saved=None if reading is None else reading.has_saved,
                    has_restored=None if reading is None else reading.has_restored,
                )
                self._post(event)

    def _moved(self, took_s: float, count: int, sources: Sequence[str], now: float) -> None:
        with contextlib.suppress(ValueError):
            self.on_moved(state_move(took_s, count, sources, now))

    def _about_world(self, worker: WorkerProcess, said: Notice, now: float) -> bool:
        """Take what a worker says of the world that it trains in; whether it was that."""
        local_rank, generation = worker.local_rank, self._generation
        match said:
            case Entered(replica_size=replica_size):
                size = self._agreed_size(worker, replica_size)
                if self.may_enter(local_rank):
                    entered = MemberEntered(at=now, local_rank=local_rank, replica_size=size, generation=generation)
                    self._post(entered)
            case Ready(state=state):
                self._post(StateFetched(at=now, local_rank=local_rank, state=state, generation=generation))
            case Left():
                self._post(MemberLeft(at=now, local_rank=local_rank, generation=generation))
            case Broke(world=world, error=error, outlives_joins=outlives_joins):
                kind, _, text = error.partition(": ")
                described = {"type": kind, "message": text}
                failure = self._failure(local_rank, worker.pid, now, described, self._step(worker))
                broke = WorldBroke(
                    at=now, world=world, failure=failure, outlives_joins=outlives_joins, generation=generation
                )
                self._post(broke)
            case WentOn():
                went_on = MemberWentOn(
                    at=now,
                    local_rank=local_rank,
                    world=said.world,
                    reused=said.reused,
                    recomputed=said.recomputed,
                    regrouped_at=_seconds(said.regrouped_ns, now),
                    generation=generation,
                )
                self._post(went_on)
            case Served(newcomer=newcomer, address=address):
                self.on_served(newcomer, address)
            case Parted(world=None):
                self._post(MemberParted(at=now, local_rank=local_rank, generation=generation))
            case Parted(world=int(world), total=total):
                parted = MemberParted(at=now, local_rank=local_rank, world=world, total=total, generation=generation)
                self._post(parted)
            case _:
                return False
        return True

    def _agreed_size(self, worker: WorkerProcess, said: int) -> int:
        """Return of how many workers each replica of this node is; what cannot be so is told once and counts as 1.

        All say the same, or the first one is believed.
        """
        workers = len(self._workers)
        does_fit = said >= 1 and workers % said == 0
        if not does_fit:
            self._say_once(
                "replica size",
                f"rank {self._rank(worker)} said that a replica is {said} of the {workers} workers of this node, "
                "which cannot be dealt to such replicas: each counts as one of its own.",
            )
        size = said if does_fit else 1
        if self._replica_size is None:
            self._replica_size = size
        elif does_fit and size != self._replica_size:
            self._say_once(
                "replica size",
                f"rank {self._rank(worker)} said that a replica is {said} of the {workers} workers of this node, "
                f"and another one had said {self._replica_size}, which holds.",
            )
        return self._replica_size

    def _step(self, worker: WorkerProcess) -> int | None:
        """Return the steps that it has made; None if they are unknown, as those of a script without an optimizer."""
        reading = worker.reading()
        return reading.step if reading is not None and reading.is_counted else None

    def functions_ended(self, result: RunResult) -> None:
        """torch has ended all function workers when it tells of a failure."""
        now = time.monotonic()
        for worker in sorted(self._workers, key=lambda w: w.global_rank not in result.failures):
            failure = result.failures.get(worker.global_rank)
            if failure is not None:
                self._recall_exception(worker.local_rank, worker.id, now)
            code = failure.exitcode if failure else (0 if result.state is WorkerState.SUCCEEDED else -signal.SIGTERM)
            event = WorkerExited(
                at=now, ended_at=now, local_rank=worker.local_rank, exit_code=int(code), generation=self._generation
            )
            self._post(event)

    def _raised(self, worker: WorkerProcess, said: Raised, now: float) -> Failure:
        described = {key: value for key, value in said.exception.items() if value is not None}
        at = _seconds(said.at_ns, now)
        return self._failure(worker.local_rank, worker.pid, at, described, self._step(worker))

    def _recall_exception(self, local_rank: int, pid: int, at: float) -> None:
        """For a worker without our parts in it: its exception, if the script recorded it for torchrun."""
        path = self.error_files.get(local_rank)
        described = failures.recorded_exception(path) if path is not None else None
        if described is not None:
            failure = self._failure(local_rank, pid, at, described, None)
            self._post(WorkerRaised(at=time.monotonic(), failure=failure))

    def _failure(self, local_rank: int, pid: int, at: float, described: Mapping[str, str], step: int | None) -> Failure:
        """Read the failure of ``pid``: where workers are replaced, torch's records are of those that began."""
        return Failure(
            at=at,
            rank=self._workers[local_rank].global_rank,
            local_rank=local_rank,
            pid=pid,
            host=self._host,
            exception_type=described.get("type"),
            message=described.get("message"),
            stack=described.get("stack"),
            location=described.get("location"),
            step=step,
        )

    def _rank(self, worker: WorkerProcess) -> int:
        return int(self._workers[worker.local_rank].global_rank)


def _seconds(said_ns: int, now: float) -> float:
    """The moment of which a worker speaks, within reason."""
    latest_ns = int(now * 1e9)
    return min(max(said_ns, latest_ns - 60_000_000_000), latest_ns) / 1e9


def _overdue(rank: int, said: SectionOverdue) -> str:
    """Tell of a section that is open for longer than the script's limit."""
    name = one_line(said.section, _NAME_CHARACTERS)
    return (
        f'rank {rank} has been in section "{name}" for {said.open_s:.1f} s, of which its limit is {said.limit_s:.1f} s.'
    )
