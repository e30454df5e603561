"""Makes the overview of a cluster from what its store holds at one revision. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from unicron_elastic.base.incident import Incident
from unicron_elastic.launcher.common.tables import natural
from unicron_elastic.launcher.view.cluster.members import (
    ClusterView,
    JobListing,
    NodeListing,
    PlannedJobListing,
    cluster_view,
)
from unicron_elastic.launcher.view.cluster.overview import (
    FINE,
    ClusterVerdict,
    CoordinatorLine,
    IncidentLine,
    JobLine,
    NodeLine,
    Overview,
    PlanLine,
    incident_line,
)
from unicron_elastic.launcher.view.cluster.plan import PlanReading, agent_states, plan_reading, planned_jobs
from unicron_elastic.launcher.view.cluster.recorded_fault import moment_s
from unicron_elastic.launcher.view.cluster.verdict import verdict_of
from unicron_elastic.metrics.figures import PlannedJobFigures
from unicron_elastic.planning.coordinate.node_status import Health
from unicron_elastic.planning.coordinate.proposal import why_overtaken
from unicron_elastic.rendezvous.plan.mirror import PlannedJob as KnownJob
from unicron_elastic.rendezvous.plan.mirror import health_of
from unicron_elastic.rendezvous.plan.plan_figures import plan_figures
from unicron_elastic.rendezvous.records import news as told_news
from unicron_elastic.rendezvous.records.job import NAME_CHARACTERS
from unicron_elastic.rendezvous.records.news import JobNews
from unicron_elastic.rendezvous.records.plan_keys import run_of_start, start_of_run
from unicron_elastic.rendezvous.store.interface import Entry, Snapshot

INCIDENTS_MOST = 50
_HEALTH = {Health.OK: "well", Health.DRAINING: "draining", Health.BROKEN: "broken"}
_NOT_OPEN = ("fail", "observe", "isolate")  # nobody waits for a step after these


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What runs and nodes have told of themselves. ``odd`` says of each key that could not be read why."""

    jobs: Mapping[str, JobNews] = field(default_factory=dict)  # by run
    incidents: tuple[Incident, ...] = ()
    odd: tuple[str, ...] = ()


def overview_of(seen: Snapshot, now_s: float, *, where: str = "", incidents: Iterable[Incident] = ()) -> Overview:
    """Return the cluster at ``now_s``, in unix seconds, as the store's keys tell, of which it has ``seen`` all.

    ``incidents``: what is known of others beside the store, such as from a ledger.
    """
    news = _news(seen)
    news = replace(news, incidents=(*news.incidents, *incidents))
    return _overview(cluster_view(seen), plan_reading(seen, now_s), news, now_s, where=where)


def _news(seen: Snapshot) -> News:
    jobs, incidents, odd = dict[str, JobNews](), list[Incident](), list[str]()
    for entry in seen.under(told_news.NEWS).entries:
        try:
            _take(entry, jobs, incidents)
        except ValueError as error:
            odd.append(str(error))
    return News(jobs=jobs, incidents=tuple(incidents), odd=tuple(odd))


def _overview(view: ClusterView, reading: PlanReading, news: News, now_s: float, *, where: str) -> Overview:
    jobs = _jobs(view, reading, news, now_s)
    leader = view.leader
    coordinator = (
        None
        if leader is None
        else CoordinatorLine(
            host=leader.host,
            node_id=leader.node_id,
            is_dedicated=leader.is_dedicated,
            since_unix_s=leader.since_unix_s or None,
        )
    )
    found = Overview(
        where=where,
        at_unix_s=now_s,
        verdict=ClusterVerdict(level=FINE, reason=""),
        coordinator=coordinator,
        plan=_plan(reading, jobs, now_s),
        jobs=jobs,
        nodes=_nodes(view, reading, now_s),
        incidents=_incidents(news.incidents, jobs),
        odd=tuple(dict.fromkeys((*view.odd, *reading.odd, *news.odd))),
    )
    return replace(found, verdict=verdict_of(found))


