"""``unicron plan`` and ``unicron jobs set``: who gets how many nodes, what would be if, and what a job asks for.

Never imports torch; what calculates is imported by the commands, so that ``unicron --help`` stays fast.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.commands.cluster import (
    AsJson,
    OpenCluster,
    check_job,
    open_cluster,
    print_json,
    width,
)
from unicron_elastic.launcher.config.answers import (
    BAD_USAGE,
    NOTHING_FOUND,
    fail,
    local_time,
    say,
    show,
)
from unicron_elastic.launcher.config.cluster_options import ClusterOptions, cluster_options
from unicron_elastic.rendezvous.records.plan_keys import PlannedJobKeys
from unicron_elastic.rendezvous.store.interface import Entry, Put, Write

if TYPE_CHECKING:
    from unicron_elastic.launcher.view.cluster.plan import PlanView
    from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot
    from unicron_elastic.planning.model.jobs import JobSpec


_ERROR_CHARACTERS = 1000


@cluster_options
def plan(
    *,
    suppose: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="TEXT",
            help="Show the plan that would be: 'lose NODE', 'join HOST', 'join 2 nodes', 'drain NODE', "
            "'submit FILE.json', 'finish JOB', 'pause JOB', 'weight JOB 2', 'pin JOB 3'. "
            "Several with commas, or with the option again. Nothing is written.",
        ),
    ] = None,
    at: ClusterOptions,
    as_json: AsJson = False,
) -> None:
    """Show the plan between jobs: which gets how many nodes and why, what it earns and costs, and who still moves.

    F is the weighted FLOP/s of a job, and WAF the sum of all.
    """
    from unicron_elastic.launcher.view.cluster.plan import estimates

    with open_cluster(at) as cluster:
        reading = cluster.plan(cluster.look())
        snapshot = reading.snapshot
        if not snapshot.nodes and not snapshot.jobs and not suppose:
            if as_json:
                print_json(None)
            fail(NOTHING_FOUND, f"No node and no job that is planned for is in the cluster at {cluster.where}.")
    found = replace(_view(snapshot, suppose or [], time.time()), estimates=estimates(reading))
    if as_json:
        print_json(found.to_json())
        return
    from unicron_elastic.launcher.view.cluster.plan_text import plan_text

    show(plan_text(found, local_time, width()))


@cluster_options
def set_job(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Its name, as unicron jobs shows it.")],
    *,
    weight: Annotated[float | None, typer.Option(metavar="W", help="What a FLOP of it is worth; 1 is usual.")] = None,
    min_nodes: Annotated[int | None, typer.Option(metavar="N", help="With fewer nodes it waits.")] = None,
    max_nodes: Annotated[str | None, typer.Option(metavar="N|none", help="It gets no more nodes.")] = None,
    pin: Annotated[int | None, typer.Option(metavar="N", help="It gets exactly so many nodes, or none.")] = None,
    unpin: Annotated[bool, typer.Option("--unpin", help="It gets as many nodes as are best for all.")] = False,
    paused: Annotated[
        bool | None, typer.Option("--pause/--resume", help="It waits with no nodes, or does not.")
    ] = None,
    at: ClusterOptions,
    as_json: AsJson = False,
) -> None:
    """Change what a planned job asks for, and say what the plan would be from it."""
    check_job(job)
    changes = _changes(weight, min_nodes, max_nodes, pin, unpin=unpin, paused=paused)
    with open_cluster(at.over(context.obj)) as cluster:
        snapshot = cluster.plan(cluster.look()).snapshot
        found = _set(cluster, snapshot, job, changes)
    then = _then(snapshot, found.new, time.time())
    if as_json:
        print_json({"job": job, "changes": found.told(changes), **then})
        return
    show(f"job {one_line(job)}: {_changed_text(found.told(changes))}.")
    for warning in then["warnings"]:
        say(warning)
    show(f"The plan would be: {one_line(then['reason'])}")


@dataclass(frozen=True, slots=True)
class _Change:
    """A job's spec before and after."""

    old: JobSpec
    new: JobSpec

    def told(self, names: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Before and after, of the fields that have changed."""
        both = {name: (getattr(self.old, name), getattr(self.new, name)) for name in names}
        return {name: (old, new) for name, (old, new) in both.items() if old != new}


def _view(snapshot: ClusterSnapshot, suppose: Sequence[str], now: float) -> PlanView:
    """What is asked for; what is supposed wrongly ends the command."""
    from unicron_elastic.launcher.view.cluster.plan import proposal_view, published_view
    from unicron_elastic.launcher.view.cluster.what_if import what_if

    if not suppose and snapshot.published is not None:
        return published_view(snapshot, snapshot.published, now)
    after = snapshot
    for text in suppose:
        try:
            after = what_if(after, text)
        except ValueError as error:
            fail(BAD_USAGE, f"--what-if: {_sentence(error)}")
    try:
        return proposal_view(snapshot, after, now, suppose)
    except ValueError as error:
        fail(BAD_USAGE, f"no plan can be made: {_sentence(error)}")


def _changes(
    weight: float | None,
    min_nodes: int | None,
    max_nodes: str | None,
    pin: int | None,
    *,
    unpin: bool,
    paused: bool | None,
) -> dict[str, Any]:
    """Fields of the spec and their new values; what contradicts itself ends the command."""
    if unpin and pin is not None:
        fail(BAD_USAGE, "Give --pin or --unpin, not both.")
    if max_nodes is not None and max_nodes != "none" and not (max_nodes.isdecimal() and len(max_nodes) < 10):
        fail(BAD_USAGE, f"--max-nodes: {max_nodes[:80]!a} is no number of nodes; give one such as 8, or none.")
    told = {"weight": weight, "min_nodes": min_nodes, "pinned_nodes": pin, "paused": paused}
    found: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
    if max_nodes is not None:
        found["max_nodes"] = None if max_nodes == "none" else int(max_nodes)
    if unpin:
        found["pinned_nodes"] = None
    if not found:
        fail(BAD_USAGE, "No change was given: use --weight, --min-nodes, --max-nodes, --pin or --pause.")
    return found


def _set(cluster: OpenCluster, snapshot: ClusterSnapshot, job: str, changes: Mapping[str, Any]) -> _Change:
    """Writes the job's spec with the changes. Raises StoreError, LeaseGoneError."""
    from unicron_elastic.rendezvous.records.plan import parse_spec, spec_text

    known = snapshot.job(job)
    if known is not None and not known.is_alive:
        fail(NOTHING_FOUND, f"The job {job!a} is {known.phase.value}; nothing of it can be changed.")
    key = PlannedJobKeys(job).spec
    found: _Change

    def changed(entry: Entry | None) -> Write | None:
        nonlocal found
        if entry is None:
            fail(NOTHING_FOUND, f"No job {job!a} is planned in the cluster at {cluster.where}.")
        try:
            old = parse_spec(entry)
            found = _Change(old, replace(old, **changes))
            put = Put(key, spec_text(found.new), entry.lease_id)
        except ValueError as error:
            fail(BAD_USAGE, _sentence(error))
        return None if found.old == found.new else Write(puts=(put,))

    cluster.store.update(key, changed, what=f"the job {job}", timeout_s=cluster.left_s())
    return found


def _then(snapshot: ClusterSnapshot, spec: JobSpec, now: float) -> dict[str, Any]:
    """What the plan would be with the spec, as plain data."""
    from unicron_elastic.launcher.view.cluster.plan import proposal_view
    from unicron_elastic.launcher.view.cluster.what_if import with_spec

    try:
        view = proposal_view(snapshot, with_spec(snapshot, spec), now)
    except ValueError as error:
        return {"reason": f"none can be made: {_sentence(error)}", "nodes": {}, "warnings": []}
    least = spec.least_nodes if spec.pinned_nodes is None else spec.pinned_nodes
    warning = f"{one_line(spec.name)} waits until there are {least} nodes, and there {_are(view.nodes)} now."
    return {
        "reason": view.reason,
        "nodes": {row.job: row.planned for row in view.jobs},
        "warnings": [warning] * (least > view.nodes and not spec.paused),
    }


def _changed_text(changes: Mapping[str, tuple[Any, Any]]) -> str:
    if not changes:
        return "nothing changes, as it is so already"
    names = {"min_nodes": "minimum", "max_nodes": "maximum", "pinned_nodes": "pin"}
    parts = [
        ("paused" if new else "resumed")
        if name == "paused"
        else f"{names.get(name, name)} {_value(old)} -> {_value(new)}"
        for name, (old, new) in changes.items()
    ]
    return ", ".join(parts)


def _value(value: Any) -> str:
    return "none" if value is None else f"{value:g}"


def _are(count: int) -> str:
    return "is none" if not count else f"{'is' if count == 1 else 'are'} {count}"


def _sentence(error: Exception) -> str:
    text = one_line(str(error), _ERROR_CHARACTERS)
    return text if text.endswith((".", "?")) else f"{text}."
