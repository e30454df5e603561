"""The plan between jobs as values: what is published, or would be, and what still has to happen for it.

Pure. ``plan_text`` makes text for people of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.common.tables import natural
from unicron_elastic.launcher.view.cluster.members import AgentActivity, PlannedJobListing
from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.proposal import propose, why_overtaken
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.reconcile import Movement, StartJob, StopJob, reconcile
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobStatus
from unicron_elastic.planning.model.measured import are_flops_told
from unicron_elastic.rendezvous.plan.mirror import PlanMirror, health_of
from unicron_elastic.rendezvous.records.cluster import QUARANTINE, parse_quarantined
from unicron_elastic.rendezvous.records.plan_keys import PLAN, PlannedJobKeys
from unicron_elastic.rendezvous.store.interface import Snapshot

_REFUSED = "/refused/"  # in the keys of refusals; names in keys are quoted
REFUSALS_MOST = 3  # that are told of one job


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReading:
    """What the store has of planning. ``odd`` says of each key that could not be read why."""

    mirror: PlanMirror
    snapshot: ClusterSnapshot
    odd: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job. ``before``: how many nodes it has or gets already; ``planned``: how many it is to have, on ``hosts``.

    FLOP/s are those at the planned count: achieved, and weighted. ``waits``: why it is to have none; "": it is to have
    some.
    """

    job: str
    phase: str
    before: int
    working: int
    joining: int
    leaving: int
    planned: int
    hosts: tuple[str, ...]
    weight: float
    rate_flops: float
    weighted_flops: float
    waits: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMove:
    """A node that does not work where it is to: ``source`` and ``target`` are jobs, "" for none.

    ``how``: in a few words; ``reason``: as the order says it, "" before there is one.
    """

    host: str
    source: str
    target: str
    how: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan and what it means for the nodes and jobs that there are.

    ``revision``: of the published plan; 0: it is not published. ``overtaken``: what it does not know yet. ``what_if``:
    what was supposed. ``idle``: hosts for which the plan has no job; ``kept_out``: hosts that it does not count on, and
    why. ``steps``: what jobs have to do now. ``estimates``: jobs of which nobody tells what a step computes, so that
    their FLOP/s are known by their ratios alone.
    """

    what_if: tuple[str, ...]
    revision: int
    published_unix_s: float | None
    overtaken: str
    reason: str
    nodes: int
    jobs: tuple[JobRow, ...]
    idle: tuple[str, ...]
    kept_out: tuple[tuple[str, str], ...]
    moves: tuple[NodeMove, ...]
    steps: tuple[str, ...]
    waf_before_flops: float
    waf_after_flops: float
    lost_flop: float
    running_s: float
    estimates: tuple[str, ...] = ()

    @property
    def is_published(self) -> bool:
        """Whether the coordinator acts by it."""
        return self.revision > 0

    @property
    def lost_s(self) -> float | None:
        """What the transition costs, in seconds of the WAF before; None if nothing earned anything before."""
        return self.lost_flop / self.waf_before_flops if self.waf_before_flops else None

    def to_json(self) -> dict[str, Any]:
        """Return this as plain data."""
        found = asdict(self)
        found["kept_out"] = [{"host": host, "why": why} for host, why in self.kept_out]
        return {"is_published": self.is_published, **found, "lost_s": self.lost_s}


def plan_reading(seen: Snapshot, now: float) -> PlanReading:
    """Return what the store's keys, of which it has ``seen`` all, tell of planning. ``now`` is in unix seconds."""
    mirror = PlanMirror(seen.under(PLAN))
    quarantined, odd = [], list[str]()
    for entry in seen.under(QUARANTINE).entries:
        try:
            quarantined.append(parse_quarantined(entry))
        except ValueError as error:
            odd.append(str(error))
    snapshot = mirror.planning_snapshot(health_of(quarantined, now))
    return PlanReading(mirror=mirror, snapshot=snapshot, odd=(*odd, *mirror.odd.values()))


def published_view(snapshot: ClusterSnapshot, published: Published, now: float) -> PlanView:
    """The plan by which the coordinator acts. Moments are unix seconds."""
    return _view(
        snapshot,
        snapshot,
        published,
        overtaken=why_overtaken(snapshot, now),
        published_unix_s=published.made_unix_s or None,
    )


def proposal_view(before: ClusterSnapshot, after: ClusterSnapshot, now: float, what_if: Sequence[str] = ()) -> PlanView:
    """The plan that would be made from ``after``, compared with ``before``. Raises ValueError if there can be none."""
    return _view(before, after, propose(after, now), what_if=tuple(what_if))