def _take(entry: Entry, jobs: dict[str, JobNews], incidents: list[Incident]) -> None:
    """Raises ValueError."""
    if entry.key.startswith(told_news.JOB_NEWS):
        jobs[told_news.run_of_news(entry.key)] = told_news.parse_job_news(entry)
    elif entry.key.startswith(told_news.INCIDENTS):
        incidents += told_news.parse_incidents(entry)
    else:
        raise ValueError(f"{entry.key} is no news of a job or a node")


def _jobs(view: ClusterView, reading: PlanReading, news: News, now_s: float) -> tuple[JobLine, ...]:
    planned, records = planned_jobs(reading), reading.mirror.jobs()
    figures = {each.run_id: each for each in plan_figures(reading.snapshot, records, view.quarantine, now_s).jobs}
    starts: dict[str, dict[int, JobListing]] = {job.job: {} for job in planned}
    lines = []
    for run in view.jobs:
        name, number = start_of_run(run.run_id)
        if name in starts and number:
            starts[name][number] = run
        elif run.run_id not in starts:
            lines.append(_by_hand(run, news.jobs.get(run.run_id)))
    for job in planned:
        line = _planned(job, _latest_start(starts[job.job]), figures.get(job.job), records.get(job.job))
        lines.append(_with_news(line, news.jobs.get(job.job)))
    return tuple(sorted(lines, key=lambda line: natural(line.job)))


def _latest_start(runs: Mapping[int, JobListing]) -> tuple[int | None, JobListing | None]:
    """Return the latest start of a planned job, by number; one with nodes goes before."""
    number = max(runs, key=lambda each: (bool(runs[each].view.members), each), default=None)
    return (None, None) if number is None else (number, runs[number])


def _by_hand(run: JobListing, news: JobNews | None) -> JobLine:
    """Read a job that ``unicron-run`` started and nobody plans."""
    state = {"over": "failed" if run.failed else "finished"}.get(run.state, run.state)
    spec = run.spec
    line = JobLine(
        job=run.run_id,
        run_id=run.run_id,
        state=state,
        why=run.failed or run.why,
        generation=None if run.view.round is None else run.view.round.number,
        has_run=run.view.round is not None,
        is_given_up=run.view.round is None and not run.view.members,
        nodes=len(run.view.training),
        joining_nodes=len(run.view.waiting),
        wanted_nodes=None if spec is None else spec.target_nodes,
        min_nodes=None if spec is None else spec.min_nodes,
        max_nodes=None if spec is None else spec.max_nodes,
        workers=None if spec is None else len(run.view.training) * spec.nproc_per_node,
        hosts=tuple(run.training_hosts),
    )
    return _with_news(line, news)


def _planned(
    job: PlannedJobListing,
    start: tuple[int | None, JobListing | None],
    figures: PlannedJobFigures | None,
    known: KnownJob | None,
) -> JobLine:
    """``start``: the latest of which anything is known; ``known``: what the store has of the job beside the plan."""
    number, run = start
    measured = None if known is None else known.measured
    expected = None if figures is None else figures.plan_flops or None
    achieved = None if figures is None or measured is None else figures.achieved_flops
    line = JobLine(
        job=job.job,
        run_id=job.job if number is None else run_of_start(job.job, number),
        state=_state(job, None if known is None else known.phase.exit_code),
        why=job.why,
        is_planned=True,
        has_run=measured is not None,
        generation=None if run is None or run.view.round is None else run.view.round.number,
        start=number,
        weight=job.weight,
        weighted_flops=achieved,
        expected_flops=expected,
        of_expected=None if expected is None or achieved is None else achieved / expected,
        is_estimate=figures is not None and figures.is_estimate,
        nodes=job.working,
        joining_nodes=job.joining,
        leaving_nodes=job.leaving,
        wanted_nodes=job.planned,
        min_nodes=job.min_nodes,
        max_nodes=job.max_nodes,
        workers=job.working * job.nproc_per_node,
        steps_per_s=None if measured is None or measured.now is None else 1.0 / measured.now.step_s,
        hosts=job.hosts if run is None or not run.view.members else tuple(run.training_hosts),
    )
    return line if line.state == "training" else replace(line, steps_per_s=None, weighted_flops=None, of_expected=None)


