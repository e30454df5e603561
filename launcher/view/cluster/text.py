"""The overview of a cluster as lines of text, for as many columns and rows as there are. Pure.

It reads the same without colour, and in a log. What is worst comes first; what does not fit is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from rich.text import Text

from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.common.host_ranges import host_ranges
from unicron_elastic.launcher.common.tables import aligned, natural, shown_name, wrapped
from unicron_elastic.launcher.view.cluster.members import forget_text, lost_text
from unicron_elastic.launcher.view.cluster.overview import CRITICAL, DEGRADED, FINE, LEVELS, JobLine, NodeLine, Overview
from unicron_elastic.launcher.view.cluster.plan_text import (
    ESTIMATE_MARK,
    amount,
    is_above_plan,
    part_of_plan,
    span,
    why_estimate,
)
from unicron_elastic.launcher.view.cluster.recorded_fault import RecordedFault, seen_together
from unicron_elastic.launcher.view.cluster.section import Section, fitted

ToTime = Callable[[float], datetime]  # unix seconds to the reader's time of day

_STYLES = {FINE: "bold green", DEGRADED: "bold yellow", CRITICAL: "bold red"}
_HEALTH_STYLES = {"broken": "red", "draining": "yellow", "well": ""}
_HEALTHS = ("broken", "draining", "well")
_STATES = ("lost", "absent", "leaving", "joining", "waiting", "", "idle", "spare")
_JOB_STATES = ("failed", "waiting", "training", "paused", "stopped", "cancelled", "finished")
_GAP, _HOST_LINES = 2, 3
_OVER_MOST = 5  # jobs that are over, and have not failed: more are counted
_HEADING = "bold"
# From the left: a column that does not fit is left out, the last of these first.
_COLUMNS = ("job", "state", "nodes", "step", "steps/s", "of plan", "WAF", "gen", "weight", "workers")
_WANTED = ("job", "state", "gen", "step", "steps/s", "of plan", "nodes", "workers", "weight", "WAF")  # as they stand
_ALWAYS = 3


def status_lines(overview: Overview, to_time: ToTime, width: int | None, rows: int | None) -> list[Text]:
    """At most ``rows`` lines of at most ``width`` cells; None: there is no bound, as in a pipe."""
    sections = [
        Section(heading=tuple(_head(overview, to_time, width))),
        _problems(overview, width),
        _jobs(overview, width),
        _nodes(overview, to_time, width),
        _incidents(overview, to_time, width),
        _plan(overview, to_time, width),
    ]
    lines = fitted(sections, rows)
    if width is not None:
        for line in lines:
            line.truncate(width, overflow="ellipsis")
    return lines


def _head(overview: Overview, to_time: ToTime, width: int | None) -> list[Text]:
    level = overview.verdict.level
    title = Text.assemble(
        (level.upper(), _STYLES[level]),
        f"  {one_line(overview.where)}  {to_time(overview.at_unix_s):%Y-%m-%d %H:%M:%S}",
    )
    reason = overview.verdict.problems[0].sentence if overview.verdict.problems else overview.verdict.reason
    texts = [one_line(reason), _who_is_there(overview, to_time)]
    return [title, *(Text(line) for text in texts for line in wrapped(text, width, ""))]


def _who_is_there(overview: Overview, to_time: ToTime) -> str:
    found = overview.coordinator
    who = "Nobody coordinates"
    if found is not None:
        since = "" if found.since_unix_s is None else f" since {_moment(found.since_unix_s, overview, to_time)}"
        who = f"{shown_name(found.host)} coordinates{since}"
    nodes = Counter(node.state or "there" for node in overview.nodes)
    states = ", ".join(f"{count:,} {state}" for state, count in nodes.most_common())
    jobs = Counter(job.state for job in overview.jobs)
    phases = ", ".join(f"{jobs[state]} {state}" for state in _JOB_STATES if jobs[state])
    return f"{who}; nodes: {states or 'none'}; jobs: {phases or 'none'}."


def _problems(overview: Overview, width: int | None) -> Section:
    """All but the first, which is the verdict's reason."""
    items = []
    for problem in overview.verdict.problems[1:]:
        first, *rest = wrapped(f"{problem.level}: {one_line(problem.sentence)}", width, "")
        line = Text(first)
        line.stylize(_STYLES[problem.level], 0, len(problem.level))
        items.append((line, *map(Text, rest)))
    return Section(items=tuple(items), of="problem")


