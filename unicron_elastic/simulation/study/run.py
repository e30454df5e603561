"""One policy on one history: everything put together, and let happen."""

from __future__ import annotations

import random

from unicron_elastic.faults import Severity, Status
from unicron_elastic.planning.coordinate.snapshot import JobStatus
from unicron_elastic.planning.model.jobs import JobSpec
from unicron_elastic.planning.model.tasks import Transition
from unicron_elastic.simulation.history.events import FaultStruck, History, JobArrives, JobEnds, NodeJoins, NodeLeaves
from unicron_elastic.simulation.live.cluster import LiveCluster
from unicron_elastic.simulation.live.faults import Strike
from unicron_elastic.simulation.live.recovery import GONE, OTHERS, Ladder
from unicron_elastic.simulation.live.shows import Shows, shows
from unicron_elastic.simulation.model.accounting import Books, IncidentEntry
from unicron_elastic.simulation.model.durations import Durations, with_own
from unicron_elastic.simulation.model.engine import SimulationEngine
from unicron_elastic.simulation.model.published import COSTS, Figure, Sized
from unicron_elastic.simulation.model.regroup import fetch_s, joined, regroup_s, settle
from unicron_elastic.simulation.model.scenario import Scenario
from unicron_elastic.simulation.model.shape import JobShape, shape_of
from unicron_elastic.simulation.model.study_result import SeedResult
from unicron_elastic.simulation.model.training import Training
from unicron_elastic.simulation.policies.division import best_division, waf_of
from unicron_elastic.simulation.policies.fixed import FixedCluster, OracleCluster
from unicron_elastic.simulation.policies.policies import ClusterPolicy
from unicron_elastic.simulation.policies.restarts import Restarts

# A script's own errors would come on any node: no other one is the cure, and the live system does not look for one.
_SCRIPTS = frozenset(
    {
        Status.OTHER_SOFTWARE_ERROR,
        Status.EXITED_ABNORMALLY,
        Status.OUT_OF_GPU_MEMORY,
        Status.OUT_OF_HOST_MEMORY,
        Status.STOPPED_BY_REQUEST,
    }
)


def simulate(scenario: Scenario, policy: ClusterPolicy, seed: int, history: History | None = None) -> SeedResult:
    """What ``policy`` comes to on the history of ``seed``. Raises ``ValueError`` for one that cannot be."""
    return Simulation(scenario, policy, seed, scenario.history(seed) if history is None else history).run()


