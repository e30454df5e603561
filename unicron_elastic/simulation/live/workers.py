"""The workers of one node under its recovery machine: they start, take part, fail, end and are replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unicron_elastic.base.world import Member, World
from unicron_elastic.faults import Status
from unicron_elastic.recovery import machine
from unicron_elastic.recovery.commands import ChangeWorld, Command
from unicron_elastic.recovery.events import (
    Event,
    MemberEntered,
    StartedWorker,
    WorkerExited,
    WorkerRaised,
    WorkerReplaced,
    WorkersStarted,
    WorldChanged,
)
from unicron_elastic.recovery.policy import Policy
from unicron_elastic.recovery.state import JobState, Part, Worker
from unicron_elastic.simulation.live.faults import Surroundings
from unicron_elastic.simulation.live.shows import failure_of
from unicron_elastic.simulation.model.durations import Durations
from unicron_elastic.simulation.model.engine import SimulationEngine
from unicron_elastic.simulation.model.training import Training

# The defaults of unicron-run, but for --max-restarts: a job of months has more faults than anybody would set there.
POLICY = Policy(max_restarts=1_000_000)


class Crew:
    """``others``: the members of the job's world on other nodes. ``host``: as reasons call the node."""

    def __init__(
        self,
        engine: SimulationEngine,
        durations: Durations,
        training: Training,
        around: Surroundings,
        *,
        host: str,
        others: Sequence[Member],
    ) -> None:
        self.engine, self.durations, self.training, self.around = engine, durations, training, around
        self.state = JobState(policy=POLICY, job=training.name, host=host)
        self.is_over = False
        self._others = tuple(others)
        self._gpus = training.shape.node_gpus
        self._pids = 1000
        self.start(restarts_used=0)

    # -- the machine -----------------------------------------------------------------------------------------------

    def feed(self, event: Event) -> None:
        """Something has happened: what the machine makes of it is carried out."""
        if self.is_over:
            return
        self.state, commands = machine.handle(self.state, event)
        for command in commands:
            self.carry_out(command)

    def carry_out(self, command: Command) -> None:
        """What the machine wants."""
        raise NotImplementedError

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """``act`` happens then, unless this is over."""

        def due() -> None:
            if not self.is_over:
                act()

        self.engine.after(delay_s, due)

    @property
    def now(self) -> float:
        return self.engine.now_s

    # -- workers ---------------------------------------------------------------------------------------------------

    def start(self, restarts_used: int) -> None:
        """All workers of the node begin, in a world that is agreed on already."""
        self._pids += self._gpus
        workers = tuple(
            StartedWorker(local_rank=local_rank, rank=local_rank, pid=self._pids + local_rank)
            for local_rank in range(self._gpus)
        )
        why_stay = self.around.why_stay()
        self.feed(
            WorkersStarted(at=self.now, restarts_used=restarts_used, workers=workers, why_stay=why_stay, node="here#1")
        )
        members: tuple[Member, ...] = ()
        for worker in workers:
            entered = MemberEntered(at=self.now, local_rank=worker.local_rank)
            self.state, commands = machine.handle(self.state, entered)
            members = next((each.joined for each in commands if isinstance(each, ChangeWorld)), members)
        world = World(number=1, members=(*members, *self._others), store="simulated:1")
        self.state, _ = machine.handle(self.state, WorldChanged(at=self.now, world=world))

    def replace(self, local_rank: int, restarts_used: int) -> Worker | None:
        """A process is there in the place of a lost one; None: nobody waits for it any more."""
        worker = self.state.find(local_rank)
        if worker is None or worker.part is not Part.REPLACING:
            return None
        self._pids += 1
        started = StartedWorker(local_rank=local_rank, rank=worker.rank, pid=self._pids)
        self.feed(WorkerReplaced(at=self.now, worker=started, restarts_used=restarts_used))
        return self.state.find(local_rank)

    def raises(self, worker: Worker, status: Status) -> None:
        """Tell of an exception, and end when it has torn down."""
        failure = failure_of(
            status, at=self.now, local_rank=worker.local_rank, pid=worker.pid, step=self.training.steps
        )
        self.feed(WorkerRaised(at=self.now, failure=failure))
        self.after(self.durations.stops.value, lambda: self.exits(worker, 1))

    def exits(self, worker: Worker, code: int, why_killed: str = "") -> None:
        """End the worker, if it has not ended."""
        found = self.state.find(worker.local_rank)
        if found is None or found.pid != worker.pid or found.exit_code is not None:
            return
        self.feed(
            WorkerExited(
                at=self.now,
                ended_at=self.now,
                local_rank=worker.local_rank,
                exit_code=code,
                step=self.training.steps,
                why_killed=why_killed,
            )
        )

    def stop(self, local_rank: int, code: int) -> None:
        """Tell the worker to end, or kill it."""
        worker = self.state.find(local_rank)
        if worker is not None:
            delay_s = 0.0 if code == -9 else self.durations.stops.value
            self.after(delay_s, lambda: self.exits(worker, code))