def _table(heading: str, items: Sequence[Sequence[Text]], of: str, counts: Sequence[int] = ()) -> Section:
    return Section(heading=(Text(heading, _HEADING),), items=tuple(map(tuple, items)), of=of, counts=tuple(counts))


def _jobs(overview: Overview, width: int | None) -> Section:
    levels: dict[str, int] = {}
    for problem in overview.verdict.problems:
        levels[problem.about] = max(levels.get(problem.about, 0), LEVELS.index(problem.level))
    jobs = sorted(overview.jobs, key=lambda job: (-_level(job, levels), _JOB_STATES.index(job.state), natural(job.job)))
    if not jobs:
        return Section()
    over = [job for job in jobs if not job.is_alive and not _level(job, levels)]
    summed_up = sorted(over, key=lambda job: (-(job.start or 0), natural(job.job)))[_OVER_MOST:]
    jobs = [job for job in jobs if job not in summed_up]
    heading, *rows = _job_rows(jobs, [LEVELS[_level(job, levels)] for job in jobs], width)
    told = {problem.sentence for problem in overview.verdict.problems}
    items = []
    for job, row in zip(jobs, rows, strict=True):
        why = "" if any(one_line(job.why) and job.why in each for each in told) else one_line(job.why)
        style = _STYLES[LEVELS[_level(job, levels)]] if _level(job, levels) else "" if job.is_alive else "dim"
        items.append([Text(row, style), *(Text(line, "dim") for line in wrapped(why, width))])
    if summed_up:
        counts = Counter(job.state for job in summed_up)
        states = ", ".join(f"{count:,} {state}" for state, count in counts.most_common())
        text = f"   and {len(summed_up):,} more that are over: {states}; `unicron jobs` lists all"
        items.append([Text(line, "dim") for line in wrapped(text, width, "")])
    return _table(heading, items, "job", [*([1] * len(jobs)), *([len(summed_up)] * bool(summed_up))])


def _level(job: JobLine, levels: dict[str, int]) -> int:
    return levels.get(f"job:{job.job}", 0)


def _job_rows(jobs: Sequence[JobLine], levels: Sequence[str], width: int | None) -> list[str]:
    """The heading and a row for each, with the columns for which there is room; a mark shows what is not well."""
    table = [dict(zip(_WANTED, _WANTED, strict=True)), *map(_job_cells, jobs)]
    widths = {name: max(len(row[name]) for row in table) for name in _WANTED}
    shown = list(_COLUMNS)
    while width is not None and len(shown) > _ALWAYS:
        if 3 + sum(widths[name] + _GAP for name in shown[1:]) + min(widths["job"], 16) <= width:
            break
        shown.pop()
    names = [name for name in _WANTED if name in shown]
    marks = {FINE: "  ", DEGRADED: "! ", CRITICAL: "!!"}
    cells = [[_placed(row[name], name, widths[name]) for name in names] for row in table]
    lines = aligned(cells, None if width is None else width - 3, flexible=(0,))
    return [f"{mark} {line}" for mark, line in zip(["  ", *(marks[level] for level in levels)], lines, strict=True)]


def _placed(cell: str, name: str, width: int) -> str:
    return cell if name in ("job", "state", "nodes") else cell.rjust(width)


