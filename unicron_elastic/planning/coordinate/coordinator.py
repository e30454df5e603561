"""What the coordinator of the cluster does for all jobs, decided purely: ``handle(state, event) -> (state, commands)``.

One loop, driven by what the store holds. With each snapshot it asks in this order:

1. Has a job's measured rate changed by enough? Then it is adopted, which changes the job's revision.
2. Has the published plan been overtaken? Then a new one is published, by compare-and-set with the revision of the old
   one, and nothing of the old one is carried out any further. If it was only to be looked at again, and all nodes keep
   their seats, it stays.
3. Else: which node has to move? Commands for those, and for starts and stops.
4. Is all as planned? Then the table for whatever comes next is built in the background.

Everything that matters is in the store, so a new coordinator begins with an empty state. What the state holds may be
forgotten at any moment: the table saves milliseconds, and the memory of commands spares the store repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from unicron_elastic.planning.allocate.cluster import Cluster
from unicron_elastic.planning.allocate.plan_table import PlanTable
from unicron_elastic.planning.coordinate.holding import DWELL_S
from unicron_elastic.planning.coordinate.node_status import NodeState, is_within
from unicron_elastic.planning.coordinate.proposal import Looked, comes_to_the_same, propose, why_overtaken
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.reconcile import Movement, reconcile
from unicron_elastic.planning.coordinate.situation import Bounds, PlanDifferences, expected_tasks, situation_of
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobStatus
from unicron_elastic.planning.model.tasks import Task

REPEAT_S = 5.0  # after which a command that had no effect is given again
# The model of rates is off by 1 to 2 % in the median, by 10 % in bad cases (docs/throughput.md): less than this is no
# news. What a move costs until the next fault is far below that, and would let jobs move for noise.
RATE_CHANGE = 0.05
PAIRS_MOST_TASKS = 16  # for which it is cheap to plan for the loss of any two nodes: 136 pairs more


@dataclass(frozen=True, slots=True)
class SnapshotSeen:
    """The store has changed, or was read for the first time."""

    at_unix_s: float
    snapshot: ClusterSnapshot


@dataclass(frozen=True, slots=True)
class CoordinatorTick:
    """Some time has passed."""

    at_unix_s: float


@dataclass(frozen=True, slots=True)
class TableBuilt:
    """The answer to ``BuildTable``; None: it could not be built."""

    at_unix_s: float
    table: PlanTable | None


Event = SnapshotSeen | CoordinatorTick | TableBuilt


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """Write the plan, if its key still is at ``expected_revision``; 0: if there is none."""

    published: Published
    expected_revision: int
    reason: str


@dataclass(frozen=True, slots=True)
class AdoptRates:
    """Plan with the job's newest rates from now on, if the job still is at ``expected_revision``."""

    job: str
    rates_flops: tuple[float, ...]
    expected_revision: int
    reason: str


@dataclass(frozen=True, slots=True)
class BuildTable:
    """Compute the plans for what may happen next in ``cluster``, beside everything else.

    ``expected``: tasks that may be submitted; ``with_pairs``: any two nodes may be lost at once.
    """

    cluster: Cluster
    expected: tuple[Task, ...] = ()
    with_pairs: bool = False


Command = PublishPlan | AdoptRates | BuildTable | Movement


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorState:
    """What the coordinator knows; a new one begins with none of it."""

    snapshot: ClusterSnapshot | None = None
    table: PlanTable | None = None
    asked: Cluster | None = None  # the situation for which a table is being built
    looked: Looked | None = None
    given: tuple[tuple[Command, float], ...] = ()  # the commands of late, and when they were given


Outcome = tuple[CoordinatorState, tuple[Command, ...]]


