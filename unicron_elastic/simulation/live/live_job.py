"""One job under the live coordinator: what the store has of it, and how it is carried out."""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.snapshot import JobStatus
from unicron_elastic.simulation.model.accounting import IncidentEntry
from unicron_elastic.simulation.model.durations import Durations
from unicron_elastic.simulation.model.regroup import fetch_s, joined, regroup_s, settle
from unicron_elastic.simulation.model.training import Training


@dataclass(slots=True)
class LiveJob:
    """``starts``: how often it was started. ``workers``: the nodes whose child works.

    ``cause``: the incident that its nodes last changed for. ``is_looked_at``: nodes have come at this moment.
    """

    status: JobStatus
    training: Training
    durations: Durations
    starts: int = 0
    workers: set[str] = field(default_factory=set)
    is_looked_at: bool = False
    cause: IncidentEntry | None = None

    def child_s(self) -> float:
        """Until a child works that starts now, with the state that it needs."""
        nodes = max(self.training.size, self.status.least_nodes)
        return self.durations.node_s + fetch_s(self.training.shape, nodes, self.durations)

    def join(self, *, is_free: bool) -> None:
        """Those who work by now, and are not counted yet, join; ``is_free``: at no cost, before anything happened."""
        more = len(self.workers) - self.training.present
        if more <= 0:
            return
        if is_free:
            self.training.grow(self.training.replaced(more))
        else:
            joined(self.training, more, self.durations, self.cause)

    def leave(self) -> None:
        """A node leaves at the end of a step, and the others meet without it."""
        if self.training.size:
            self.training.grow(-1)
            self.training.stall_for(regroup_s(self.training, self.durations), "transition", self.cause)

    def settle(self, published: Published | None) -> None:
        """If no node is to come any more for one that is missing, the job counts on those that are there."""
        if published is None or not self.training.missing_nodes:
            return
        planned = published.plan.counts.get(self.status.name, 0)
        if planned and planned == self.training.present:
            settle(self.training, planned, self.durations)