class Simulation:
    """One policy on one history. ``run`` once; afterwards what the coordinator had to do can be asked for."""

    def __init__(self, scenario: Scenario, policy: ClusterPolicy, seed: int, history: History) -> None:
        self._scenario, self._policy, self._seed, self._history = scenario, policy, seed, history
        self._engine, self._books = SimulationEngine(), Books()
        self._chance = random.Random(f"{seed} of {scenario.name}")
        nodes = max(history.nodes, scenario.all_nodes)
        self._all_nodes = nodes
        self._specs = {job.name: job for job in scenario.jobs}
        self._ideal_shapes = {job.name: shape_of(job, nodes, uneven=True) for job in scenario.jobs}
        self._jobs = {job.name: self._prepared(job, nodes) for job in scenario.jobs}
        self._durations = None if policy.durations is None else with_own(policy.durations, scenario.durations)
        self._restarts: Restarts | None = None
        self._ladders: dict[int, Ladder] = {}
        self._away: dict[int, IncidentEntry] = {}
        self._joining: dict[str, int] = {}
        self._cluster = self._new_cluster()
        self._alive: set[str] = set()

    # -- how it begins ---------------------------------------------------------------------------------------------

    def _prepared(self, spec: JobSpec, nodes: int) -> tuple[JobSpec, JobShape, Training]:
        shape = shape_of(spec, nodes, uneven=self._policy.uneven)
        overhead, checkpoint_s = _overhead(self._policy, self._scenario, shape)
        training = Training(
            spec.name, spec.weight, shape, self._books, self._engine, overhead=overhead, checkpoint_s=checkpoint_s
        )
        return spec, shape, training

    def _new_cluster(self) -> LiveCluster | FixedCluster:
        gpus, policy = self._scenario.gpus_per_node, self._policy
        if policy.division == "oracle":
            return OracleCluster(self._engine, self._jobs, "planned", gpus, lambda *_: None)
        if policy.costs is not None:
            self._restarts = Restarts(self._engine, policy, self._away_for)
            return FixedCluster(self._engine, self._jobs, policy.division, gpus, self._restarts.joins)
        assert self._durations is not None
        if policy.division != "coordinator":
            return FixedCluster(self._engine, self._jobs, policy.division, gpus, self._joins)
        jobs = {
            name: (_status(spec, shape, self._durations), training)
            for name, (spec, shape, training) in self._jobs.items()
        }
        cluster = LiveCluster(self._engine, self._durations, jobs, gpus)
        cluster.on_left = self._left
        return cluster

    def run(self) -> SeedResult:
        """Lets it all happen."""
        late = {event.job for event in self._history.events if isinstance(event, JobArrives)}
        for name in sorted(late - set(self._specs)):
            raise ValueError(f"the history {self._history.name} brings the job {name}: the scenario must have it")
        here = [node for node in range(self._all_nodes) if node not in self._history.absent]
        self._alive = set(self._specs) - late
        self._tell_ideal()
        self._cluster.begin(here, sorted(self._alive))
        for event in self._history.events:
            match event:
                case FaultStruck():
                    self._engine.at(event.at_s, lambda event=event: self._fault(event))  # type: ignore[misc]
                case NodeJoins(at_s=at_s, node=node):
                    self._engine.at(at_s, lambda node=node: self._comes(node))  # type: ignore[misc]
                case NodeLeaves(at_s=at_s, node=node, notice_s=notice_s):
                    if notice_s:
                        self._engine.at(max(0.0, at_s - notice_s), lambda node=node: self._cluster.drain(node))  # type: ignore[misc]
                    self._engine.at(at_s, lambda event=event: self._leaves(event))  # type: ignore[misc]
                case JobArrives(at_s=at_s, job=job):
                    self._engine.at(at_s, lambda job=job: self._arrives(job))  # type: ignore[misc]
                case JobEnds(at_s=at_s, job=job):
                    self._engine.at(at_s, lambda job=job: self._ends(job))  # type: ignore[misc]
        self._engine.run(self._history.duration_s)
        self._books.close(self._history.duration_s)
        return self._result()

    @property
    def looks(self) -> int:
        """How often the coordinator has looked at the cluster; 0 if there is none."""
        return self._cluster.looks

    @property
    def writes(self) -> int:
        """What coordinator and agents have written to the store: plans, orders, phases of jobs and states of nodes."""
        return self._cluster.writes

    def training(self, job: str) -> Training:
        """How a job is carried out."""
        return self._jobs[job][2]

    def _tell_ideal(self) -> None:
        jobs = [(self._specs[name], self._ideal_shapes[name]) for name in sorted(self._alive)]
        counts = best_division(jobs, self._all_nodes)
        used = sum(shape.used_nodes(counts[spec.name]) for spec, shape in jobs)
        self._books.ideal(self._engine.now_s, waf_of(jobs, counts), float(used * self._scenario.gpus_per_node))

    def _result(self) -> SeedResult:
        books, cluster = self._books, self._cluster
        return SeedResult(
            policy=self._policy.name,
            seed=self._seed,
            duration_s=self._history.duration_s,
            waf=books.waf,
            waf_ideal=books.waf_ideal,
            gpu_s=books.gpu_s,
            effective_ratio=1.0 - books.lost_gpu_s.total / books.gpu_s if books.gpu_s else 0.0,
            lost_waf=books.lost_waf,
            lost_gpu_s=books.lost_gpu_s,
            incidents=tuple(entry.closed() for entry in books.entries),
            curve=books.curve,
            plans=cluster.plans,
            moves=cluster.moves,
        )

    # -- what the history does -------------------------------------------------------------------------------------

    def _fault(self, fault: FaultStruck) -> None:
        cure, local_rank, step_part = self._drawn(fault)
        if not self._cluster.is_here(fault.node):
            return
        name = self._cluster.job_of(fault.node)
        entry = self._books.open(
            IncidentEntry(at_s=fault.at_s, node=fault.node, kind=fault.kind, job=name, severity=fault.severity)
        )
        strike = Strike(
            status=fault.kind,
            entry=entry,
            cure=cure,
            local_rank=local_rank,
            step_part=step_part,
            repair_s=fault.repair_s,
            status_severity=fault.severity,
        )
        entry.reason = f"node {fault.node}: {fault.kind}."
        if self._policy.division == "oracle" or not name:
            self._strike_idle(strike)
        elif self._restarts is not None:
            self._restarts.strike(strike, self._cluster.training(name))
        else:
            self._strike(strike, name)

    def _drawn(self, fault: FaultStruck) -> tuple[Severity, int, float]:
        """What chance says of a fault: the same under every policy."""
        reattempt, restart, part = (self._chance.random() for _ in range(3))
        local_rank = self._chance.randrange(self._scenario.gpus_per_node)
        cure = fault.severity
        if cure is Severity.SEV3 and reattempt < self._scenario.reattempt_fails:
            cure = Severity.SEV2
        if cure is Severity.SEV2 and restart < self._scenario.restart_fails and fault.kind not in _SCRIPTS:
            cure = Severity.SEV1
        return cure, local_rank, part

    def _strike_idle(self, strike: Strike) -> None:
        entry = strike.entry
        if strike.cure is Severity.SEV1:
            entry.reason = f"{entry.reason[:-1]}: the node is taken out."
            self.take(strike)
        else:
            entry.reason = f"{entry.reason[:-1]}: no job was disturbed."

    def _strike(self, strike: Strike, name: str) -> None:
        """The live system's recovery machine answers it."""
        assert self._durations is not None
        node, training = strike.entry.node, self._cluster.training(name)
        if shows(strike.status) is Shows.SILENCE:
            training.stall(strike.entry, "detection", strike.entry)
            notice_s = self._durations.notice_s(strike.method, training.shape.step_s(training.size))
            self._engine.after(notice_s, lambda: self._silent(strike, training))
            return
        ladder = self._ladders.get(node)
        if ladder is None or ladder.is_over or ladder.training is not training:
            around = _Around(self, node, training)
            others = () if around.why_stay() else (OTHERS,)
            host = f"n{node:06}"
            ladder = Ladder(self._engine, self._durations, training, around, host=host, others=others)
            self._ladders[node] = ladder
        ladder.strike(strike)

    def _silent(self, strike: Strike, training: Training) -> None:
        """A node is gone: the survivors hear of it."""
        entry = strike.entry
        training.stall(entry, "transition", entry)
        entry.reason = f"node {entry.node} is gone."
        self.take(strike)
        if training.present <= 0:
            training.resume(entry)  # nobody is left: it stands still for that
            return
        assert self._durations is not None
        others = (GONE,) if training.present == 1 else (GONE, OTHERS)
        around = _Around(self, entry.node, training)
        survivor = Ladder(self._engine, self._durations, training, around, host="survivor", others=others)
        survivor.node_lost(strike)

    def take(self, strike: Strike) -> None:
        """A node is away for as long as the strike says."""
        self._away_for(strike, strike.away_s)

    def _away_for(self, strike: Strike, seconds: float | None) -> None:
        """A node is away for so long; None: until the history says that it is back."""
        entry, node = strike.entry, strike.entry.node
        if not self._cluster.is_here(node):
            return
        self._away[node] = entry
        self._books.away(self._engine.now_s, entry)
        self._cluster.go(node, entry, is_broken=shows(strike.status) is not Shows.SILENCE)
        if isinstance(self._cluster, FixedCluster) and self._durations is not None and entry.job:
            training = self._cluster.training(entry.job)
            self._engine.after(regroup_s(training, self._durations), lambda: self._settle(training))
        if seconds is not None:
            self._engine.after(seconds, lambda: self._comes(node))

    def _comes(self, node: int) -> None:
        entry = self._away.pop(node, None)
        if entry is not None:
            self._books.back(self._engine.now_s, entry)
        self._cluster.come(node)

    def _leaves(self, event: NodeLeaves) -> None:
        if self._cluster.is_here(event.node):
            self._fault(FaultStruck(at_s=event.at_s, node=event.node, kind=Status.LOST_CONNECTION))

    def _arrives(self, name: str) -> None:
        self._alive.add(name)
        self._tell_ideal()
        self._cluster.submit(name)

    def _ends(self, name: str) -> None:
        self._alive.discard(name)
        self._tell_ideal()
        self._cluster.end(name)

    # -- in place, without a coordinator ---------------------------------------------------------------------------

    def _joins(self, training: Training, nodes: int, entry: IncidentEntry | None) -> None:
        assert self._durations is not None
        durations = self._durations
        self._joining[training.name] = self._joining.get(training.name, 0) + nodes
        wait_s = durations.node_s + fetch_s(training.shape, training.size, durations)

        def join() -> None:
            self._joining[training.name] -= nodes
            joined(training, nodes, durations, entry)

        self._engine.after(wait_s, join)

    def _settle(self, training: Training) -> None:
        if training.missing_nodes and not self._joining.get(training.name):
            assert self._durations is not None
            settle(training, training.present, self._durations)

    def _left(self, node: int) -> None:
        ladder = self._ladders.pop(node, None)
        if ladder is not None:
            ladder.abandon()