def planned_jobs(reading: PlanReading) -> tuple[PlannedJobListing, ...]:
    """All jobs that are planned, those that are over as well."""
    snapshot, records = reading.snapshot, reading.mirror.jobs()
    published = snapshot.published
    nodes: dict[str, list[NodeStatus]] = {}
    for node in snapshot.nodes:  # once, as there may be thousands
        nodes.setdefault(node.job, []).append(node)
    refusals = _refusals(reading)
    found = []
    for job in snapshot.jobs:
        at_work = nodes.get(job.name, [])
        states = Counter(node.state for node in at_work)
        known = published is not None and job.name in published.plan.counts
        reason = records[job.name].phase.reason if job.name in records else ""
        found.append(
            PlannedJobListing(
                job=job.name,
                phase=job.phase.value,
                why=_with_refusals(_why_waiting(job, published, states), refusals, job.name)
                if job.is_alive
                else reason,
                working=states[NodeState.WORKING],
                joining=states[NodeState.JOINING],
                leaving=states[NodeState.LEAVING],
                planned=published.plan.counts[job.name] if published is not None and known else None,
                min_nodes=job.spec.min_nodes,
                max_nodes=job.spec.max_nodes,
                weight=job.spec.weight,
                pinned_nodes=job.spec.pinned_nodes,
                paused=job.spec.paused,
                nproc_per_node=job.spec.nproc_per_node,
                hosts=_hosts(at_work),
            )
        )
    return tuple(found)


def estimates(reading: PlanReading) -> tuple[str, ...]:
    """Name the jobs of which nobody tells what a step computes."""
    records = reading.mirror.jobs()
    alive = [job for job in reading.snapshot.jobs if job.is_alive]
    known = {name: record.measured for name, record in records.items()}
    return tuple(job.name for job in alive if not are_flops_told(job.spec, known.get(job.name)))


def agent_states(snapshot: ClusterSnapshot) -> tuple[AgentActivity, ...]:
    """What the agents of the cluster do, as they say themselves."""
    return tuple(
        AgentActivity(
            node_id=node.node_id,
            host=node.host,
            label=node.label,
            state=node.state.value,
            job=node.job,
            towards=node.towards,
        )
        for node in snapshot.nodes
    )


def _view(
    before: ClusterSnapshot,
    after: ClusterSnapshot,
    published: Published,
    *,
    overtaken: str = "",
    published_unix_s: float | None = None,
    what_if: tuple[str, ...] = (),
) -> PlanView:
    plan = published.plan
    steps = reconcile(after, published)
    return PlanView(
        what_if=what_if,
        revision=published.revision,
        published_unix_s=published_unix_s,
        overtaken=overtaken,
        reason=plan.reason,
        nodes=plan.nodes,
        jobs=tuple(_row(job, before, after, published) for job in _jobs_shown(before, after)),
        idle=_idle(after, published),
        kept_out=_kept_out(after),
        moves=tuple(_moves(before, after, published, steps)),
        steps=tuple(step.reason for step in steps if isinstance(step, StartJob | StopJob)),
        waf_before_flops=_waf_now_flops(before) if what_if else plan.waf_before_flops,
        waf_after_flops=plan.waf_after_flops,
        lost_flop=plan.lost_flop,
        running_s=plan.running_s,
    )


def _jobs_shown(before: ClusterSnapshot, after: ClusterSnapshot) -> list[JobStatus]:
    """Those that are alive, have nodes, or were alive before."""
    held = {node.job for node in after.nodes}
    alive = {job.name for job in before.jobs if job.is_alive}
    found = [job for job in after.jobs if job.is_alive or job.name in held | alive]
    return sorted(found, key=lambda job: natural(job.name))


def _row(job: JobStatus, before: ClusterSnapshot, after: ClusterSnapshot, published: Published) -> JobRow:
    planned = published.plan.counts.get(job.name, 0)
    states = _states_of(after, job.name)
    rate_flops = _rate_flops(job, planned)
    return JobRow(
        job=job.name,
        phase=job.phase.value,
        before=sum(node.heads_for == job.name for node in before.nodes),
        working=states[NodeState.WORKING],
        joining=states[NodeState.JOINING],
        leaving=states[NodeState.LEAVING],
        planned=planned,
        hosts=_ordered(seat.host for seat in published.seats if seat.job == job.name),
        weight=job.spec.weight,
        rate_flops=rate_flops,
        weighted_flops=job.spec.weight * rate_flops,
        waits=why_it_waits(job, published),
    )


def _rate_flops(job: JobStatus, nodes: int) -> float:
    """T(t, x); 0.0 where nothing is known of it."""
    units, rest = divmod(nodes, job.spec.unit_nodes)
    return job.rates_flops[units] if not rest and units < len(job.rates_flops) else 0.0


