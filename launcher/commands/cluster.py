"""``unicron jobs``, ``nodes``, ``drain``, ``undrain`` and ``cancel``: a cluster that meets over etcd. No torch here.

What is planned is read by modules that calculate, and those are imported once a command needs them.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unicron_elastic.base.quarantine import Quarantined, check_node, sentence
from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.common.host_ranges import host_ranges
from unicron_elastic.launcher.config.answers import (
    BAD_USAGE,
    NOTHING_FOUND,
    duration_s,
    fail,
    local_time,
    operator,
    say,
    show,
)
from unicron_elastic.launcher.config.cluster_options import ClusterOptions, cluster_options, spelled
from unicron_elastic.launcher.view.cluster.members import (
    AgentActivity,
    ClusterView,
    JobListing,
    NodeListing,
    cluster_view,
    job_status,
    jobs_table,
    nodes_table,
    with_planned,
)
from unicron_elastic.rendezvous.records.cluster import (
    CANCELLED_FOR_S,
    STOPS_FOR_S,
    add_quarantined,
    node_key,
    parse_roster,
    quarantine_key,
    quarantine_text,
    roster_key,
)
from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.rendezvous.records.plan_keys import PlannedJobKeys
from unicron_elastic.rendezvous.store.interface import (
    Entry,
    LeaseGoneError,
    Put,
    Snapshot,
    Store,
    StoreError,
    Write,
    check_key,
)
from unicron_elastic.rendezvous.store.open import store_opener
from unicron_elastic.rendezvous.store.options import address_from_options
from unicron_elastic.rendezvous.store.records import whole_number

if TYPE_CHECKING:
    from unicron_elastic.launcher.view.cluster.plan import PlanReading


TIMEOUT_S = 4.0  # for all that a command asks of etcd
_REASON_CHARACTERS = 1000

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Nodes = Annotated[list[str], typer.Argument(metavar="NODE...", help="Their names, as unicron nodes shows them.")]


class OpenCluster:
    """An open store, and the time that is left to ask it."""

    def __init__(self, open_store: Callable[[], Store], where: str) -> None:
        self.store = open_store()
        self.where = where
        self._open_store = open_store
        self._ends_at = time.monotonic() + TIMEOUT_S
        self._told = set[str]()

    def left_s(self) -> float:
        """Seconds; never nothing, so that a call that is late says itself what is wrong."""
        return max(0.05, self._ends_at - time.monotonic())

    def reopen(self) -> None:
        """Another object for the store: one whose etcd was replaced by another is of no use any more."""
        with suppress(StoreError):
            self.store.close()
        self.store = self._open_store()

    def look(self) -> Snapshot:
        """Read all keys, as they are at one revision. Raises StoreError."""
        return self.store.read_prefix("", timeout_s=self.left_s())

    def view(self, seen: Snapshot) -> ClusterView:
        """Return what these keys tell of jobs and nodes; what cannot be read goes to stderr."""
        view = cluster_view(seen)
        self.tell_odd(view.odd)
        return view

    def plan(self, seen: Snapshot) -> PlanReading:
        """Return what these keys tell of planning; what cannot be read goes to stderr."""
        from unicron_elastic.launcher.view.cluster.plan import plan_reading

        reading = plan_reading(seen, time.time())
        self.tell_odd(reading.odd)
        return reading

    def tell_odd(self, odd: Iterable[str]) -> None:
        """Says once what could not be read."""
        for problem in odd:
            if problem not in self._told:
                self._told.add(problem)
                say(f"Skipped: {one_line(problem, 300)}.")


jobs_app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)


@jobs_app.callback()
@cluster_options
def jobs(
    context: typer.Context,
    *,
    at: ClusterOptions,
    as_json: AsJson = False,
) -> None:
    """List the jobs of the cluster, or change what one asks for.

    With state, round, how many nodes train of those that are wanted (MIN:MAX), and hosts in the order of their ranks;
    of a job to which the cluster's plan gives nodes, with how many work of those that it is to have, and its weight.
    """
    if context.invoked_subcommand is not None:
        context.obj = at
        return
    with open_cluster(at) as cluster:
        found = _listed_jobs(cluster)
        if as_json:
            print_json([job.to_json() for job in found])
        elif found:
            show(jobs_table(found, width()))
        if not found:
            fail(NOTHING_FOUND, f"No job is in the cluster at {cluster.where}.")


nodes_app = typer.Typer(rich_markup_mode=None, invoke_without_command=True)


@nodes_app.callback()
@cluster_options
def nodes(
    context: typer.Context,
    *,
    at: ClusterOptions,
    as_json: AsJson = False,
) -> None:
    """List the nodes of the cluster, or forget one that will not return.

    With job, rank, which of them is the coordinator, which are in quarantine, and which are lost, since when and why;
    of an agent for which the cluster plans, what it does.
    """
    if context.invoked_subcommand is not None:
        context.obj = at
        return
    with open_cluster(at) as cluster:
        found = _listed_nodes(cluster, time.time())
        if as_json:
            print_json([node.to_json() for node in found])
        elif found:
            show(nodes_table(found, local_time, width()))
        if not found:
            fail(NOTHING_FOUND, f"No node is in the cluster at {cluster.where}.")


@nodes_app.command("forget")
@cluster_options
def forget(
    context: typer.Context,
    node: _Nodes,
    *,
    at: ClusterOptions,
    as_json: AsJson = False,
) -> None:
    """Forget nodes that are lost and will not return, so that the cluster misses them no longer.

    One that returns all the same belongs to the cluster again.
    """
    names = _checked_nodes(node)
    with open_cluster(at.over(context.obj)) as cluster:
        why_not = {each: _forget(cluster, each) for each in names}
    if as_json:
        print_json([{"node": each, "was_forgotten": not why} for each, why in why_not.items()])
    else:
        for each, why in why_not.items():
            if not why:
                show(f"node {each} is forgotten.")
    if refusals := [why for why in why_not.values() if why]:
        fail(NOTHING_FOUND, " ".join(refusals))


@cluster_options
def drain(
    node: _Nodes,
    *,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for whoever reads the list.")],
    duration: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="30s, 15m, 6h or 2d; else until it is lifted.")
    ] = None,
    absent: Annotated[
        bool,
        typer.Option("--absent", help="Also nodes that the cluster does not know: they are kept out if they come."),
    ] = False,
    at: ClusterOptions,
    as_json: AsJson = False,
) -> None:
    """Take nodes out of all jobs of the cluster.

    They stay in the cluster's quarantine until undrain lifts it, or its time is over. A node that is there already gets
    the new reason, and the later end of the two.
    """
    names = _checked_nodes(node)
    text = _reason(reason)
    now = time.time()
    until = None if duration is None else now + duration_s(duration)
    with open_cluster(at) as cluster:
        known: dict[str, list[NodeListing]] = {}
        for each in _listed_nodes(cluster, now):
            known.setdefault(each.host, []).append(each)
        entries = [
            _keep_out(cluster, Quarantined(node=name, reason=text, since=now, until=until, by=operator()))
            for name in names
            if absent or name in known
        ]
    if as_json:
        found = [entry.to_json() for entry in entries]
        print_json(found if len(names) != 1 else found[0] if found else None)
    for entry in entries:
        there = known.get(entry.node, [])
        if not as_json:
            show(drained_text(entry, there, now))
        if not any(each.node_id for each in there):
            say(f"No agent of node {entry.node} is in the cluster now; the node is kept out when it comes.")
    if unknown := [name for name in names if not absent and name not in known]:
        fail(NOTHING_FOUND, unknown_text(unknown, known, cluster.where))


def drained_text(entry: Quarantined, there: Iterable[NodeListing], now: float) -> str:
    """Say since when and why a node is kept out, and of what it is asked to leave what is known."""
    said = sentence(entry, now, local_time)
    runs = dict.fromkeys(one_line(each.job) for each in there if each.job and each.state != "waiting")
    waits = dict.fromkeys(one_line(each.job) for each in there if each.job and each.state == "waiting")
    does = [f"runs {', '.join(runs)}"] * bool(runs) + [f"waits for {', '.join(waits)}"] * bool(waits)
    if not does:
        return said
    return f"{said[:-1]}. It {' and '.join(does)}, and is asked to leave as soon as its job can do without it."


def unknown_text(unknown: Sequence[str], known: Collection[str], where: str) -> str:
    """Say that the cluster has no such nodes, and which it has."""
    who = f"No node {unknown[0]} is" if len(unknown) == 1 else f"Nodes {', '.join(unknown)} are not"
    there = f"its nodes are {host_ranges(known)}" if known else "it has no nodes"
    return f"{who} in the cluster at {where}; {there}. What has not come yet is kept out with --absent."


@cluster_options
def undrain(
    node: _Nodes,
    *,
    at: ClusterOptions,
    as_json: AsJson = False,
) -> None:
    """Let nodes into the cluster's jobs again."""
    names = _checked_nodes(node)
    with open_cluster(at) as cluster:
        was_there = {name: _let_in(cluster, name) for name in names}
    if as_json:
        found = [{"node": name, "was_in_quarantine": was} for name, was in was_there.items()]
        print_json(found if len(names) != 1 else found[0])
    else:
        for name in (name for name, was in was_there.items() if was):
            show(f"node {name} is no longer in quarantine.")
    if absent := [name for name, was in was_there.items() if not was]:
        who = f"Node {absent[0]} is" if len(absent) == 1 else f"Nodes {', '.join(absent)} are"
        fail(NOTHING_FOUND, f"{who} not in the quarantine of the cluster at {cluster.where}.")


