"""What the benchmark of the coordinator prints: one Markdown table, a column for each size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from _report import short

GOAL_MS = 100.0


@dataclass
class Result:
    """One size. ``values``: by the name of a measure, one for each fault or only one."""

    agents: int
    jobs: int
    values: dict[str, list[float]] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    steps: dict[str, float] = field(default_factory=dict)
    parts: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        """One more of each measure."""
        for name, value in values.items():
            self.values.setdefault(name, []).append(value)


MEASURES = {
    "published_ms": "lost to plan published, ms",
    "ordered_ms": "lost to first order or stop written, ms",
    "acting_ms": "lost to first agent acting, ms",
    "all_acting_ms": "lost to the last of them acting, ms",
    "settled_ms": "lost to all as planned, ms",
    "back_ms": "node is back to all as planned, ms",
    "ordered_nodes": "nodes with an order, per loss",
    "given_nodes": "nodes that a job gave up for another one, per loss",
    "plans": "plans published, per loss",
    "plan_kib": "size of the plan, KiB",
    "coordinator_writes": "etcd revisions by the coordinator, per loss",
    "agent_writes": "etcd revisions by agents, per loss",
    "fault_cpu_ms": "coordinator's processor time, per loss, ms",
    "fault_etcd_cpu_ms": "etcd's processor time, per loss, ms",
    "join_s": "all agents join, one after the other, s",
    "join_cpu_s": "coordinator's processor time for that, s",
    "join_plans": "plans published meanwhile",
    "place_published_ms": "first job submitted to plan with all of them, ms",
    "place_s": "first job submitted to all as planned, s",
    "place_cpu_s": "coordinator's processor time for that, s",
    "place_etcd_cpu_s": "etcd's processor time for that, s",
    "place_revisions": "etcd revisions for that",
    "idle_cpu": "idle: coordinator, % of a core",
    "idle_etcd_cpu": "idle: etcd, % of a core",
    "idle_revisions": "idle: etcd revisions in 20 s",
    "rss_mib": "coordinator's RSS when idle, MiB",
    "uss_mib": "coordinator's USS when idle, MiB",
    "end_rss_mib": "coordinator's RSS after all losses, MiB",
    "etcd_rss_mib": "etcd's RSS after all losses, MiB",
    "db_mib": "etcd's database at the end, MiB",
    "db_used_mib": "of that in use, MiB",
}


def table(results: Sequence[Result]) -> str:
    """One line for each measure: median [p10 - p90] (n)."""
    rows = [["", *(f"{each.agents} agents, {each.jobs} jobs" for each in results)], ["---"] * (len(results) + 1)]
    for measure, words in MEASURES.items():
        if any(measure in each.values for each in results):
            rows.append([words, *(cell(each.values.get(measure, [])) for each in results)])
    rows.append(
        ["losses after which nodes moved", *(_moved(each, lambda fault: fault["ordered_nodes"]) for each in results)]
    )
    rows.append(
        ["... from one job to another", *(_moved(each, lambda fault: fault["given_nodes"]) for each in results)]
    )
    rows.append(
        [f"first agent acts within {GOAL_MS:.0f} ms", *(_goal(each.values.get("acting_ms", [])) for each in results)]
    )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def steps_table(results: Sequence[Result]) -> str:
    """One line for each part of a look, in ms."""
    heads = [f"{each.agents} agents, {each.jobs} jobs" for each in results]
    rows = [["a part of a look, ms of processor time", *heads], ["---"] * (len(results) + 1)]
    for words in dict.fromkeys(words for each in results for words in each.steps):
        rows.append([words, *(short(each.steps[words]) if words in each.steps else "" for each in results)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parts_table(results: Sequence[Result]) -> str:
    """One line for each part of the time from a loss to the first agent that acts; by the clock, and of a core."""
    heads = [head for each in results for head in (f"{each.agents} agents: by the clock", "processor time")]
    rows = [["from lost to first agent acting, ms", *heads], ["---"] * (len(heads) + 1)]
    for words in dict.fromkeys(words for each in results for words in each.parts):
        both = [list(zip(*each.parts.get(words, []), strict=True)) or [(), ()] for each in results]
        rows.append([words, *(cell(values) for pair in both for values in pair)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cell(values: Sequence[float]) -> str:
    """Median [p10 - p90] (n)."""
    if not values:
        return ""
    if len(values) == 1:
        return short(values[0])
    low, high = percentiles(values)
    return f"{short(median(values))} [{short(low)} - {short(high)}] ({len(values)})"


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The tenth and the ninetieth."""
    found = quantiles(values, n=10, method="inclusive")
    return found[0], found[-1]


def machine_line(machine: Mapping[str, Any], after: Sequence[float]) -> str:
    """What it was measured on."""
    loads = ", ".join(f"{load:.1f}" for load in machine["load_average_before"])
    later = ", ".join(f"{load:.1f}" for load in after)
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}; load average {loads} before, {later} after."
    )


def _moved(result: Result, count: Callable[[dict[str, Any]], int]) -> str:
    return f"{sum(count(fault) > 0 for fault in result.faults)} of {len(result.faults)}"


def _goal(values: Sequence[float]) -> str:
    if not values:
        return ""
    met = "met" if median(values) <= GOAL_MS else "not met"
    return f"{met}: {sum(value <= GOAL_MS for value in values)} of {len(values)}"
