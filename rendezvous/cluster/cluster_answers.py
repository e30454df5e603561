"""What an agent or a coordinator of the cluster says of its part in it: its figures, and whether its loops go round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from unicron_elastic.metrics.figures import CoordinationFigures, PlanFigures
from unicron_elastic.metrics.samples import MetricSample, coordination_samples, plan_samples
from unicron_elastic.rendezvous.cluster.heartbeats import NodeHeartbeats
from unicron_elastic.rendezvous.plan.planner import Planner

UNWELL_S = 30.0  # without a turn of the heartbeats' loop, which waits for nobody
PLANNER_UNWELL_S = 120.0  # of the planner's, which waits for the store, and may have much to calculate


class ClusterAnswers:
    """Read from any thread: what is asked is at hand."""

    def __init__(
        self,
        heartbeats: NodeHeartbeats | None,
        planner: Planner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``heartbeats``: None as long as this process has not entered the cluster."""
        self._clock = clock
        self._heartbeats = heartbeats
        self._planner = planner

    def coordination(self) -> CoordinationFigures:
        """This process's part."""
        if self._heartbeats is None:
            return CoordinationFigures(leads=False, knows_coordinator=False, sees_store=False, lost_nodes=0)
        state = self._heartbeats.state
        return CoordinationFigures(
            leads=state.leads,
            knows_coordinator=state.leader is not None,
            sees_store=not state.blind,
            lost_nodes=self._heartbeats.lost_nodes,
        )

    def plan(self) -> PlanFigures | None:
        """Return the cluster's plan; None unless this process coordinates it."""
        return self._planner.figures

    def samples(self) -> Iterator[MetricSample]:
        """All that is known now."""
        yield from coordination_samples(self.coordination())
        if (plan := self.plan()) is not None:
            yield from plan_samples(plan)

    def why_unwell(self) -> str:
        """Which loop stands, as a sentence; "" if none does."""
        now = self._clock()
        if self._heartbeats is not None and (stood_s := now - self._heartbeats.turned_at) > UNWELL_S:
            return f"The loop of the heartbeats has not gone round for {stood_s:.0f} s."
        turned_at = self._planner.turned_at
        if turned_at is not None and (stood_s := now - turned_at) > PLANNER_UNWELL_S:
            return f"The planner's loop has not gone round for {stood_s:.0f} s."
        return ""

    def why_not_ready(self) -> str:
        """Why this process cannot coordinate or follow, as a sentence; "" if it can."""
        found = self.coordination()
        if not found.sees_store:
            return "The cluster's etcd cannot be read."
        return "" if found.knows_coordinator else "Nobody coordinates the cluster."
