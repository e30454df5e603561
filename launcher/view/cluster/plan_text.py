"""A plan as text for people: what it says, a row for each job, what it earns and costs, and who still moves. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime

from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.common.tables import aligned, listed, shown_name, wrapped
from unicron_elastic.launcher.view.cluster.plan import JobRow, PlanView
from unicron_elastic.planning.model.jobs import GPU_FLOPS

_MOVES_MOST = 32  # that are told on a terminal


def plan_text(view: PlanView, to_time: Callable[[float], datetime], width: int | None) -> str:
    """All of it. ``to_time`` makes the reader's time of day; ``width`` in columns, None: nothing is cut, for grep."""
    lines = [*_heading(view, to_time, width), *_jobs(view, width)]
    for what, hosts in _others(view):
        lines += wrapped(f"{what}: {listed(hosts, width)}", width, "")
    lines += wrapped(_worth(view), width, "")
    if told := [job.job for job in view.jobs if job.job in view.estimates]:
        lines += wrapped(f"FLOP/s of {listed(told, width)}: {_why_estimate(len(told))}", width, "")
    return "\n".join([*lines, *_moves(view, width)])


def amount(value: float) -> str:
    """Three digits and a prefix, such as 1.08 P."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if value < 999.5:
            return f"{value:.3g} {prefix}".rstrip()
        value /= 1000.0
    return f"{value:.3g} Z"


ESTIMATE_MARK = "~"
_ABOVE = 1.05  # what is more than promised by more than this was promised wrongly


def is_above_plan(ratio: float) -> bool:
    """Whether more is achieved than the plan has promised, so that the promise is no measure of it."""
    return ratio > _ABOVE


def part_of_plan(ratio: float) -> str:
    """Return what is achieved of what the plan promises."""
    return ">100%" if is_above_plan(ratio) else f"{ratio:.0%}"


def why_estimate(jobs: int) -> str:
    """Say why FLOP/s of so many jobs are estimates."""
    return f"{ESTIMATE_MARK}: {_why_estimate(jobs)}"


def _why_estimate(jobs: int) -> str:
    whose = "its job does" if jobs == 1 else "jobs do"
    counts = f"a worker counts as {amount(GPU_FLOPS)}FLOP/s at first"
    return f"an estimate, as {whose} not tell the FLOPs of a step; {counts}."


def span(seconds: float) -> str:
    """A length of time, in the unit that suits it."""
    for name, length in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 2.0 * length:
            return f"{seconds / length:.3g} {name}"
    return f"{seconds:.3g} s"


def _heading(view: PlanView, to_time: Callable[[float], datetime], width: int | None) -> Iterator[str]:
    reason = one_line(view.reason)
    if view.what_if:
        yield from wrapped(f"What if: {'; '.join(map(one_line, view.what_if))}", width, "")
        yield from wrapped(f"The plan would be, and nothing is written: {reason}", width, "")
    elif not view.is_published:
        yield from wrapped(f"No plan is published yet. It would be: {reason}", width, "")
    else:
        when = "" if view.published_unix_s is None else f" of {to_time(view.published_unix_s):%Y-%m-%d %H:%M:%S}"
        yield from wrapped(f"Plan {view.revision}{when}: {reason}", width, "")
    if view.overtaken:
        yield from wrapped(f"It is overtaken: {one_line(view.overtaken)}", width, "")


def _jobs(view: PlanView, width: int | None) -> Iterator[str]:
    if not view.jobs:
        yield "No job is planned."
        return
    columns, cells = _compared if view.what_if else _standing
    heading, *rows = aligned([columns, *map(cells, view.jobs)], width, flexible=(0,))
    yield heading
    for job, row in zip(view.jobs, rows, strict=True):
        yield row
        yield from wrapped(one_line(job.waits), width)
        yield from wrapped(listed(job.hosts, width), width)


def _standing_cells(job: JobRow) -> tuple[str, ...]:
    counts = (str(count or "-") for count in (job.working, job.joining, job.leaving))
    return shown_name(job.job), *counts, str(job.planned), *_earned(job)


def _compared_cells(job: JobRow) -> tuple[str, ...]:
    return shown_name(job.job), f"{job.before} -> {job.planned}", *_earned(job)


def _earned(job: JobRow) -> tuple[str, ...]:
    return f"{job.weight:g}", amount(job.rate_flops), amount(job.weighted_flops)


_EARNED = ("weight", "FLOP/s", "F")
_standing = ("job", "works", "joins", "leaves", "plan", *_EARNED), _standing_cells
_compared = ("job", "nodes", *_EARNED), _compared_cells


def _others(view: PlanView) -> Iterator[tuple[str, tuple[str, ...]]]:
    if view.idle:
        yield "idle", view.idle
    for why in dict.fromkeys(why for _, why in view.kept_out):
        yield why, tuple(host for host, because in view.kept_out if because == why)


def _worth(view: PlanView) -> str:
    waf = f"WAF {_flops(view.waf_before_flops)}"
    if view.waf_after_flops != view.waf_before_flops:
        waf += f" {'now' if view.what_if else 'before'}, {_flops(view.waf_after_flops)} after"
    cost = "" if not view.lost_s else f"; getting there costs {span(view.lost_s)} of it"
    return f"{waf}{cost}; the next fault is expected in {span(view.running_s)}."


def _flops(value: float) -> str:
    text = amount(value)
    return f"{text}FLOP/s" if text[-1].isalpha() else f"{text} FLOP/s"


def _moves(view: PlanView, width: int | None) -> Iterator[str]:
    told = [f"{shown_name(move.host)} {one_line(move.how)}" for move in view.moves]
    known = {job.waits for job in view.jobs}
    told += [one_line(step).removesuffix(".") for step in view.steps if step not in known]
    if not told:
        return
    yield "Then:" if view.what_if or not view.is_published else "Under way:"
    shown = told if width is None else told[:_MOVES_MOST]
    for each in shown:
        yield from wrapped(each, width)
    if len(shown) < len(told):
        yield from wrapped(f"and {len(told) - len(shown)} more", width)
