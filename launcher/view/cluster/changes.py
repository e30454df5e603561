"""What has changed between two looks at a cluster, as sentences for a log. Steps and rates always change: not those.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.common.host_ranges import host_ranges
from unicron_elastic.launcher.common.tables import shown_name
from unicron_elastic.launcher.view.cluster.overview import LEVELS, JobLine, NodeLine, Overview
from unicron_elastic.launcher.view.cluster.recorded_fault import seen_together


def changes(before: Overview, after: Overview) -> list[str]:
    """What came first first: faults, nodes, jobs, the plan, and what that means for the whole."""
    found = [*_incidents(before, after), *_nodes(before, after), *_jobs(before, after)]
    if before.coordinator != after.coordinator:
        who = after.coordinator
        found.append("Nobody coordinates." if who is None else f"{shown_name(who.host)} coordinates.")
    if after.plan is not None and (before.plan is None or before.plan.reason != after.plan.reason):
        found.append(f"Plan {after.plan.revision}: {one_line(after.plan.reason)}")
    return [*found, *_verdict(before, after)]


def _verdict(before: Overview, after: Overview) -> Iterator[str]:
    """New problems; the verdict itself, if it is better. That a number in a sentence is another one is no news."""
    known = {(each.level, each.kind, each.about) for each in before.verdict.problems}
    for problem in after.verdict.problems:
        if (problem.level, problem.kind, problem.about) not in known:
            yield f"{problem.level.upper()}: {one_line(problem.sentence)}"
    if LEVELS.index(after.verdict.level) < LEVELS.index(before.verdict.level):
        yield f"{after.verdict.level.upper()}: {one_line(after.verdict.reason)}"


def _incidents(before: Overview, after: Overview) -> Iterator[str]:
    known = {record: each for each in seen_together(before.incidents) for record in each.records}
    for seen in reversed(seen_together(after.incidents)):
        incident = seen.cause
        old = next((known[record] for record in seen.records if record in known), None)
        called = f"Incident {shown_name(incident.run_id)}:{incident.number}"
        if old is None:
            yield f"{called} on {shown_name(incident.host)}: {one_line(incident.reason)}"
        if seen.total_ms is not None and (old is None or old.total_ms is None):
            yield f"{called}: first step {seen.total_ms:,.0f} ms after the fault."


def _nodes(before: Overview, after: Overview) -> Iterator[str]:
    """The same change of several nodes is one sentence; that one is lost is the verdict's to say."""
    old, new = (
        {(node.host, node.node_id): node for node in each.nodes if node.state != "lost"} for each in (before, after)
    )
    found: dict[str, list[str]] = {}
    for key in [*old, *(key for key in new if key not in old)]:
        if what := _of_node(old.get(key), new.get(key)):
            found.setdefault(what, []).append(key[0])
    for what, hosts in found.items():
        yield f"{host_ranges(hosts)}: {what}."


def _of_node(old: NodeLine | None, new: NodeLine | None) -> str:
    if new is None:
        return "is gone"
    now = _doing(new)
    if old is None:
        return f"kept out: {one_line(new.reason)}".rstrip(".") if new.state == "absent" else f"came, {now}"
    if old.health != new.health:
        return f"{old.health} -> {new.health}{f': {one_line(new.reason)}' if new.reason else ''}".rstrip(".")
    if (old.state, old.job, old.towards) != (new.state, new.job, new.towards):
        return f"{_doing(old)} -> {now}"
    return ""


def _doing(node: NodeLine) -> str:
    towards = f", then {shown_name(node.towards)}" if node.towards else ""
    return f"{node.state or 'there'}{f' {one_line(node.job)}' if node.job else ''}{towards}"


def _jobs(before: Overview, after: Overview) -> Iterator[str]:
    old, new = ({job.job: job for job in each.jobs} for each in (before, after))
    for name in [*old, *(name for name in new if name not in old)]:
        if what := _of_job(old.get(name), new.get(name)):
            yield f"Job {shown_name(name)}: {what}."


def _of_job(old: JobLine | None, new: JobLine | None) -> str:
    if new is None:
        return "is gone"
    why = f": {one_line(new.why).rstrip('.')}" if new.why else ""
    if old is None:
        return f"came, {new.state}{why}"
    found = [f"{old.state} -> {new.state}{why}"] if old.state != new.state else []
    if (old.start, old.generation) != (new.start, new.generation) and new.generation is not None:
        found.append(f"generation {new.generation}" if old.start in (None, new.start) else "was started anew")
    if (old.nodes, old.wanted_nodes) != (new.nodes, new.wanted_nodes):
        found.append(f"{new.nodes}{'' if new.wanted_nodes is None else f' of {new.wanted_nodes}'} nodes")
    if (old.weight, old.min_nodes, old.max_nodes) != (new.weight, new.min_nodes, new.max_nodes):
        found.append("asks for something else")
    return ", ".join(found)