def _state(job: PlannedJobListing, exit_code: int | None) -> str:
    if job.phase == "finished":
        return "failed" if exit_code else "finished"
    if job.phase == "cancelled":
        return "cancelled"
    return "training" if job.working else "paused" if job.paused else "waiting"


def _with_news(line: JobLine, news: JobNews | None) -> JobLine:
    if news is None or not line.is_alive:
        return line
    return replace(
        line,
        world=news.world or None,
        step=news.step,
        steps_per_s=1.0 / news.step_s if news.step_s and line.state == "training" else line.steps_per_s,
        stepped_unix_s=news.stepped_unix_s,
        told_unix_s=news.at_unix_s,
        restarts_used=news.restarts_used,
        max_restarts=news.max_restarts,
        is_incident_open=news.is_incident_open,
    )


def _plan(reading: PlanReading, jobs: Iterable[JobLine], now_s: float) -> PlanLine | None:
    published = reading.snapshot.published
    if published is None:
        return None
    return PlanLine(
        revision=published.revision,
        made_unix_s=published.made_unix_s or None,
        reason=published.reason,
        overtaken=why_overtaken(reading.snapshot, now_s),
        waf_flops=published.plan.waf_after_flops,
        achieved_waf_flops=sum(job.weighted_flops or 0.0 for job in jobs if job.is_alive),
        next_fault_s=published.plan.running_s,
    )


def _nodes(view: ClusterView, reading: PlanReading, now_s: float) -> tuple[NodeLine, ...]:
    health = health_of(view.quarantine, now_s)
    planned = {job.name for job in reading.snapshot.jobs}
    found = []
    for node in view.nodes(now_s, agent_states(reading.snapshot)):
        name, _ = start_of_run(node.job)
        found.append(_node(node, health(node.host), name if name in planned else node.job))
    return tuple(found)


def _node(node: NodeListing, health: Health, job: str) -> NodeLine:
    kept_out, agent, lost = node.quarantine, node.agent, node.lost
    is_only_kept_out = not node.node_id and lost is None
    state = "absent" if is_only_kept_out else node.state if agent is None else agent.state
    return NodeLine(
        host=node.host,
        node_id=node.node_id,
        health=_HEALTH[health],
        state=state,
        job=job,
        towards="" if agent is None else agent.towards,
        rank=node.rank,
        label=node.label[:NAME_CHARACTERS],
        is_coordinator=node.is_coordinator,
        reason="" if kept_out is None else kept_out.reason,
        by="" if kept_out is None else kept_out.by,
        since_unix_s=None if kept_out is None else kept_out.since,
        until_unix_s=None if kept_out is None else kept_out.until,
        lost_why="" if lost is None else lost.reason,
        lost_unix_s=None if lost is None else lost.lost_unix_s or None,
    )


def _incidents(incidents: Iterable[Incident], jobs: Iterable[JobLine]) -> tuple[IncidentLine, ...]:
    """Each once, the newest first."""
    known = {(each.run_id, each.host, each.number, each.time): each for each in incidents}
    newest = sorted(known.values(), key=lambda each: (-moment_s(each), natural(each.host), -each.number))
    alive = {job.job: job for job in jobs if job.is_alive}
    return tuple(incident_line(each, is_open=_is_open(each, alive)) for each in newest[:INCIDENTS_MOST])


def _is_open(incident: Incident, alive: Mapping[str, JobLine]) -> bool:
    job = alive.get(incident.run_id)
    if job is None or incident.is_closed:
        return False
    has_stepped = job.stepped_unix_s is not None and job.stepped_unix_s > moment_s(incident)
    return incident.action not in _NOT_OPEN and not has_stepped
