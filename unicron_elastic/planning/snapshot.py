"""The cluster as the store has it at one revision: nodes, jobs, the published plan. All decisions are made from it.

Moments are unix seconds, as they pass between coordinators: a monotonic clock means nothing on another host. Clocks
jump; see ``is_within`` for what that may cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from operator import attrgetter

from unicron_elastic.planning.checks import require, require_count
from unicron_elastic.planning.faulting import FaultRate
from unicron_elastic.planning.jobs import GPU_FLOPS, JobSpec
from unicron_elastic.planning.published import Published
from unicron_elastic.planning.tasks import Transition

__all__ = ["Health", "JobStatus", "NodeState", "NodeStatus", "Phase", "Refusal", "Snapshot", "is_within"]

_ID = attrgetter("node_id")
REFUSED_S = 600.0  # so long a job that a node has refused is not offered to it again


class Health(Enum):
    """Whether a node may work."""

    OK = "ok"
    DRAINING = "draining"  # an operator wants it out, as soon as its job can do without
    BROKEN = "broken"  # it works for nobody


class NodeState(Enum):
    """What the agent of a node does, as it says itself."""

    IDLE = "idle"
    JOINING = "joining"  # its workers start
    WORKING = "working"
    LEAVING = "leaving"  # its workers end


class Phase(Enum):
    """How far a job is."""

    SUBMITTED = "submitted"  # it waits for nodes; also one that ran and was stopped
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node could not or would not work for a job."""

    job: str
    at_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node. It has at most one ``job``, "" if it is idle; only one that leaves its job goes ``towards`` another.

    ``node_id`` is another one each time that an agent starts, ``host`` stays. Raises ``ValueError`` if state, job and
    towards contradict each other.
    """

    node_id: str
    host: str
    label: str = ""  # place in the network
    health: Health = Health.OK
    state: NodeState = NodeState.IDLE
    job: str = ""
    towards: str = ""
    refusals: tuple[Refusal, ...] = ()

    def __post_init__(self) -> None:
        require(self.node_id != "", "a node has no id")
        is_idle = self.state is NodeState.IDLE
        require(is_idle == (self.job == ""), f"node {self.node_id} is {self.state.value} with the job {self.job!r}")
        require(
            self.towards == "" or self.state is NodeState.LEAVING,
            f"node {self.node_id} goes towards {self.towards} while {self.state.value}: it must be leaving",
        )

    @property
    def heads_for(self) -> str:
        """The job that it works for once all that is under way is done; "" for none."""
        return self.towards if self.state is NodeState.LEAVING else self.job

    @property
    def held_by(self) -> str:
        """The job that counts on it, "" for none: one that leaves is counted on no more."""
        return "" if self.state is NodeState.LEAVING else self.job

    def refuses(self, job: str, at_unix_s: float) -> bool:
        """Whether it has refused the job lately."""
        return any(each.job == job and is_within(at_unix_s, each.at_unix_s, REFUSED_S) for each in self.refusals)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job. ``revision``: of the store, when its spec or what it is planned by was last changed.

    ``rates_flops``: T(t, x) by units that plans are made from; empty: not known yet, then it waits. ``newest_flops``:
    the same by the newest measurements; it is adopted once it differs by enough. Raises ``ValueError`` for a negative
    revision.
    """

    spec: JobSpec
    phase: Phase = Phase.SUBMITTED
    revision: int = 1
    rates_flops: tuple[float, ...] = ()
    newest_flops: tuple[float, ...] = ()
    transition: Transition = field(default_factory=lambda: Transition.of(60.0))

    def __post_init__(self) -> None:
        require_count(f"revision of job {self.name}", self.revision)

    @property
    def name(self) -> str:
        """Of its spec."""
        return self.spec.name

    @property
    def is_alive(self) -> bool:
        """Whether it runs or is to run."""
        return self.phase in (Phase.SUBMITTED, Phase.RUNNING)

    @property
    def is_planned(self) -> bool:
        """Whether a plan can say anything about it."""
        return self.is_alive and len(self.rates_flops) > 1

    @property
    def least_nodes(self) -> int:
        """The fewest nodes on which it runs; of those that its rates know, if there is one."""
        pin = self.spec.pinned_nodes
        if pin is not None:
            return pin
        unit = self.spec.unit_nodes
        known = (units * unit for units, rate in enumerate(self.rates_flops) if rate > 0.0)
        return next((nodes for nodes in known if nodes >= self.spec.min_nodes), self.spec.least_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything at one revision of the store; nodes by id, jobs by name.

    ``published``: the plan, None before the first. ``faults``: how often nodes fail, as last agreed on.
    ``gpu_flops``: what a GPU achieves here, as jobs of which nothing is known are taken to do. ``sound_nodes``: those
    that a plan is about: all but broken ones, and those that work for a job of which too little is known to plan for
    it. Draining ones are among them. Raises ``ValueError`` if two nodes or two jobs are called the same.
    """

    nodes: tuple[NodeStatus, ...] = ()
    jobs: tuple[JobStatus, ...] = ()
    published: Published | None = None
    faults: FaultRate = field(default_factory=FaultRate)
    gpu_flops: float = GPU_FLOPS
    # Asked for many times of each snapshot, and a walk over all nodes. ``sound_ids``: in the same order;
    # ``draining_ids``: of them.
    sound_nodes: tuple[NodeStatus, ...] = field(init=False, repr=False, compare=False)
    sound_ids: tuple[str, ...] = field(init=False, repr=False, compare=False)
    draining_ids: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(sorted(self.nodes, key=_ID)))
        object.__setattr__(self, "jobs", tuple(sorted(self.jobs, key=lambda job: job.name)))
        ids = tuple(map(_ID, self.nodes))
        for what, names in (("nodes", ids), ("jobs", tuple(job.name for job in self.jobs))):
            if len(set(names)) < len(names):
                twice = [name for name, following in pairwise(names) if name == following]
                raise ValueError(f"two {what} are called {twice[:1]}: each must have a name of its own")
        sound = _sound_nodes(self.nodes, self.jobs)
        object.__setattr__(self, "sound_nodes", sound)
        object.__setattr__(self, "sound_ids", ids if len(sound) == len(ids) else tuple(map(_ID, sound)))
        draining = frozenset([node.node_id for node in sound if node.health is Health.DRAINING])
        object.__setattr__(self, "draining_ids", draining)

    @property
    def plan_revision(self) -> int:
        """Of the published plan; 0: there is none."""
        return 0 if self.published is None else self.published.revision

    def job(self, name: str) -> JobStatus | None:
        """The job called so; None if there is none."""
        return next((job for job in self.jobs if job.name == name), None)


def _sound_nodes(nodes: tuple[NodeStatus, ...], jobs: tuple[JobStatus, ...]) -> tuple[NodeStatus, ...]:
    unplanned = {job.name for job in jobs if job.is_alive and not job.is_planned}
    known = {job.name for job in jobs} - unplanned | {""}
    broken, leaving = Health.BROKEN, NodeState.LEAVING
    # As node.held_by has it, without the call: there may be thousands of nodes.
    return tuple([node for node in nodes if node.health is not broken and (node.state is leaving or node.job in known)])


def is_within(at_unix_s: float, since_unix_s: float, length_s: float) -> bool:
    """Whether less than ``length_s`` have passed.

    A moment that lies ahead was written before the clock was set back, or by a host whose clock is fast: then it counts
    as over. So a jump of the clock ends a wait early, at worst, and never makes one longer.
    """
    return 0.0 <= at_unix_s - since_unix_s < length_s
