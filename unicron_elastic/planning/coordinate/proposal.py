"""The plan that should be published now: the planner's optimum, without moving anybody for what will not last.

Three things keep it from the optimum, and its reason names each of them: ``holding``; nodes that refuse a job, as they
are of no use to it, whatever it would earn; and draining nodes without which a job would have to wait. No job waits
for the sake of the first: then it does not count. A plan that was held back is looked at again when the first of them
may move.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from unicron_elastic.planning.allocate.cluster import NodesLost, after
from unicron_elastic.planning.allocate.plan import Plan, Wait
from unicron_elastic.planning.allocate.plan_table import PlanTable, plan_for
from unicron_elastic.planning.allocate.reason import reason_of
from unicron_elastic.planning.coordinate.holding import (
    DWELL_S,
    dwell_s,
    dwelling_of,
    have_room,
    losses_of,
    moved_of,
    returned_to,
)
from unicron_elastic.planning.coordinate.node_status import Health
from unicron_elastic.planning.coordinate.published import Loss, Published, Seat
from unicron_elastic.planning.coordinate.seating import seated
from unicron_elastic.planning.coordinate.situation import Bounds, PlanDifferences, changes_of, situation_of
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase

UNCHANGED = "Nothing has changed"  # as the planner says it of what is no event to it
ROUNDING_S = 1.0  # a sum of moments is rounded


class Looked(NamedTuple):
    """The plan was looked at again, and still is the best: until when that is so. None: until something happens."""

    plan_revision: int
    again_unix_s: float | None


def comes_to_the_same(published: Published | None, proposal: Published) -> bool:
    """Whether all nodes keep their seats, and for the same jobs: then nobody needs to hear of it."""
    return published is not None and (published.seats, published.jobs) == (proposal.seats, proposal.jobs)


def why_overtaken(snapshot: ClusterSnapshot, at_unix_s: float, looked: Looked | None = None) -> str:
    """What has happened that the published plan does not know, as a sentence; "" if it still holds.

    ``looked``: at the same plan, if that was looked at again already.
    """
    published = snapshot.published
    if published is None:
        return "There is no plan yet." if snapshot.nodes or snapshot.jobs else ""
    if not _are_same(snapshot.sound_ids, published.node_ids) or snapshot.draining_ids != published.draining_ids:
        return "Nodes have come, gone, or are to be drained."
    if {(job.name, job.revision) for job in snapshot.jobs if job.is_planned} != set(published.jobs):
        return "Jobs have come, ended or changed."
    for node in snapshot.unsettled_nodes:
        job = published.job_of[node.node_id]
        if job and job != node.held_by and node.refuses(job, at_unix_s):
            return f"{node.host} refuses {job}."
    is_looked_at = looked is not None and looked.plan_revision == published.revision
    look = looked.again_unix_s if looked is not None and is_looked_at else published.look_again_unix_s
    if look is not None and not 0.0 < look - at_unix_s < DWELL_S + ROUNDING_S:  # also if the clock was set back
        return "The last plan was to be looked at again about now."
    return ""


def _are_same(ids: tuple[str, ...], others: tuple[str, ...]) -> bool:
    return len(ids) == len(others) and (ids == others or set(ids) == set(others))


def propose(snapshot: ClusterSnapshot, at_unix_s: float, table: PlanTable | None = None) -> Published:
    """The plan for what there is. ``table`` saves computing it if it was built for this; it changes nothing else."""
    changes = changes_of(snapshot)
    losses = losses_of(snapshot, changes, at_unix_s)
    returned, dwelling = returned_to(snapshot, changes, losses), dwelling_of(snapshot, changes, at_unix_s)
    now = _Now(snapshot, changes, losses, at_unix_s, table)
    found = _fitted(now, Bounds())
    if all(move.source is None for move in found.plan.moves):
        dwelling = {}  # nodes that would be idle disturb nobody but those who gain by them
    is_limited = any(_is_refused(snapshot, job, at_unix_s) for job in found.bounds.most)
    holds = {**dwelling, **returned}
    if holds and have_room(snapshot, holds):
        held = _fitted(now, Bounds(holds=holds))
        if held.counts != found.counts and not _makes_wait(held, found):
            found, is_limited = _explained(snapshot, held, found, returned), True
    plan = found.plan
    moves_anybody = bool(plan.moves) or any(share.lost for share in plan.shares)
    return _published(
        snapshot.published,
        plan=plan,
        seats=found.seats,
        jobs=tuple((job.name, job.revision) for job in snapshot.jobs if job.is_planned),
        made_unix_s=at_unix_s,
        moved_unix_s=moved_of(snapshot, plan, at_unix_s),
        losses=losses,
        # What was right with a loss may be better still once that is paid for: the optimum is one of the moment.
        look_again_unix_s=at_unix_s + _rest_s(snapshot, dwelling, plan) if is_limited or moves_anybody else None,
    )


def _published(before: Published | None, *, plan: Plan, seats: tuple[Seat, ...], **others: Any) -> Published:
    if before is not None and seats is before.seats and plan.counts == before.plan.counts:
        return before.renewed(plan=plan, revision=0, **others)
    return Published(plan=plan, seats=seats, **others)


def _rest_s(snapshot: ClusterSnapshot, dwelling: Collection[str], plan: Plan) -> float:
    """How long until another look may find a better plan: the first of those who rest, or who move now, may move."""
    moved = {*dwelling, *(share.task for share in plan.shares if share.after != share.before or share.lost)}
    return min((dwell_s(job) for job in snapshot.jobs if job.name in moved), default=DWELL_S)


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A plan whose counts the nodes that there are can fill."""

    plan: Plan
    seats: tuple[Seat, ...]
    bounds: Bounds

    @property
    def counts(self) -> dict[str, int]:
        return self.plan.counts


