"""The cluster as its store shows it at one revision, and as text for people. Pure.

Everything reads the same without colour, in 60 columns and in a pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from unicron_elastic.base.quarantine import Quarantined, active
from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.common.tables import aligned, listed, natural, shown_name, wrapped
from unicron_elastic.membership.rounds import JobView, Settings, next_round
from unicron_elastic.rendezvous.records.cluster import (
    JOBS,
    LEADER,
    NODES,
    QUARANTINE,
    ROSTER,
    LeaderRecord,
    NodeRecord,
    RosterRecord,
    UnplannedJobSpec,
    parse_leader,
    parse_node,
    parse_quarantined,
    parse_roster,
    parse_spec,
)
from unicron_elastic.rendezvous.records.job import JobKeys, JobMirror
from unicron_elastic.rendezvous.records.plan_keys import start_of_run
from unicron_elastic.rendezvous.store.interface import Entry, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJobListing:
    """A job to which the cluster's plan gives nodes.

    ``working``, ``joining`` and ``leaving``: how many nodes do so, on ``hosts``; ``planned``: how many it is to have,
    None before a plan knows it. ``why``: it has none or is over; "" while it runs.
    """

    job: str
    phase: str  # submitted, running, finished, cancelled
    why: str
    working: int
    joining: int
    leaving: int
    planned: int | None
    min_nodes: int
    max_nodes: int | None
    weight: float
    pinned_nodes: int | None
    paused: bool
    nproc_per_node: int
    hosts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What is to be told of it beside what is told of every job."""
        names = ("phase", "working", "joining", "leaving", "planned", "weight", "pinned_nodes", "paused")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentActivity:
    """What an agent of the cluster says that it does: idle, joining, working or leaving, and for which job."""

    node_id: str
    host: str
    label: str
    state: str
    job: str
    towards: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobListing:
    """One job. ``cancelled`` is the operator's reason; "": it is not. ``planned``: None, if no plan is made for it.

    ``failed``: why it was closed, if it did not end well.
    """

    run_id: str
    view: JobView
    spec: UnplannedJobSpec | None = None
    cancelled: str = ""
    planned: PlannedJobListing | None = None
    failed: str = ""

    @property
    def state(self) -> str:
        """Return the state in one word."""
        if self.planned is not None:
            return self.planned.phase
        if self.view.closed:
            return "over"
        if self.cancelled:
            return "cancelled"
        if self.view.is_stopped:
            return "stopped"
        return "training" if self.view.training else "waiting"

    @property
    def is_over(self) -> bool:
        """Whether nobody is in it any more, and nobody will be."""
        return bool(self.view.closed) or (bool(self.cancelled) and not self.view.members)

    @property
    def why(self) -> str:
        """Why it is in this state; "" for a job that trains."""
        if self.planned is not None:
            return self.planned.why
        if self.view.closed or self.cancelled:
            return self.cancelled or self.view.closed
        if self.view.training:
            return ""
        if self.view.is_stopped:
            return "All of its nodes were told to stop."
        if not self.view.members:
            return "No node of it is there."
        if self.spec is None:
            return ""
        settings = Settings(min_nodes=self.spec.min_nodes, max_nodes=self.spec.max_nodes)
        return next_round(self.view, settings, 0.0).reason

    def rank_of(self, node_id: str) -> int | None:
        """Return the rank of a node that trains."""
        if self.view.round is None or not any(each.node_id == node_id for each in self.view.training):
            return None
        return self.view.round.rank_of(node_id)

    @property
    def training_hosts(self) -> list[str]:
        """Return the hosts that train in the order of their ranks."""
        there = {member.node_id for member in self.view.training}
        places = () if self.view.round is None else self.view.round.places
        return [place.host for place in places if place.node_id in there]

    def to_json(self) -> dict[str, Any]:
        """Return this as plain data."""
        spec = self.spec if self.planned is None else self.planned
        target = None if self.spec is None else self.spec.target_nodes
        found = {
            "job": self.run_id,
            "state": self.state,
            "why": self.why,
            "round": None if self.view.round is None else self.view.round.number,
            "training": len(self.view.training) if self.view.members or self.planned is None else self.planned.working,
            "target_nodes": target if self.planned is None else self.planned.planned,
            "min_nodes": None if spec is None else spec.min_nodes,
            "max_nodes": None if spec is None else spec.max_nodes,
            "nproc_per_node": None if spec is None else spec.nproc_per_node,
            "hosts": self.training_hosts if self.view.members or self.planned is None else list(self.planned.hosts),
            "waiting_hosts": [member.host for member in self.view.waiting],
        }
        return found if self.planned is None else {**found, **self.planned.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeListing:
    """An agent, or a host without one that is in quarantine or ``lost``; it has no ``node_id``."""

    host: str
    node_id: str = ""
    job: str = ""
    rank: int | None = None
    state: str = ""  # training, waiting, spare, lost; "": not known
    label: str = ""
    pid: int | None = None
    is_coordinator: bool = False
    quarantine: Quarantined | None = None
    agent: AgentActivity | None = None  # if plans are made for it
    lost: RosterRecord | None = None

    def to_json(self) -> dict[str, Any]:
        """Return this as plain data."""
        found: dict[str, Any] = {
            "host": self.host,
            "node_id": self.node_id or None,
            "job": self.job or None,
            "rank": self.rank,
            "state": self.state or None,
            "label": self.label,
            "pid": self.pid,
            "is_coordinator": self.is_coordinator,
            "quarantine": None if self.quarantine is None else self.quarantine.to_json(),
        }
        if self.lost is not None:
            found |= {"lost_since": self.lost.lost_unix_s or None, "lost_why": self.lost.reason}
        agent = self.agent
        return found if agent is None else {**found, "agent": agent.state, "towards": agent.towards or None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A `ClusterView` is all that is known at one revision. ``odd`` says of each key that could not be read why."""

    agents: tuple[NodeRecord, ...]
    leader: LeaderRecord | None
    quarantine: tuple[Quarantined, ...]
    jobs: tuple[JobListing, ...]
    odd: tuple[str, ...]
    roster: tuple[RosterRecord, ...] = ()

    def nodes(self, now: float, states: Iterable[AgentActivity] = ()) -> tuple[NodeListing, ...]:
        """Agents, members of jobs without a record of their own, and hosts that are lost or in quarantine, by host.

        ``states``: what agents say that they do. What runs a job for one of them is shown as that agent.
        """
        kept_out = {each.node: each for each in active(self.quarantine, now)}
        agents = {record.node_id: record for record in self.agents}
        hosts = {record.node_id: record.host for record in self.agents}
        jobs: dict[str, JobListing] = {}
        for job in self.jobs:
            for member in job.view.members:
                hosts.setdefault(member.node_id, member.host)
                jobs[member.node_id] = job
        if self.leader is not None:
            hosts.setdefault(self.leader.node_id, self.leader.host)
        doing = {state.node_id: state for state in states}
        hosts.update({node_id: state.host for node_id, state in doing.items() if node_id not in hosts})
        found = [
            self._node(node_id, host, agents.get(node_id), jobs.get(node_id), kept_out.get(host))
            for node_id, host in hosts.items()
        ]
        found = _merged(found, doing)
        lost = {each.host: each for each in self.roster if each.host not in hosts.values()}
        found += [
            NodeListing(host=host, state="lost", lost=each, quarantine=kept_out.get(host))
            for host, each in lost.items()
        ]
        absent = kept_out.keys() - hosts.values() - lost.keys()
        found += [NodeListing(host=host, quarantine=kept_out[host]) for host in absent]
        return tuple(sorted(found, key=lambda node: (natural(node.host), node.node_id)))

    def _node(
        self, node_id: str, host: str, agent: NodeRecord | None, job: JobListing | None, quarantine: Quarantined | None
    ) -> NodeListing:
        rank = None if job is None else job.rank_of(node_id)
        is_spare = agent is not None and agent.is_spare and job is None
        state = "spare" if is_spare else "" if job is None else "waiting" if rank is None else "training"
        job_of_agent = "" if agent is None or is_spare else agent.job
        return NodeListing(
            host=host,
            node_id=node_id,
            job=job_of_agent if job is None else job.run_id,
            rank=rank,
            state=state,
            label="" if agent is None else agent.label,
            pid=None if agent is None else agent.pid,
            is_coordinator=self.leader is not None and self.leader.node_id == node_id,
            quarantine=quarantine,
        )


def with_planned(jobs: Iterable[JobListing], planned: Iterable[PlannedJobListing]) -> tuple[JobListing, ...]:
    """All jobs by name; one that is planned is one with all its starts, of which the last tells who trains."""
    known = {each.job: each for each in planned}
    found = {name: JobListing(run_id=name, view=JobView(), planned=each) for name, each in known.items()}
    for job in sorted(jobs, key=lambda job: natural(job.run_id)):
        name = next((name for name in (job.run_id, _job_of_run(job.run_id)) if name in known), job.run_id)
        if name not in known:
            found[name] = job
        elif job.view.members or not found[name].view.members:
            found[name] = replace(job, run_id=name, planned=known[name])
    return tuple(sorted(found.values(), key=lambda job: natural(job.run_id)))


def cluster_view(seen: Snapshot) -> ClusterView:
    """Return what the store's keys, of which it has ``seen`` all, tell of the cluster."""
    odd: list[str] = []
    leader = seen.get(LEADER)
    nodes = seen.under(NODES).entries
    agents = _parsed([entry for entry in nodes if not entry.key.startswith(ROSTER)], parse_node, odd)
    roster = _parsed([entry for entry in nodes if entry.key.startswith(ROSTER)], parse_roster, odd)
    quarantine = _parsed(seen.under(QUARANTINE).entries, parse_quarantined, odd)
    jobs = _jobs(seen.under(JOBS), odd)
    leaders = _parsed([] if leader is None else [leader], parse_leader, odd)
    return ClusterView(
        agents=tuple(agents),
        leader=leaders[0] if leaders else None,
        quarantine=tuple(quarantine),
        jobs=tuple(sorted(jobs, key=lambda job: natural(job.run_id))),
        odd=tuple(odd),
        roster=tuple(roster),
    )


def job_status(run_id: str, snapshot: Snapshot, odd: list[str]) -> JobListing | None:
    """A job by its keys; None if they tell of none. What cannot be read is told in ``odd``."""
    keys = JobKeys(run_id)
    telling = {keys.round, keys.closed, keys.lease, keys.spec, keys.cancelled}  # others may outlive it
    if not any(entry.key in telling or entry.key.startswith(f"{keys.prefix}members/") for entry in snapshot.entries):
        return None
    mirror = JobMirror(keys, snapshot)
    odd += mirror.odd.values()
    spec, cancelled = mirror.get(keys.spec), mirror.get(keys.cancelled)
    specs = _parsed([] if spec is None else [spec], parse_spec, odd)
    reason = "" if cancelled is None else one_line(cancelled.value) or "cancelled"
    failed = mirror.get(keys.failed)
    return JobListing(
        run_id=run_id,
        view=mirror.view(),
        spec=specs[0] if specs else None,
        cancelled=reason,
        failed="" if failed is None else one_line(failed.value) or f"{run_id} has failed.",
    )


def jobs_table(jobs: Iterable[JobListing], width: int | None) -> str:
    """A row for each job, below it why it is so and its hosts. ``width`` in columns; None: nothing is cut, for grep."""
    jobs = list(jobs)
    is_planned = any(job.planned is not None for job in jobs)
    columns = ("job", "state", "round", "nodes", *["weight"] * is_planned)
    cells = [_job_cells(job)[: len(columns)] for job in jobs]
    heading, *rows = aligned([columns, *cells], width, flexible=(0,))
    lines = [heading]
    for job, row in zip(jobs, rows, strict=True):
        lines += [row, *wrapped(one_line(job.why), width), *wrapped(_hosts_of(job, width), width)]
    return "\n".join(lines)


def nodes_table(nodes: Iterable[NodeListing], to_time: Callable[[float], datetime], width: int | None) -> str:
    """A row for each node, below it why it is lost or in quarantine. ``to_time`` makes the reader's time of day."""
    nodes = list(nodes)
    heading, *rows = aligned([("host", "job", "rank", "role"), *map(_node_cells, nodes)], width, flexible=(0, 1))
    lines = [heading]
    for node, row in zip(nodes, rows, strict=True):
        lines.append(row)
        if node.lost is not None:
            since = f"since {to_time(node.lost.lost_unix_s):%Y-%m-%d %H:%M:%S}" if node.lost.lost_unix_s else ""
            why = lost_text(node.host, node.lost.reason, since)
            lines += wrapped(f"{why} {forget_text([shown_name(node.host)])}", width)
        if (kept_out := node.quarantine) is not None:
            until = "it is lifted" if kept_out.until is None else f"{to_time(kept_out.until):%Y-%m-%d %H:%M}"
            lines += wrapped(f"until {until}, by {one_line(kept_out.by)}: {one_line(kept_out.reason)}", width)
    return "\n".join(lines)


def lost_text(host: str, why: str, since: str = "") -> str:
    """Why a node is lost, and since when in the reader's time, as a sentence; "": nobody has seen that."""
    told = one_line(why).rstrip(".") or f"{shown_name(host)} is lost: nobody was there to see why"
    return f"{told}, {since}." if since else f"{told}."


def forget_text(hosts: Sequence[str]) -> str:
    """What ends that they are missed."""
    return f"If {'it is' if len(hosts) == 1 else 'they are'} not to return: unicron nodes forget {' '.join(hosts)}"


def _merged(nodes: Iterable[NodeListing], doing: Mapping[str, AgentActivity]) -> list[NodeListing]:
    """The nodes, each agent together with what runs its job on its host."""
    found = {node.node_id: node for node in nodes}
    others: dict[str, list[NodeListing]] = {}  # those that are no agents, by host
    for node in found.values():
        if node.node_id not in doing:
            others.setdefault(node.host, []).append(node)
    for state in doing.values():
        own, beside = found[state.node_id], others.get(state.host, [])
        child = next((node for node in beside if _runs_for(node, state)), None)
        if child is not None:
            beside.remove(child)
            del found[child.node_id]
            is_coordinator = own.is_coordinator or child.is_coordinator
            own = replace(own, rank=child.rank, state=child.state, is_coordinator=is_coordinator)
        elif own.state in ("", "spare"):
            own = replace(own, state="" if state.job else "spare")
        found[state.node_id] = replace(own, agent=state, job=state.job or own.job, label=own.label or state.label)
    return list(found.values())


def _runs_for(node: NodeListing, state: AgentActivity) -> bool:
    return bool(state.job) and state.job in (node.job, _job_of_run(node.job))


def _job_of_run(run_id: str) -> str:
    return start_of_run(run_id)[0]


def _jobs(snapshot: Snapshot, odd: list[str]) -> list[JobListing]:
    by_name: dict[str, list[Entry]] = {}
    for entry in snapshot.entries:
        by_name.setdefault(entry.key.removeprefix(JOBS).partition("/")[0], []).append(entry)
    found = []
    for name, entries in by_name.items():
        run_id = unquote(name)
        prefix = JobKeys(run_id).prefix
        known = tuple(entry for entry in entries if entry.key.startswith(prefix))
        odd += [f"{entry.key} is no key of a job" for entry in entries if entry not in known]
        status = job_status(run_id, Snapshot(prefix=prefix, revision=snapshot.revision, entries=known), odd)
        found += [] if status is None else [status]
    return found


def _parsed(entries: Iterable[Entry], parse: Callable[[Entry], Any], odd: list[str]) -> list[Any]:
    found = []
    for entry in entries:
        try:
            found.append(parse(entry))
        except ValueError as error:
            odd.append(str(error))
    return found


def _job_cells(job: JobListing) -> tuple[str, ...]:
    number = "-" if job.view.round is None else str(job.view.round.number)
    if job.planned is not None:
        return shown_name(job.run_id), job.state, number, _planned_nodes(job.planned), f"{job.planned.weight:g}"
    nodes = str(len(job.view.training))
    if job.spec is not None:
        nodes += f" of {job.spec.target_nodes} ({job.spec.min_nodes}:{job.spec.max_nodes})"
    return shown_name(job.run_id), job.state, number, nodes, "-"


def _planned_nodes(job: PlannedJobListing) -> str:
    most = "all" if job.max_nodes is None else job.max_nodes
    wanted = "" if job.planned is None or job.phase in ("finished", "cancelled") else f" of {job.planned}"
    notes = ["paused"] * job.paused + [f"pinned to {job.pinned_nodes}"] * (job.pinned_nodes is not None)
    return f"{job.working}{wanted} ({', '.join([f'{job.min_nodes}:{most}', *notes])})"


def _node_cells(node: NodeListing) -> tuple[str, ...]:
    words = {
        "waiting": "waits",
        "spare": "spare",
        "lost": "lost",
        "joining": "joins",
        "leaving": "leaves",
        "working": "works",
    }
    rank = str(node.rank) if node.rank is not None else words.get(node.state, "-")
    if node.agent is not None and (node.rank is None or node.agent.state == "leaving"):
        rank = words.get(node.agent.state, node.agent.state)
    roles = [f"towards {one_line(node.agent.towards)}"] if node.agent is not None and node.agent.towards else []
    roles += ["coordinator"] * node.is_coordinator + ["in quarantine"] * (node.quarantine is not None)
    return shown_name(node.host), shown_name(node.job), rank, ", ".join(roles)


def _hosts_of(job: JobListing, width: int | None) -> str:
    if job.planned is not None and not job.view.members:
        return listed(job.planned.hosts, width) if job.planned.hosts else ""
    waiting = [member.host for member in job.view.waiting]
    parts = [listed(job.training_hosts, width)] if job.training_hosts else []
    if waiting:
        parts.append(f"{listed(waiting, width)} wait{'s' if len(waiting) == 1 else ''}")
    return "; ".join(parts)