def _job_cells(job: JobLine) -> dict[str, str]:
    wanted = "" if not job.wanted_nodes or not job.is_alive else f" of {job.wanted_nodes}"
    moving = [f"+{job.joining_nodes}"] * bool(job.joining_nodes) + [f"-{job.leaving_nodes}"] * bool(job.leaving_nodes)
    return {
        "job": shown_name(job.job),
        "state": job.state,
        "gen": "-" if job.generation is None else str(job.generation),
        "step": "-" if job.step is None else f"{job.step:,}",
        "steps/s": "-" if job.steps_per_s is None else f"{job.steps_per_s:.3g}",
        "of plan": "-" if job.of_expected is None else part_of_plan(job.of_expected),
        "nodes": " ".join([f"{job.nodes}{wanted}", *moving]) if job.is_alive else "-",
        "workers": "-" if job.workers is None or not job.is_alive else str(job.workers),
        "weight": "-" if job.weight is None else f"{job.weight:g}",
        "WAF": "-" if job.weighted_flops is None or not job.is_alive else _about(job),
    }


def _about(job: JobLine) -> str:
    """Its weighted FLOP/s, with a mark if they are an estimate."""
    return f"{ESTIMATE_MARK * job.is_estimate}{amount(job.weighted_flops or 0.0)}"


