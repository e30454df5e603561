"""The cluster as its store shows it, and as text for people: pure, but for the reading of the store.

Everything reads the same without colour, in 60 columns and in a pipe.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from unicron_elastic.faults.text import one_line, shorten
from unicron_elastic.recovery.quarantine import Quarantined, active
from unicron_elastic.rendezvous.cluster_records import (
    JOBS,
    LEADER,
    NODES,
    QUARANTINE,
    JobSpec,
    LeaderRecord,
    NodeRecord,
    parse_leader,
    parse_node,
    parse_quarantined,
    parse_spec,
)
from unicron_elastic.rendezvous.job_records import JobKeys, JobMirror
from unicron_elastic.rendezvous.membership import JobView, Settings, next_round
from unicron_elastic.rendezvous.store import Entry, Snapshot, Store

__all__ = ["ClusterView", "JobStatus", "NodeStatus", "job_status", "jobs_table", "nodes_table", "read_cluster"]

_GAP = "  "
_INDENT = "     "
_NARROWEST = 40  # columns; below it nothing is wrapped further
_NARROWEST_NAME = 8
_HOSTS_MOST = 16  # that are named on a terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job. ``cancelled`` is the operator's reason; "": it is not."""

    run_id: str
    view: JobView
    spec: JobSpec | None = None
    cancelled: str = ""

    @property
    def state(self) -> str:
        """In one word."""
        if self.view.closed:
            return "over"
        if self.cancelled:
            return "cancelled"
        return "training" if self.view.training else "waiting"

    @property
    def is_over(self) -> bool:
        """Whether nobody is in it any more, and nobody will be."""
        return bool(self.view.closed) or (bool(self.cancelled) and not self.view.members)

    @property
    def why(self) -> str:
        """Why it is in this state; "" for a job that trains."""
        if self.view.closed or self.cancelled:
            return self.cancelled or self.view.closed
        if self.view.training:
            return ""
        if not self.view.members:
            return "No node of it is there."
        if self.spec is None:
            return ""
        settings = Settings(min_nodes=self.spec.min_nodes, max_nodes=self.spec.max_nodes)
        return next_round(self.view, settings, 0.0).reason

    def rank_of(self, node_id: str) -> int | None:
        """Of a node that trains."""
        if self.view.round is None or not any(each.node_id == node_id for each in self.view.training):
            return None
        return self.view.round.rank_of(node_id)

    @property
    def training_hosts(self) -> list[str]:
        """In the order of their ranks."""
        there = {member.node_id for member in self.view.training}
        places = () if self.view.round is None else self.view.round.places
        return [place.host for place in places if place.node_id in there]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        spec = self.spec
        return {
            "job": self.run_id,
            "state": self.state,
            "why": self.why,
            "round": None if self.view.round is None else self.view.round.number,
            "training": len(self.view.training),
            "target_nodes": None if spec is None else spec.target_nodes,
            "min_nodes": None if spec is None else spec.min_nodes,
            "max_nodes": None if spec is None else spec.max_nodes,
            "nproc_per_node": None if spec is None else spec.nproc_per_node,
            "hosts": self.training_hosts,
            "waiting_hosts": [member.host for member in self.view.waiting],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """An agent, or a host of which only the quarantine is known; it has no ``node_id``."""

    host: str
    node_id: str = ""
    job: str = ""
    rank: int | None = None
    state: str = ""  # training, waiting, spare; "": not known
    label: str = ""
    pid: int | None = None
    is_coordinator: bool = False
    quarantine: Quarantined | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """All that is known. ``odd`` says of each key that could not be read why."""

    agents: tuple[NodeRecord, ...]
    leader: LeaderRecord | None
    quarantine: tuple[Quarantined, ...]
    jobs: tuple[JobStatus, ...]
    odd: tuple[str, ...]

    def nodes(self, now: float) -> tuple[NodeStatus, ...]:
        """Agents, members of jobs that have no record of their own, and hosts in quarantine at ``now``, by host."""
        kept_out = {each.node: each for each in active(self.quarantine, now)}
        agents = {record.node_id: record for record in self.agents}
        hosts = {record.node_id: record.host for record in self.agents}
        jobs: dict[str, JobStatus] = {}
        for job in self.jobs:
            for member in job.view.members:
                hosts.setdefault(member.node_id, member.host)
                jobs[member.node_id] = job
        if self.leader is not None:
            hosts.setdefault(self.leader.node_id, self.leader.host)
        found = [
            self._node(node_id, host, agents.get(node_id), jobs.get(node_id), kept_out.get(host))
            for node_id, host in hosts.items()
        ]
        absent = kept_out.keys() - hosts.values()
        found += [NodeStatus(host=host, quarantine=kept_out[host]) for host in absent]
        return tuple(sorted(found, key=lambda node: (_natural(node.host), node.node_id)))

    def _node(
        self, node_id: str, host: str, agent: NodeRecord | None, job: JobStatus | None, quarantine: Quarantined | None
    ) -> NodeStatus:
        rank = None if job is None else job.rank_of(node_id)
        is_spare = agent is not None and agent.is_spare and job is None
        state = "spare" if is_spare else "" if job is None else "waiting" if rank is None else "training"
        job_of_agent = "" if agent is None or is_spare else agent.job
        return NodeStatus(
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


def read_cluster(store: Store, left_s: Callable[[], float]) -> ClusterView:
    """The cluster now; ``left_s`` says how many seconds there are to read it. Raises StoreError."""
    odd: list[str] = []
    leader = store.read(LEADER, timeout_s=left_s()).entry
    agents = _parsed(store.read_prefix(NODES, timeout_s=left_s()).entries, parse_node, odd)
    quarantine = _parsed(store.read_prefix(QUARANTINE, timeout_s=left_s()).entries, parse_quarantined, odd)
    jobs = _jobs(store.read_prefix(JOBS, timeout_s=left_s()), odd)
    leaders = _parsed([] if leader is None else [leader], parse_leader, odd)
    return ClusterView(
        agents=tuple(agents),
        leader=leaders[0] if leaders else None,
        quarantine=tuple(quarantine),
        jobs=tuple(sorted(jobs, key=lambda job: _natural(job.run_id))),
        odd=tuple(odd),
    )


def job_status(run_id: str, snapshot: Snapshot, odd: list[str]) -> JobStatus | None:
    """A job by its keys; None if they tell of none. What cannot be read is told in ``odd``."""
    keys = JobKeys(run_id)
    telling = {keys.round, keys.closed, keys.lease, keys.spec, keys.cancelled}  # others may outlive it
    if not any(entry.key in telling or entry.key.startswith(f"{keys.prefix}members/") for entry in snapshot.entries):
        return None
    mirror = JobMirror(keys, snapshot)
    odd += mirror.odd.values()
    spec, cancelled = mirror.get(keys.spec), mirror.get(keys.cancelled)
    specs = _parsed([] if spec is None else [spec], parse_spec, odd)
    reason = "" if cancelled is None else cancelled.value.decode(errors="replace") or "cancelled"
    return JobStatus(run_id=run_id, view=mirror.view(), spec=specs[0] if specs else None, cancelled=reason)


def jobs_table(jobs: Iterable[JobStatus], width: int | None) -> str:
    """A row for each job, below it why it is so and its hosts. ``width`` in columns; None: nothing is cut, for grep."""
    jobs = list(jobs)
    heading, *rows = _aligned([("job", "state", "round", "nodes"), *map(_job_cells, jobs)], width, flexible=(0,))
    lines = [heading]
    for job, row in zip(jobs, rows, strict=True):
        lines += [row, *_wrapped(one_line(job.why), width), *_wrapped(_hosts_of(job, width), width)]
    return "\n".join(lines)


def nodes_table(nodes: Iterable[NodeStatus], to_time: Callable[[float], datetime], width: int | None) -> str:
    """A row for each node, below it why it is in quarantine. ``to_time`` makes the reader's time of day."""
    nodes = list(nodes)
    heading, *rows = _aligned([("host", "job", "rank", "role"), *map(_node_cells, nodes)], width, flexible=(0, 1))
    lines = [heading]
    for node, row in zip(nodes, rows, strict=True):
        lines.append(row)
        if (kept_out := node.quarantine) is not None:
            until = "it is lifted" if kept_out.until is None else f"{to_time(kept_out.until):%Y-%m-%d %H:%M}"
            lines += _wrapped(f"until {until}, by {one_line(kept_out.by)}: {one_line(kept_out.reason)}", width)
    return "\n".join(lines)


def _jobs(snapshot: Snapshot, odd: list[str]) -> list[JobStatus]:
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


def _job_cells(job: JobStatus) -> tuple[str, ...]:
    number = "-" if job.view.round is None else str(job.view.round.number)
    nodes = str(len(job.view.training))
    if job.spec is not None:
        nodes += f" of {job.spec.target_nodes} ({job.spec.min_nodes}:{job.spec.max_nodes})"
    return _name(job.run_id), job.state, number, nodes


def _node_cells(node: NodeStatus) -> tuple[str, ...]:
    rank = str(node.rank) if node.rank is not None else {"waiting": "waits", "spare": "spare"}.get(node.state, "-")
    roles = ["coordinator"] * node.is_coordinator + ["in quarantine"] * (node.quarantine is not None)
    return _name(node.host), _name(node.job), rank, ", ".join(roles)


def _name(text: str) -> str:
    return one_line(text) or "-"


def _hosts_of(job: JobStatus, width: int | None) -> str:
    waiting = [member.host for member in job.view.waiting]
    parts = [_listed(job.training_hosts, width)] if job.training_hosts else []
    if waiting:
        parts.append(f"{_listed(waiting, width)} wait{'s' if len(waiting) == 1 else ''}")
    return "; ".join(parts)


def _listed(hosts: Sequence[str], width: int | None) -> str:
    counted = [f"{_name(host)} ({count})" if count > 1 else _name(host) for host, count in Counter(hosts).items()]
    shown = counted if width is None else counted[:_HOSTS_MOST]
    more = f" and {len(counted) - len(shown)} more" if len(shown) < len(counted) else ""
    return ", ".join(shown) + more


def _aligned(rows: Sequence[Sequence[str]], width: int | None, flexible: Sequence[int]) -> list[str]:
    """Rows in even columns, of which the ``flexible`` ones give way."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    while width is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        widest = max(flexible, key=lambda column: widths[column])
        if widths[widest] <= _NARROWEST_NAME:
            break
        widths[widest] -= 1
    lines = [
        _GAP.join(shorten(cell, limit).ljust(limit) for cell, limit in zip(row, widths, strict=True)) for row in rows
    ]
    return [(line if width is None else shorten(line, width)).rstrip() for line in lines]


def _wrapped(text: str, width: int | None) -> list[str]:
    if not text:
        return []
    if width is None:
        return [_INDENT + text]
    return textwrap.wrap(text, max(width, _NARROWEST), initial_indent=_INDENT, subsequent_indent=_INDENT)


def _natural(name: str) -> list[tuple[int, str]]:
    """So that gpu-10 comes after gpu-9."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() and part.isascii() else (-1, part) for part in parts]