def handle(state: CoordinatorState, event: Event) -> Outcome:
    """The state after ``event``, and what is to be done."""
    match event:
        case SnapshotSeen():
            state = replace(state, snapshot=event.snapshot)
        case TableBuilt():
            state = replace(state, table=event.table if event.table is not None else state.table)
        case CoordinatorTick():
            pass
    snapshot = state.snapshot
    if snapshot is None:
        return state, ()
    state, commands = _wanted(state, snapshot, event.at_unix_s)
    return _once(state, commands, event.at_unix_s) if commands else _prepared(state, snapshot)


def _wanted(state: CoordinatorState, snapshot: ClusterSnapshot, at_unix_s: float) -> Outcome:
    adoptions = tuple(
        AdoptRates(job.name, job.newest_flops, job.revision, reason)
        for job in snapshot.jobs
        if (reason := _why_adopt(job))
    )
    published = snapshot.published
    if why_overtaken(snapshot, at_unix_s, state.looked):
        proposal = propose(snapshot, at_unix_s, state.table)
        if not comes_to_the_same(published, proposal):
            return state, (*adoptions, PublishPlan(proposal, snapshot.plan_revision, proposal.reason))
        state = replace(state, looked=_looked(published, proposal))
    return state, (*adoptions, *(() if published is None else reconcile(snapshot, published)))


def _looked(published: Published | None, proposal: Published) -> Looked:
    """Until the next look it takes as long as the plan has held, but ``DWELL_S`` at most."""
    made, again = proposal.made_unix_s, proposal.look_again_unix_s
    if published is None or again is None:
        return Looked(0 if published is None else published.revision, None)
    held_s = min(max(made - published.made_unix_s, 0.0), DWELL_S)
    return Looked(published.revision, max(again, made + held_s))


def _why_adopt(job: JobStatus) -> str:
    """Why the newest rates are to be used, as a sentence; "": they are not."""
    old, new = job.rates_flops, job.newest_flops
    if not job.is_alive or len(new) < 2 or old == new:
        return ""
    if len(old) != len(new):
        return f"Rates of {job.name} are known for {(len(new) - 1) * job.spec.unit_nodes} nodes now."
    unit = job.spec.unit_nodes
    changed = [(abs(after - before) / max(before, after), units * unit) for units, before, after in _pairs(old, new)]
    change, nodes = max(changed, default=(0.0, 0))
    if change <= RATE_CHANGE:
        return ""
    return f"The rate of {job.name} on {nodes} nodes has changed by {100.0 * change:.0f} %."


def _pairs(old: Sequence[float], new: Sequence[float]) -> list[tuple[int, float, float]]:
    """Units, and the rates that differ."""
    both = enumerate(zip(old, new, strict=True))
    return [(units, before, after) for units, (before, after) in both if before != after]


def _once(state: CoordinatorState, commands: tuple[Command, ...], at_unix_s: float) -> Outcome:
    """The commands without those that were given a moment ago and may be on their way."""
    late = {each: given for each, given in state.given if is_within(at_unix_s, given, REPEAT_S)}
    fresh = tuple(each for each in commands if _essence(each) not in late)
    late.update((_essence(each), at_unix_s) for each in fresh)
    return replace(state, given=tuple(late.items())), fresh


def _essence(command: Command) -> Command:
    """What makes two commands the same: a plan is proposed anew at each moment, with another time on it."""
    if isinstance(command, PublishPlan):
        return replace(command, published=command.published.without_times())
    return command


def _prepared(state: CoordinatorState, snapshot: ClusterSnapshot) -> Outcome:
    """Nothing is to be done: once every node is in its place, the table for what comes next is built."""
    published = snapshot.published
    is_moving = any(node.state in (NodeState.JOINING, NodeState.LEAVING) for node in snapshot.unsettled_nodes)
    if published is None or is_moving:
        return state, ()
    cluster, _ = situation_of(snapshot, PlanDifferences(), Bounds())
    if cluster in (state.asked, None if state.table is None else state.table.cluster):
        return state, ()
    expected, with_pairs = expected_tasks(snapshot, cluster.size), len(cluster.tasks) <= PAIRS_MOST_TASKS
    return replace(state, asked=cluster), (BuildTable(cluster, expected, with_pairs),)