@cluster_options
def cancel(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Its id, as unicron jobs shows it.")],
    *,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Why, for whoever reads the job's log.")] = None,
    at: ClusterOptions,
    as_json: AsJson = False,
) -> None:
    """End a job on all its nodes.

    For ten minutes at least no node can begin one of the same id by hand. One that is planned may be submitted again.
    """
    check_job(job)
    why = f"cancelled by {operator()}" if reason is None else f"cancelled by {operator()}: {_reason(reason)}"
    with open_cluster(at) as cluster:
        count = _cancel(cluster, job, why)
    if as_json:
        print_json({"job": job, "reason": why, "nodes": count})
    else:
        told = "1 node stops" if count == 1 else f"{count} nodes stop"
        show(f"job {one_line(job)} is {why.rstrip('.')}; {told}.")


@contextmanager
def open_cluster(at: ClusterOptions) -> Iterator[OpenCluster]:
    """The cluster's store; whatever is wrong with it ends the command with one sentence."""
    try:
        address = address_from_options(at.endpoint, at.others, spell=spelled)
    except ValueError as error:
        fail(BAD_USAGE, f"{error}.")
    try:
        cluster = OpenCluster(store_opener(address, timeout_s=TIMEOUT_S), str(address))
        try:
            yield cluster
        finally:
            cluster.store.close()
    except (StoreError, LeaseGoneError) as error:
        fail(BAD_USAGE, f"{error}.")