class _Now(NamedTuple):
    """What a plan is made for. ``changes``: since the published plan, if no draining node is kept."""

    snapshot: ClusterSnapshot
    changes: PlanDifferences
    losses: tuple[Loss, ...]
    at_unix_s: float
    table: PlanTable | None


def _fitted(now: _Now, bounds: Bounds) -> _Fitted:
    """Plans until there is a node for every seat: each round a job can have less, or a draining node is kept."""
    snapshot, at_unix_s = now.snapshot, now.at_unix_s
    while True:
        changes = changes_of(snapshot, bounds.kept) if bounds.kept else now.changes
        plan = _planned(snapshot, changes, bounds, now.table)
        if plan.reason.startswith(UNCHANGED):
            happened = _happened(snapshot, changes, at_unix_s)
            plan = replace(plan, reason=f"{happened}{plan.reason.removeprefix(UNCHANGED)}")
        kept = bounds.kept | _needed(snapshot, plan, bounds.kept)
        if kept != bounds.kept:
            bounds = replace(bounds, kept=kept)
            continue
        seats, short = seated(snapshot, plan.counts, kept, now.losses, at_unix_s)
        if not short:
            plan = replace(plan, waits=tuple(_told(snapshot, plan, wait) for wait in plan.waits))
            return _Fitted(_with_reasons(snapshot, plan, bounds, at_unix_s), seats, bounds)
        bounds = replace(bounds, most={**bounds.most, **short})


def _told(snapshot: ClusterSnapshot, plan: Plan, wait: Wait) -> Wait:
    """The planner calls a job paused, too, that can have none of the numbers of nodes on which it runs."""
    job = snapshot.job(wait.task)
    if job is None or job.spec.paused or wait.reason != f"{wait.task} is paused.":
        return wait
    needs = f"{wait.task} waits: it needs at least {job.least_nodes} node{'s' * (job.least_nodes != 1)}"
    if job.least_nodes > plan.nodes:
        return Wait(wait.task, f"{needs}, and there {'is' if plan.nodes == 1 else 'are'} {plan.nodes}.")
    return Wait(wait.task, f"{needs}, and too few may work for it: the others refuse it, or are to be drained.")


