"""The cluster under the live system's coordinator: its decisions, and agents that carry them out in simulated time.

``planning.coordinator.handle`` decides who works where, and ``planning.agent.handle`` what each node does about it:
the same code as in ``unicron coordinator`` and ``unicron agent``. Here are a store that holds what they write, the
delays, and children that start, work and end. Tables of plans are not built: a table saves the live coordinator
milliseconds and changes no plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unicron_elastic.planning.coordinate import agent, coordinator
from unicron_elastic.planning.coordinate.coordinator import (
    AdoptRates,
    BuildTable,
    CoordinatorState,
    PublishPlan,
    SnapshotSeen,
)
from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.reconcile import LendNode, ReturnNode, StartJob, StopJob
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus
from unicron_elastic.planning.model.faulting import FaultRate
from unicron_elastic.simulation.live.live_job import LiveJob
from unicron_elastic.simulation.live.places import Places
from unicron_elastic.simulation.model.accounting import IncidentEntry
from unicron_elastic.simulation.model.durations import Durations
from unicron_elastic.simulation.model.engine import Planned, SimulationEngine
from unicron_elastic.simulation.model.training import Training

START_UNIX_S = 1_704_067_200.0  # when a history begins, by the coordinator's clock: 2024-01-01
LEAVES_S = 0.1  # that a node takes to leave, after the end of the step in progress


class LiveCluster:
    """Nodes by number, 0 to n - 1; each time that an agent starts it is another node to the coordinator."""

    def __init__(
        self,
        engine: SimulationEngine,
        durations: Durations,
        jobs: dict[str, tuple[JobStatus, Training]],
        node_gpus: int,
        faults: FaultRate | None = None,
    ) -> None:
        self._engine, self._durations, self._node_gpus = engine, durations, node_gpus
        self._catalogue = jobs
        self._jobs: dict[str, LiveJob] = {}
        self._agents: dict[str, agent.AgentState] = {}
        self._statuses: dict[str, NodeStatus] = {}  # as each agent has said last
        self._ids: dict[int, str] = {}
        self._kept_out: dict[str, NodeStatus] = {}  # by host
        self._started: dict[int, int] = {}
        self._children: dict[str, object] = {}
        self._published: Published | None = None
        self._seen = ClusterSnapshot()  # at the latest look
        self._changed: dict[str, NodeStatus | None] = {}  # since then; None: it is gone
        self._places = Places()
        self._state = CoordinatorState()
        self._faults = FaultRate() if faults is None else faults
        self._noted_s, self._node_s = 0.0, 0.0
        self._revision = 1
        self.on_left: Callable[[int], None] = lambda _: None  # a node's workers are gone
        self._looked_s = 0.0  # when a look was counted that had nothing to do
        self._look_planned: Planned | None = None
        self._again: Planned | None = None
        self._is_first = True
        self.plans = self.moves = self.looks = self.writes = 0

    # -- what the world does to it ---------------------------------------------------------------------------------

    def begin(self, nodes: list[int], names: list[str]) -> None:
        """All these nodes and jobs are there, and work as planned, as after a quiet hour."""
        for node in nodes:
            self._start_agent(node)
        for name in names:
            self.submit(name)
        self._engine.run(self._engine.now_s)
        self._is_first = False

    def submit(self, name: str) -> None:
        """A job arrives."""
        status, training = self._catalogue[name]
        self._jobs[name] = LiveJob(replace(status, revision=self._next_revision()), training, self._durations)
        self._change()

    def end(self, name: str) -> None:
        """A job is done."""
        job = self._jobs.get(name)
        if job is None or not job.status.is_alive:
            return
        job.status = replace(job.status, phase=JobPhase.FINISHED)
        job.training.resize(0)
        job.workers.clear()
        for node_id in [n for n, each in self._agents.items() if each.status.job == name]:
            self._end_child(node_id, verdict="well")
        self._change()

    def come(self, node: int) -> None:
        """A node is there that was not."""
        if node not in self._ids:
            if (kept_out := self._kept_out.pop(_host(node), None)) is not None:
                self._changed[kept_out.node_id] = None
            self._start_agent(node)

    def go(self, node: int, entry: IncidentEntry | None, *, is_broken: bool = False) -> None:
        """A node is gone, or kept out as broken."""
        node_id = self._ids.pop(node, None)
        if node_id is None:
            return
        self._count_fault()
        state = self._agents.pop(node_id)
        self._forget(node_id)
        self._children.pop(node_id, None)
        self.on_left(node)
        job = self._jobs.get(state.status.job)
        if job is not None and node_id in job.workers:
            job.workers.discard(node_id)
            job.cause = entry
            if entry is not None:
                job.training.lack(entry, self._node_gpus)
            else:
                job.leave()
        if is_broken:
            self._kept_out[_host(node)] = NodeStatus(node_id=node_id, host=_host(node), health=Health.BROKEN)
            self._changed[node_id] = self._kept_out[_host(node)]
        self._change()

    def drain(self, node: int) -> None:
        """A node is announced to go soon."""
        node_id = self._ids.get(node)
        if node_id is not None:
            state = self._agents[node_id]
            status = replace(state.status, health=Health.DRAINING)
            self._note(status)
            self._agents[node_id] = replace(state, status=status)
            self._change()

    # -- what is ---------------------------------------------------------------------------------------------------

    def job_of(self, node: int) -> str:
        """The job in which a node's workers train; "" for none."""
        node_id = self._ids.get(node, "")
        name = self._agents[node_id].status.job if node_id else ""
        return name if name in self._jobs and node_id in self._jobs[name].workers else ""

    def is_here(self, node: int) -> bool:
        """Whether the node has an agent."""
        return node in self._ids

    def training(self, name: str) -> Training:
        """How a job is carried out."""
        return self._jobs[name].training

    def spec_min_nodes(self, name: str) -> int:
        """Without fewer a job cannot go on."""
        return self._jobs[name].status.least_nodes

    def first_node(self, name: str, without: int) -> int | None:
        """The first node that trains in a job, beside one."""
        other = self._ids.get(without, "")
        found = min((each for each in self._jobs[name].workers if each != other), default=None)
        return None if found is None else _number(found)

    # -- the store -------------------------------------------------------------------------------------------------

    @property
    def _now_unix_s(self) -> float:
        return START_UNIX_S + self._engine.now_s

    def _next_revision(self) -> int:
        self._revision += 1
        return self._revision

    def _snapshot(self) -> ClusterSnapshot:
        jobs = [job.status for job in self._jobs.values()]
        self._seen = self._seen.changed(self._changed, jobs=jobs, published=self._published, faults=self._faults)
        self._changed = {}
        return self._seen

    def _note(self, status: NodeStatus) -> None:
        """What an agent has said last."""
        self._statuses[status.node_id] = self._changed[status.node_id] = status

    def _forget(self, node_id: str) -> None:
        del self._statuses[node_id]
        self._changed[node_id] = None

    def _count_fault(self) -> None:
        """How often nodes fail, as the coordinator notes it at every loss."""
        self._count_uptime()
        self.writes += 1
        self._faults = self._faults.observed(1, self._node_s)
        self._node_s = 0.0

    def _count_uptime(self) -> None:
        now = self._engine.now_s
        self._node_s += len(self._agents) * (now - self._noted_s)
        self._noted_s = now

    def _start_agent(self, node: int) -> None:
        self._count_uptime()
        self._started[node] = number = self._started.get(node, 0) + 1
        self._ids[node] = node_id = f"{_host(node)}/{number}"
        status = NodeStatus(node_id=node_id, host=_host(node))
        self._note(status)
        self._agents[node_id] = agent.AgentState(status=status)
        self._change()

    # -- the coordinator -------------------------------------------------------------------------------------------

    def _change(self, delay_s: float | None = None) -> None:
        """Something in the store is different: the coordinator looks soon."""
        if self._look_planned is None:
            decides_s = self._durations.decides.at(float(len(self._agents))) if delay_s is None else delay_s
            self._look_planned = self._engine.after(0.0 if self._is_first else decides_s, self._look)

    def _look(self) -> None:
        self._look_planned = None
        self.looks += 1
        self._carry_out(SnapshotSeen(self._now_unix_s, self._snapshot()))
        for job in self._jobs.values():
            job.settle(self._published)

    def _carry_out(self, event: coordinator.Event) -> None:
        before = self._state.looked
        self._state, commands = coordinator.handle(self._state, event)
        if self._state.looked not in (before, None):
            self._look_again(self._state.looked.again_unix_s)
        for command in commands:
            match command:
                case PublishPlan():
                    self._publish(command)
                case LendNode() | ReturnNode():
                    self._order(command)
                case StartJob() | StopJob():
                    self._turn(command)
                case AdoptRates():
                    raise AssertionError(f"the rates of {command.job} are as they were")
                case BuildTable():
                    pass

    def _publish(self, command: PublishPlan) -> None:
        self._published = command.published.at_revision(self._next_revision())
        self._places.published(self._published, self._seen)
        self.plans += 1
        self.writes += 1
        self._change(0.0)
        self._look_again(self._published.look_again_unix_s)

    def _look_again(self, at_unix_s: float | None) -> None:
        if self._again is not None:
            self._again.cancel()
        # A thousandth later, as moments of today in unix seconds are only that exact after a sum.
        self._again = None if at_unix_s is None else self._engine.at(at_unix_s - START_UNIX_S + 1e-3, self._look)

    def _turn(self, command: StartJob | StopJob) -> None:
        job = self._jobs[command.job]
        is_start = isinstance(command, StartJob)
        job.starts += is_start
        self.writes += 1
        job.status = replace(job.status, phase=JobPhase.RUNNING if is_start else JobPhase.SUBMITTED)
        if not is_start:
            job.training.resize(0)
        for node_id in [n for n, each in self._agents.items() if each.status.job == command.job]:
            self._tell_job(node_id, command.job)
        self._change()

    def _order(self, command: LendNode | ReturnNode) -> None:
        if command.node_id not in self._agents:
            return  # it is kept out as broken, and its agent is gone
        target = command.target if isinstance(command, LendNode) else ""
        self.writes += 1
        self.moves += not self._is_first and isinstance(command, LendNode)
        self._tell(command.node_id, agent.Ordered(at_unix_s=self._now_unix_s, target=target, reason=command.reason))

    # -- agents and their children ---------------------------------------------------------------------------------

    def _tell(self, node_id: str, event: agent.Event) -> None:
        if node_id not in self._agents:
            return
        before = self._agents[node_id]
        state, commands = agent.handle(before, event)
        self._agents[node_id] = state
        if state.stops_at_unix_s is not None and state.stops_at_unix_s != before.stops_at_unix_s:
            self._engine.at(state.stops_at_unix_s - START_UNIX_S, lambda: self._pass_time(node_id))
        for command in commands:
            match command:
                case agent.SayStatus():
                    self._say(node_id, command.status)
                case agent.WatchJob():
                    if command.job:
                        self._tell_job(node_id, command.job)
                case agent.StartChild():
                    self._start_child(node_id, command.spec.name)
                case agent.RecallChild():
                    job = self._jobs[before.status.job]
                    wait_s = job.training.step_left_s + LEAVES_S
                    self._later(node_id, wait_s, lambda: self._end_child(node_id))
                case agent.StopChild():
                    self._later(node_id, self._durations.stops.value, lambda: self._end_child(node_id))
                case agent.EndJob() | agent.TellPeople() | agent.TellJob():
                    pass

    def _say(self, node_id: str, status: NodeStatus) -> None:
        """An agent says what its node does; a look that would do nothing is only counted."""
        before = self._statuses[node_id]
        self._note(status)
        self.writes += 1
        is_as_ordered = self._places.said(before, status)
        if not is_as_ordered or self._places.are_waiting(job.status for job in self._jobs.values()):
            self._change()
            return
        self.looks += self._looked_s != self._engine.now_s
        self._looked_s = self._engine.now_s
        for name in {before.job, status.job} & self._jobs.keys():
            self._jobs[name].settle(self._published)

    def _pass_time(self, node_id: str) -> None:
        self._tell(node_id, agent.NodeTick(at_unix_s=self._now_unix_s))

    def _tell_job(self, node_id: str, name: str) -> None:
        job = self._jobs[name]
        event = agent.JobSeen(
            at_unix_s=self._now_unix_s,
            job=name,
            spec=job.status.spec,
            phase=job.status.phase,
            start=job.starts,
            nodes=len(job.workers),
        )
        self._tell(node_id, event)

    def _later(self, node_id: str, seconds: float, act: object) -> None:
        """``act`` if the child is still the same one then."""
        child = self._children.get(node_id)

        def due() -> None:
            if self._children.get(node_id) is child:
                act()  # type: ignore[operator]

        self._engine.after(0.0 if self._is_first else seconds, due)

    def _start_child(self, node_id: str, name: str) -> None:
        self._children[node_id] = object()

        def works() -> None:
            self._tell(node_id, agent.ChildWorks(at_unix_s=self._now_unix_s))
            if node_id in self._agents and self._agents[node_id].status.state is NodeState.WORKING:
                self._jobs[name].workers.add(node_id)
                self._look_at(name)

        self._later(node_id, self._jobs[name].child_s(), works)

    def _end_child(self, node_id: str, verdict: str = "") -> None:
        self._children.pop(node_id, None)
        state = self._agents[node_id]
        job = self._jobs.get(state.status.job)
        if job is not None and node_id in job.workers:
            job.workers.discard(node_id)
            self.on_left(_number(node_id))
            job.leave()
        self._tell(node_id, agent.ChildEnded(at_unix_s=self._now_unix_s, exit_code=0, verdict=verdict))

    # -- the jobs --------------------------------------------------------------------------------------------------

    def _look_at(self, name: str) -> None:
        """Those who begin to work at one moment join the job at once."""
        job = self._jobs[name]
        if not job.is_looked_at:
            job.is_looked_at = True
            self._engine.after(0.0, lambda: self._join(job))

    def _join(self, job: LiveJob) -> None:
        job.is_looked_at = False
        job.join(is_free=self._is_first)
        job.settle(self._published)


def _number(node_id: str) -> int:
    return int(node_id[1:].partition("/")[0])


def _host(node: int) -> str:
    return f"n{node:06}"