def _keep_out(cluster: OpenCluster, entry: Quarantined) -> Quarantined:
    """Writes the entry, together with the one that is there. Returns what was written. Raises StoreError."""
    key, merged = quarantine_key(entry.node), entry

    def merge(found: Entry | None) -> Write:
        nonlocal merged
        merged = add_quarantined(found, entry)
        return Write(puts=(Put(key, quarantine_text(merged)),))

    cluster.store.update(key, merge, what=f"the quarantine of node {entry.node}", timeout_s=cluster.left_s())
    return merged


def _let_in(cluster: OpenCluster, node: str) -> bool:
    """Deletes the node's entry; whether there was one. Raises StoreError."""
    key = quarantine_key(node)
    return cluster.store.update(
        key,
        lambda found: None if found is None else Write(deletes=(key,)),
        what=f"the quarantine of node {node}",
        timeout_s=cluster.left_s(),
    )


def _forget(cluster: OpenCluster, node: str) -> str:
    """Takes a lost node from the roster; why not, as a sentence, or "". Raises StoreError."""
    key, why_not = roster_key(node), ""

    def forget(found: Entry | None) -> Write | None:
        nonlocal why_not
        if found is None:
            why_not = f"The cluster at {cluster.where} misses no node {node}."
            return None
        try:
            agent_key = node_key(parse_roster(found).node_id)
        except ValueError:  # nobody can read whom it would be about
            return Write(deletes=(key,))
        if cluster.store.read(agent_key, timeout_s=cluster.left_s()).entry is not None:
            why_not = f"Node {node} is there; stop its agent, and it is missed no more."
            return None
        return Write(deletes=(key,), guards={agent_key: 0})

    cluster.store.update(key, forget, what=f"the record of node {node}", timeout_s=cluster.left_s())
    return why_not


def _listed_jobs(cluster: OpenCluster) -> tuple[JobListing, ...]:
    from unicron_elastic.launcher.view.cluster.plan import planned_jobs

    seen = cluster.look()
    return with_planned(cluster.view(seen).jobs, planned_jobs(cluster.plan(seen)))


def _listed_nodes(cluster: OpenCluster, now: float) -> tuple[NodeListing, ...]:
    seen = cluster.look()
    return cluster.view(seen).nodes(now, _agent_states(cluster, seen))


def _agent_states(cluster: OpenCluster, seen: Snapshot) -> tuple[AgentActivity, ...]:
    from unicron_elastic.launcher.view.cluster.plan import agent_states

    return agent_states(cluster.plan(seen).snapshot)


def _cancel(cluster: OpenCluster, job: str, why: str) -> int:
    """Ends the job as a planned one, and as one whose nodes meet; how many nodes it has. Raises StoreError."""
    keys, odd = JobKeys(job), list[str]()
    status = job_status(job, cluster.store.read_prefix(keys.prefix, timeout_s=cluster.left_s()), odd)
    cluster.tell_odd(odd)
    planned_nodes = _cancel_planned(cluster, job, why)
    if status is None and planned_nodes is None:
        fail(NOTHING_FOUND, f"No job {job!a} is in the cluster at {cluster.where}.")
    if status is None or (planned_nodes is not None and status.is_over):
        return planned_nodes or 0
    is_told = _cancel_meeting(cluster, status, why, is_planned=planned_nodes is not None)
    return max(len(status.view.members) if is_told else 0, planned_nodes or 0)