def _planned(snapshot: ClusterSnapshot, changes: PlanDifferences, bounds: Bounds, table: PlanTable | None) -> Plan:
    cluster, event = situation_of(snapshot, changes, bounds)
    plan = table.plan(event) if table is not None and table.cluster == cluster else plan_for(cluster, event)
    drained = _drained(snapshot, changes)
    if not drained or not isinstance(event, NodesLost):
        return plan
    return replace(plan, reason=reason_of(after(cluster, event), event, plan.shares, plan.moves, drained=drained))


def _drained(snapshot: ClusterSnapshot, changes: PlanDifferences) -> list[tuple[str, str]]:
    """Which of the nodes that jobs have no more are there still, and are to be drained; with these jobs."""
    return [(seat.host, seat.job) for seat in changes.lost if seat.node_id in snapshot.draining_ids]


def _happened(snapshot: ClusterSnapshot, changes: PlanDifferences, at_unix_s: float) -> str:
    """Several events at once, or one that the planner does not know, in a few words."""
    if snapshot.published is None:
        return "This is the first plan"
    drained = len(_drained(snapshot, changes))
    told = [
        (len(changes.lost) - drained, "lost", "node"),
        (drained, "drained", "node"),
        (len(changes.joined), "new", "node"),
        (len(changes.ended), "ended", "job"),
        (len(changes.new), "new", "job"),
        (len(changes.altered), "changed", "job"),
    ]
    parts = [f"{count} {how} {what}{'s' * (count > 1)}" for count, how, what in told if count]
    if not parts:
        return why_overtaken(snapshot, at_unix_s).removesuffix(".") or UNCHANGED
    return f"Since the last plan: {', '.join(parts)}"


def _needed(snapshot: ClusterSnapshot, plan: Plan, kept: frozenset[str]) -> frozenset[str]:
    """Draining nodes without which a job that runs would have to wait."""
    if not snapshot.draining_ids:
        return frozenset()
    stopped = {wait.task for wait in plan.waits}
    running = {job.name for job in snapshot.jobs if job.phase is JobPhase.RUNNING and not job.spec.paused}
    return frozenset(
        node.node_id
        for node in snapshot.unsettled_nodes
        if node.health is Health.DRAINING and node.node_id not in kept and node.held_by in stopped & running
    )


def _makes_wait(held: _Fitted, free: _Fitted) -> bool:
    return any(not held.counts[job] for job, count in free.counts.items() if count)


def _is_refused(snapshot: ClusterSnapshot, job: str, at_unix_s: float) -> bool:
    return any(node.refuses(job, at_unix_s) for node in snapshot.unsettled_nodes)


def _with_reasons(snapshot: ClusterSnapshot, plan: Plan, bounds: Bounds, at_unix_s: float) -> Plan:
    notes = [
        f"{job} can have no more than {most} for now, as other nodes "
        f"{'refuse it' if _is_refused(snapshot, job, at_unix_s) else 'are to be drained'}"
        for job, most in bounds.most.items()
    ]
    if bounds.kept:
        are = "draining nodes stay" if len(bounds.kept) > 1 else "draining node stays"
        notes.append(f"{len(bounds.kept)} {are}, as a job would have to wait else")
    return _noted(plan, notes)


def _explained(snapshot: ClusterSnapshot, held: _Fitted, free: _Fitted, returned: Collection[str]) -> _Fitted:
    """Name the jobs that are left with another number of nodes than they would have."""
    rests_s = {job.name: dwell_s(job) for job in snapshot.jobs}
    notes = [
        f"{job} gets back what came back to it"
        if job in returned
        else f"{job} keeps its nodes, as it was moved less than {_duration(rests_s[job])} ago"
        for job in held.bounds.holds
        if held.counts[job] != free.counts[job]
    ]
    return replace(held, plan=_noted(held.plan, notes))


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} minutes"


def _noted(plan: Plan, notes: list[str]) -> Plan:
    return replace(plan, reason="; ".join([plan.reason.removesuffix("."), *notes]) + ".") if notes else plan
