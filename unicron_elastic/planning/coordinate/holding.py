"""What keeps jobs as they are although the planner would move them, from what the published plan remembers.

The planner's G lets nobody move for less than a move costs until the next fault. Two things it cannot know:

- *Dwell*: rates are measured, faults are guessed, and the optimum of a guess may swing. A job that was moved without
  need keeps its nodes for ``dwell_s``.
- *Flapping*: a host that comes back within ``GIVE_BACK_S`` goes to the job that lost it, if that has fewer nodes than
  before. So a host that comes and goes disturbs one job, not two.
"""

from __future__ import annotations

from collections.abc import Mapping

from unicron_elastic.planning.allocate.plan import Plan
from unicron_elastic.planning.coordinate.node_status import is_within
from unicron_elastic.planning.coordinate.published import Loss
from unicron_elastic.planning.coordinate.situation import PlanDifferences, usable_nodes
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus

# Moves without need cost a job a fifth of its time at most. A transition is taken to last a minute until it was
# measured, and so a job rests for five; one that moves in a second rests for as long as it takes to see how fast it is.
DWELL_TRANSITIONS = 5.0
DWELL_LEAST_S = 10.0
DWELL_S = 300.0  # at most
# A reboot with its self-tests takes five to ten minutes. What is longer away was repaired, and is a new node.
GIVE_BACK_S = 900.0


def losses_of(snapshot: ClusterSnapshot, changes: PlanDifferences, at_unix_s: float) -> tuple[Loss, ...]:
    """Return the losses of late, with those that the plan does not know; without hosts that are back with the job."""
    published = snapshot.published
    if published is None:
        return ()
    counts = published.plan.counts
    if not changes.lost and not published.losses:
        return ()
    gone = {seat.node_id for seat in changes.lost}.difference(snapshot.sound_ids)
    new = [
        Loss(seat.host, seat.job, counts[seat.job], at_unix_s)
        for seat in changes.lost
        if seat.job and seat.node_id in gone
    ]
    again = {(loss.host, loss.job) for loss in new}
    hosts = {loss.host for loss in published.losses}
    back = {(node.host, node.held_by) for node in snapshot.sound_nodes if node.host in hosts}
    alive = {job.name for job in snapshot.jobs if job.is_alive}
    old = (
        loss
        for loss in published.losses
        if is_within(at_unix_s, loss.at_unix_s, GIVE_BACK_S)
        and loss.job in alive
        and (loss.host, loss.job) not in back | again
    )
    return (*old, *new)


def returned_to(snapshot: ClusterSnapshot, changes: PlanDifferences, losses: tuple[Loss, ...]) -> dict[str, int]:
    """How many nodes the jobs that lost the hosts which have joined are to have at first."""
    joined = {node.host for node in changes.joined if not node.held_by}
    found = {}
    for job in snapshot.jobs:
        own = [loss for loss in losses if loss.job == job.name]
        back = len({loss.host for loss in own} & joined)
        if not back or not job.is_planned:
            continue
        held = snapshot.held()[job.name]
        most = min(max(loss.nodes_before for loss in own), held + back)
        if (nodes := _runnable(job, held, most)) > held:
            found[job.name] = nodes
    return found


def dwell_s(job: JobStatus) -> float:
    """For how many seconds a job that was moved without need keeps its nodes."""
    cost = job.transition
    return min(DWELL_S, max(DWELL_LEAST_S, DWELL_TRANSITIONS * max(cost.grow_s, cost.shrink_s, cost.replace_s)))


def dwelling_of(snapshot: ClusterSnapshot, changes: PlanDifferences, at_unix_s: float) -> dict[str, int]:
    """The jobs that were moved without need a moment ago, and have lost nothing since.

    Not even a new weight moves them: it has to wait. What a person pins or pauses, though, is pinned or paused at once.
    """
    published = snapshot.published
    if published is None:
        return {}
    disturbed = {seat.job for seat in changes.lost}
    rests_s = {job.name: dwell_s(job) for job in snapshot.jobs}
    rest = [
        name
        for name, moved_unix_s in published.moved_unix_s
        if is_within(at_unix_s, moved_unix_s, rests_s.get(name, 0.0)) and name not in disturbed
    ]
    if not rest:
        return {}
    # What it has or what is on its way: a plan of which nothing came has moved nobody.
    held = snapshot.heading
    return {name: held[name] for name in rest if held.get(name)}


def moved_of(snapshot: ClusterSnapshot, plan: Plan, at_unix_s: float) -> tuple[tuple[str, float], ...]:
    """When jobs last gave or got nodes while they ran and had lost none. A job that only starts has lost no work."""
    before = dict(() if snapshot.published is None else snapshot.published.moved_unix_s)
    working = snapshot.working()
    running = {job.name for job in snapshot.jobs if job.phase is JobPhase.RUNNING and working[job.name]}
    now = {
        share.task: at_unix_s
        for share in plan.shares
        if share.task in running and not share.lost and share.before and share.after not in (0, share.before)
    }
    late = {name: moved for name, moved in before.items() if is_within(at_unix_s, moved, DWELL_S)}
    counts = plan.counts
    return tuple(sorted((name, moved) for name, moved in {**late, **now}.items() if name in counts))


def _runnable(job: JobStatus, least: int, most: int) -> int:
    """The largest number of nodes on which the job runs from ``least`` to ``most``; 0 if there is none."""
    unit = job.spec.unit_nodes
    counts = (units * unit for units, rate in enumerate(job.rates_flops) if rate > 0.0)
    return max((count for count in counts if least <= count <= most), default=0)


def have_room(snapshot: ClusterSnapshot, holds: Mapping[str, int]) -> bool:
    """Whether there are nodes for all of them, and for the pins of people, which go before. If there were not, the
    planner would let some of them wait.
    """
    pins = {
        job.name: job.spec.pinned_nodes
        for job in snapshot.jobs
        if job.is_planned and job.spec.pinned_nodes and not job.spec.paused
    }
    return sum({**holds, **pins}.values()) <= len(usable_nodes(snapshot))