def _waf_now_flops(snapshot: ClusterSnapshot) -> float:
    """What all jobs earn on the nodes that they have, before anything is supposed."""
    held = snapshot.held()
    earning = [job for job in snapshot.jobs if job.is_planned and held[job.name] >= job.spec.min_nodes]
    units = {job.name: held[job.name] // job.spec.unit_nodes * job.spec.unit_nodes for job in earning}
    return sum(job.spec.weight * _rate_flops(job, units[job.name]) for job in earning)


def _states_of(snapshot: ClusterSnapshot, job: str) -> Counter[NodeState]:
    return Counter(node.state for node in snapshot.nodes if node.job == job)


def _why_waiting(job: JobStatus, published: Published | None, states: Counter[NodeState]) -> str:
    """Why no node works for a job that is alive; "" if one does."""
    if why := why_it_waits(job, published):
        return why
    if states[NodeState.WORKING]:
        return ""
    coming = states[NodeState.JOINING]
    wanted = 0 if published is None else published.plan.counts.get(job.name, 0)
    are = "is" if coming == 1 else "are"
    return f"{job.name} waits until its nodes have come: {coming or 'none'} of {wanted} {are} on the way."


def _refusals(reading: PlanReading) -> dict[str, list[str]]:
    """Return by the prefix of a job's: what nodes say that would not work for it, in the order of their keys."""
    found: dict[str, list[str]] = {}
    for key, entry in sorted(reading.mirror.entries.items()):
        job, what, _ = key.partition(_REFUSED)
        if what:
            found.setdefault(job + what, []).append(one_line(entry.value))
    return found


def _with_refusals(why: str, refusals: Mapping[str, list[str]], job: str) -> str:
    """Why a job waits, with what nodes say that would not work for it."""
    if not why:
        return ""
    texts = dict.fromkeys(refusals.get(PlannedJobKeys(job).refusals, []))
    more = [f"{len(texts) - REFUSALS_MOST} more nodes say other things."] if len(texts) > REFUSALS_MOST else []
    return " ".join([why, *list(texts)[:REFUSALS_MOST], *more])


def why_it_waits(job: JobStatus, published: Published | None) -> str:
    """Why the plan has no nodes for a job that is alive; "" if it has some."""
    name, plan = job.name, None if published is None else published.plan
    if not job.is_alive:
        return f"{name} is {job.phase.value}."
    if plan is not None and (wait := next((wait for wait in plan.waits if wait.task == name), None)) is not None:
        return wait.reason
    if plan is not None and plan.counts.get(name):
        return ""
    if not job.is_planned:
        return f"{name} waits: how fast it is on how many nodes is not known yet."
    return f"{name} waits for the next plan." if published is not None else f"{name} waits for the first plan."


def _idle(snapshot: ClusterSnapshot, published: Published) -> tuple[str, ...]:
    jobs = published.job_of
    well = (node for node in snapshot.sound_nodes if node.health is Health.OK)
    return _hosts(node for node in well if not jobs.get(node.node_id, ""))


def _kept_out(snapshot: ClusterSnapshot) -> tuple[tuple[str, str], ...]:
    sound = {node.node_id for node in snapshot.sound_nodes}
    found = []
    for node in snapshot.nodes:
        if node.health is Health.BROKEN:
            found.append((node.host, "broken"))
        elif node.node_id not in sound:
            found.append((node.host, f"works for {node.held_by}, which is not planned"))
        elif node.health is Health.DRAINING:
            found.append((node.host, "to be drained"))
    return tuple(sorted(found, key=lambda each: natural(each[0])))


def _moves(
    before: ClusterSnapshot, after: ClusterSnapshot, published: Published, steps: Sequence[Movement]
) -> list[NodeMove]:
    """Return every node that is on its way, or is to be; with nodes that came or went, if something was supposed."""
    ordered = {step.node_id: step.reason for step in steps if not isinstance(step, StartJob | StopJob)}
    wanted, was = published.job_of, {node.node_id: node for node in before.nodes}
    here = {node.node_id for node in after.nodes}
    found = [
        NodeMove(host=node.host, source=node.heads_for, target="", how="is lost")
        for node in before.nodes
        if node.node_id not in here
    ]
    for node in after.nodes:
        old = was.get(node.node_id)
        target = "" if node.health is Health.BROKEN else wanted.get(node.node_id, node.heads_for)
        source = "" if old is None else old.held_by or old.job
        how = _how(node, target, source, is_new=old is None, is_ordered=node.node_id in ordered)
        if how:
            reason = ordered.get(node.node_id, "") if published.revision else ""
            found.append(NodeMove(host=node.host, source=source, target=target, how=how, reason=reason))
    return sorted(found, key=lambda move: natural(move.host))


def _how(node: NodeStatus, target: str, source: str, *, is_new: bool, is_ordered: bool) -> str:
    """What happens to a node, in a few words; "": it stays where it is."""
    if is_new:
        return f"comes, and goes to {target}" if target else "comes, and is idle"
    if node.heads_for == target:
        if node.state is NodeState.JOINING:
            return f"joins {target}"
        if node.state is NodeState.LEAVING:
            return f"leaves {node.job} for {target}" if target else f"leaves {node.job}"
        return f"is idle after {source}" if source and not target else ""
    if target:
        way = f"goes from {source} to {target}" if source else f"goes to {target}"
    else:
        way = f"leaves {node.heads_for or node.job}"
    return way if is_ordered else f"{way} once {node.job or target} can do without it"


def _hosts(nodes: Iterable[NodeStatus]) -> tuple[str, ...]:
    return _ordered(node.host for node in nodes)


def _ordered(hosts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(hosts, key=natural))
