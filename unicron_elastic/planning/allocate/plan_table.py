"""The lookup table: before anything happens, the best plan for everything that may happen next.

A table belongs to one situation. When that has changed, because a plan was carried out, a rate was measured again,
or a task came, it is built again in the background; meanwhile ``plan_for`` answers in some milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from unicron_elastic.planning.allocate.cluster import Cluster, Event, after, next_events
from unicron_elastic.planning.allocate.optimum import Solver
from unicron_elastic.planning.allocate.plan import Plan
from unicron_elastic.planning.allocate.reason import reason_of
from unicron_elastic.planning.allocate.shares import moves_of, shares_of, waits_of
from unicron_elastic.planning.model.tasks import Task
from unicron_elastic.planning.model.waf import penalty_flop, waf_flops


@dataclass(frozen=True, slots=True)
class PlanTable:
    """The plans for what may happen next in ``cluster``."""

    cluster: Cluster
    plans: Mapping[Event, Plan]

    def plan(self, event: Event) -> Plan:
        """The best plan: looked up, or else computed. Raises ``ValueError`` if the event cannot happen."""
        found = self.plans.get(event)
        return plan_for(self.cluster, event) if found is None else found


def build_table(cluster: Cluster, expected: Sequence[Task] = (), *, with_pairs: bool = False) -> PlanTable:
    """The plans for every event of ``next_events``. Raises ``ValueError`` if one of ``expected`` cannot come."""
    planner = _Planner(cluster)
    plans = {event: planner.plan(event) for event in next_events(cluster, expected, with_pairs=with_pairs)}
    return PlanTable(cluster, MappingProxyType(plans))


def plan_for(cluster: Cluster, event: Event) -> Plan:
    """The best plan for ``event``, computed on the spot. Raises ``ValueError`` if it cannot happen."""
    return _Planner(cluster).plan(event)


def applied(cluster: Cluster, event: Event, plan: Plan) -> Cluster:
    """The situation when the plan for ``event`` is carried out. Raises ``ValueError`` if it is not of these tasks."""
    changed, counts = after(cluster, event), plan.counts
    if counts.keys() != {task.name for task in changed.tasks}:
        raise ValueError(f"the plan is for {', '.join(counts)}: it must be for the tasks of this cluster")
    tasks = tuple(replace(task, nodes=counts[task.name], lost_nodes=0) for task in changed.tasks)
    return replace(changed, tasks=tasks)


class _Planner:
    """Plans for one situation; what events have in common is computed once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._solver = Solver(cluster)
        self._waf_flops = {task.name: waf_flops(task, task.nodes) for task in cluster.tasks}

    def plan(self, event: Event) -> Plan:
        situation = after(self._cluster, event)
        shares = shares_of(situation, self._solver.best_counts(situation))
        moves = moves_of(shares, situation.idle_nodes)
        return Plan(
            nodes=situation.nodes,
            shares=shares,
            moves=moves,
            waits=waits_of(situation, shares),
            waf_before_flops=sum(self._waf_flops.values()),
            waf_after_flops=sum(
                self._waf_flops[share.task]
                if share.after == share.before and share.task in self._waf_flops
                else waf_flops(task, share.after)
                for task, share in zip(situation.tasks, shares, strict=True)
            ),
            lost_flop=sum(
                penalty_flop(task, share.after)
                for task, share in zip(situation.tasks, shares, strict=True)
                if task.lost_nodes or share.after != share.before
            ),
            running_s=situation.running_s,
            reason=reason_of(situation, event, shares, moves),
        )