def _nodes(overview: Overview, to_time: ToTime, width: int | None) -> Section:
    """A row for all that are alike; of those that are kept out, one for all that are so for the same reason."""
    groups: dict[tuple[object, ...], list[NodeLine]] = {}
    for node in overview.nodes:
        kept_out = () if node.health == "well" else (node.reason, node.by, node.until_unix_s)
        groups.setdefault((node.health, node.state, node.job, node.towards, kept_out), []).append(node)
    ordered = sorted(groups.values(), key=lambda nodes: (_worst_first(nodes[0]), natural(nodes[0].job)))
    if not ordered:
        return Section()
    cells = [("nodes", "health", "state", "job"), *(_node_cells(nodes) for nodes in ordered)]
    heading, *rows = aligned(cells, None if width is None else max(40, width // 2), flexible=(3,))
    left = max(map(len, [heading, *rows])) + _GAP
    items = []
    for nodes, row in zip(ordered, rows, strict=True):
        first, *rest = _beside(row, host_ranges(node.host for node in nodes), left, width)
        first.stylize("yellow" if _is_lost(nodes[0]) else _HEALTH_STYLES[nodes[0].health])
        lost = _lost(nodes, overview, to_time, width) if _is_lost(nodes[0]) else []
        items.append([first, *rest, *_kept_out(nodes[0], overview, to_time, width), *lost])
    return _table(f"{heading:<{left}}hosts", items, "node", list(map(len, ordered)))


def _worst_first(node: NodeLine) -> tuple[int, int]:
    state = _STATES.index(node.state) if node.state in _STATES else len(_STATES)
    return _HEALTHS.index(node.health), state


def _node_cells(nodes: Sequence[NodeLine]) -> tuple[str, ...]:
    node = nodes[0]
    way = f" > {one_line(node.towards)}" if node.towards else ""
    health = "-" if _is_lost(node) and node.health == "well" else node.health
    return f"{len(nodes):>5,}", health, node.state or "there", f"{shown_name(node.job)}{way}"


def _beside(row: str, hosts: str, left: int, width: int | None) -> list[Text]:
    """A row with its hosts to the right of it, on some lines at the most."""
    if width is None:
        return [Text(f"{row:<{left}}{hosts}")]
    texts = [line.strip() for line in wrapped(hosts.replace(",", ", ").replace(",  ", ", "), max(width - left, 20), "")]
    if len(texts) > _HOST_LINES:
        texts = [*texts[: _HOST_LINES - 1], f"{texts[_HOST_LINES - 1]} …"]
    return [Text(f"{row if place == 0 else '':<{left}}{text}") for place, text in enumerate(texts)]


def _kept_out(node: NodeLine, overview: Overview, to_time: ToTime, width: int | None) -> list[Text]:
    if not node.reason:
        return []
    until = "it is lifted" if node.until_unix_s is None else _moment(node.until_unix_s, overview, to_time)
    since = "" if node.since_unix_s is None else f" since {_moment(node.since_unix_s, overview, to_time)}"
    text = f"kept out{since} until {until}, by {one_line(node.by)}: {one_line(node.reason)}"
    return [Text(line) for line in wrapped(text, width)]


def _is_lost(node: NodeLine) -> bool:
    return node.state == "lost"


def _lost(nodes: Sequence[NodeLine], overview: Overview, to_time: ToTime, width: int | None) -> list[Text]:
    moments = ["" if n.lost_unix_s is None else f"since {_moment(n.lost_unix_s, overview, to_time)}" for n in nodes]
    texts = [lost_text(node.host, node.lost_why, since) for node, since in zip(nodes, moments, strict=True)]
    texts.append(forget_text([shown_name(node.host) for node in nodes]))
    return [Text(line) for text in texts for line in wrapped(text, width)]


def _incidents(overview: Overview, to_time: ToTime, width: int | None) -> Section:
    seen = seen_together(overview.incidents)
    if not seen:
        return Section()
    rows = [("incident", "when", "sev", "took", "what"), *(_incident_cells(each, overview, to_time) for each in seen)]
    heading, *lines = aligned(rows, width, flexible=(4,) if width is None or width >= 60 else (0, 4))
    items = [[Text(line, "yellow" if each.is_open else "")] for line, each in zip(lines, seen, strict=True)]
    return _table(heading, items, "incident")


def _incident_cells(seen: RecordedFault, overview: Overview, to_time: ToTime) -> tuple[str, ...]:
    incident = seen.cause
    took = "open" if seen.is_open else "-" if seen.total_ms is None else _took(seen.total_ms)
    others = f" (told by {seen.nodes} nodes)" if seen.nodes > 1 else ""
    where = f"{shown_name(incident.host)}: "
    return (
        f"{shown_name(incident.run_id)}:{incident.number}",
        _moment(seen.at_unix_s, overview, to_time) if seen.at_unix_s else "-",
        str(incident.severity),
        took.rjust(8),
        f"{where}{one_line(incident.reason)}{others}",
    )


def _took(total_ms: float) -> str:
    return f"{total_ms:.0f} ms" if abs(total_ms) < 9_999.5 else f"{total_ms / 1e3:,.0f} s"


def _plan(overview: Overview, to_time: ToTime, width: int | None) -> Section:
    plan = overview.plan
    if plan is None or not any(job.is_alive for job in overview.jobs):
        return Section()
    when = "" if plan.made_unix_s is None else f" of {_moment(plan.made_unix_s, overview, to_time)}"
    estimates = [job for job in overview.jobs if job.is_alive and job.is_estimate]
    mark = ESTIMATE_MARK * bool(estimates)
    planned = f"WAF {mark}{amount(plan.waf_flops)} FLOP/s planned"
    ratio = plan.achieved_waf_flops / plan.waf_flops if plan.waf_flops else 0.0
    if is_above_plan(ratio):
        achieved = f"{planned}, which is too little: its jobs achieve more"
    else:
        part = f" ({ratio:.0%})" if plan.waf_flops else ""
        achieved = f"WAF {mark}{amount(plan.achieved_waf_flops)} of{planned.removeprefix('WAF')}{part}"
    worth = f"{achieved}; the next fault is expected in {span(plan.next_fault_s)}."
    if estimates:
        worth = f"{worth} {why_estimate(len(estimates))}"
    sentence = f"Plan {plan.revision}{when}: {one_line(plan.reason)}"
    heading, item = (tuple(map(Text, wrapped(text, width, ""))) for text in (worth, sentence))
    return Section(heading=heading, items=(item,), of="sentence")


def _moment(unix_s: float, overview: Overview, to_time: ToTime) -> str:
    """The time of day; with the date if that is another one."""
    moment, now = to_time(unix_s), to_time(overview.at_unix_s)
    is_near = abs(moment - now) < timedelta(hours=12) or moment.date() == now.date()
    return f"{moment:%H:%M:%S}" if is_near else f"{moment:%Y-%m-%d %H:%M}"