class _Around:
    """What a node's machine sees of the cluster."""

    def __init__(self, simulation: Simulation, node: int, training: Training) -> None:
        self._simulation, self._node, self._training = simulation, node, training

    def why_stay(self) -> str:
        """Answer in the live system's words: rendezvous/torch/handler.py."""
        present = self._training.present
        if present - 1 >= self._simulation._cluster.spec_min_nodes(self._training.name):
            return ""
        return "it is the only node of the job." if present <= 1 else f"the job needs all {present} of its nodes."

    def isolate(self, strike: Strike) -> None:
        """Keep the node out."""
        self._simulation.take(strike)


def _status(spec: JobSpec, shape: JobShape, durations: Durations) -> JobStatus:
    """The job as the store has it, when its transitions have been measured."""
    nodes = shape.unit_nodes * max(1, len(shape.rates_flops) - 1)
    moves_s = durations.regroup_s(float(nodes * shape.node_gpus))
    stop_s = moves_s + durations.process.value + durations.fetch_s(shape.parameters, 1)
    transition = Transition(grow_s=moves_s, shrink_s=moves_s, replace_s=moves_s, stop_s=stop_s)
    return JobStatus(spec=spec, rates_flops=shape.rates_flops, newest_flops=shape.rates_flops, transition=transition)


def _overhead(policy: ClusterPolicy, scenario: Scenario, shape: JobShape) -> tuple[float, float | None]:
    """The part of a job's rate that a policy costs while nothing is wrong, and its interval of checkpoints."""
    costs, durations = policy.costs, policy.durations
    if costs is None and (durations is None or durations.checkpoint_s is None):
        return 0.0, None
    if costs is None:
        assert durations is not None
        interval_s = scenario.checkpoint_s or durations.checkpoint_s or 0.0
        stall_s = _value(COSTS["megatron"].checkpoint_stall, shape.parameters)
        return stall_s / (interval_s + stall_s), interval_s
    if costs.checkpoint_interval is None:
        return 1.0 - costs.throughput.value, None
    interval_s = scenario.checkpoint_s or costs.checkpoint_interval.value
    stall_s = _value(costs.checkpoint_stall, shape.parameters)
    return 1.0 - costs.throughput.value * interval_s / (interval_s + stall_s), interval_s


def _value(figure: Figure | Sized | None, parameters: float) -> float:
    if figure is None:
        return 0.0
    return figure.at(parameters) if isinstance(figure, Sized) else figure.value