def _cancel_meeting(cluster: OpenCluster, status: JobListing, why: str, *, is_planned: bool) -> bool:
    """Tells the job's agents, unless it is over. Raises StoreError, LeaseGoneError."""
    job, keys = status.run_id, JobKeys(status.run_id)
    if status.is_over:
        fail(NOTHING_FOUND, f"The job {job!a} is over: {one_line(status.why).rstrip('.')}.")
    lease_id = cluster.store.grant(_cancelled_for_s(cluster, keys), timeout_s=cluster.left_s()).lease_id
    put = Put(keys.cancelled, why.encode(errors="replace"), lease_id)
    if cluster.store.commit({keys.closed: 0}, [put], timeout_s=cluster.left_s()):
        return True
    cluster.store.revoke(lease_id, timeout_s=cluster.left_s())
    if not is_planned:
        fail(NOTHING_FOUND, f"The job {job!a} is over: it ended at this moment.")
    return False


def _cancelled_for_s(cluster: OpenCluster, keys: JobKeys) -> float:
    """Return how long that word stays: longer than the job's own keys, which its last agent may not take along."""
    entry = cluster.store.read(keys.lease, timeout_s=cluster.left_s()).entry
    lease_id = None if entry is None else whole_number(entry.value)
    kept_s = None if lease_id is None else cluster.store.keep_alive(lease_id, timeout_s=cluster.left_s())
    return max(CANCELLED_FOR_S, (kept_s or 0.0) + STOPS_FOR_S)


def _cancel_planned(cluster: OpenCluster, job: str, why: str) -> int | None:
    """Ends the job as a planned one; how many nodes it has, None if it is none. Raises StoreError."""
    keys = PlannedJobKeys(job)
    if cluster.store.read(keys.spec, timeout_s=cluster.left_s()).entry is None:
        return None
    from unicron_elastic.launcher.node.planned_records import ENDED_FOR_S, puts_of_end
    from unicron_elastic.planning.coordinate.snapshot import JobPhase
    from unicron_elastic.rendezvous.records.plan import PhaseRecord, parse_phase

    def cancel(_: Entry | None) -> Write:
        snapshot = cluster.store.read_prefix(keys.prefix, timeout_s=cluster.left_s())
        entry = snapshot.get(keys.phase)
        try:
            record = None if entry is None else parse_phase(entry)
        except ValueError:  # the new one takes its place
            record = None
        if record is not None and record.phase in (JobPhase.FINISHED, JobPhase.CANCELLED):
            fail(NOTHING_FOUND, f"The job {job!a} is over: {one_line(record.reason).rstrip('.')}.")
        cancelled = PhaseRecord(phase=JobPhase.CANCELLED, reason=why)
        if record is not None:
            cancelled = replace(cancelled, start=record.start, submission=record.submission)
        lease = cluster.store.grant(ENDED_FOR_S, timeout_s=cluster.left_s())
        puts = puts_of_end(snapshot, keys, cancelled, lease.lease_id)
        return Write(puts=tuple(puts), guards={keys.phase: 0 if entry is None else entry.revision})

    cluster.store.update(keys.phase, cancel, what=f"the phase of job {job}", timeout_s=cluster.left_s())
    return sum(state.job == job for state in _agent_states(cluster, cluster.look()))


def _checked_nodes(nodes: Iterable[str]) -> list[str]:
    """Return each name once; ends the command for a text that can be no node's name."""
    names = list(dict.fromkeys(nodes))
    for node in names:
        try:
            check_node(node)
            check_key(quarantine_key(node))
        except ValueError:
            fail(BAD_USAGE, f"{node[:80]!a} names no node; give a name without blanks, such as gpu-7.")
    return names


def check_job(job: str) -> None:
    """Ends the command for a text that can be no job's name."""
    try:
        check_key(JobKeys(job).cancelled)
    except ValueError:
        fail(BAD_USAGE, f"{job[:80]!a} names no job; give an id such as unicron jobs shows.")


def _reason(text: str) -> str:
    if not one_line(text):
        fail(BAD_USAGE, "--reason is empty; say why, for whoever reads it.")
    return one_line(text, _REASON_CHARACTERS)


def width() -> int | None:
    """Return the terminal's width in columns; None: the answer goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_json(data: Any) -> None:
    """The answer for programs."""
    typer.echo(json.dumps(data, indent=2))
