"""One job under the live coordinator: what the store has of it, and how it is carried out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress
from operator import ne

from unicron_elastic.planning.coordinate.nodes import NodeStatus
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.snapshot import JobStatus, Phase, Snapshot
from unicron_elastic.simulation.model.accounting import Entry
from unicron_elastic.simulation.model.durations import Durations
from unicron_elastic.simulation.model.training import Training, fetch_s, joined, regroup_s, settle


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
    cause: Entry | None = None

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


# Whether all nodes are on their way to where the plan wants them, so that a look of the coordinator would do nothing.
#
# Exact, and kept up to date node by node: with 12,500 of them a look takes milliseconds, and most of what agents say
# is that they are one state further.


class Places:
    """By the published plan, and by what the agents have said last."""

    def __init__(self) -> None:
        self._wanted: Mapping[str, str] = {}
        self._counts: Mapping[str, int] = {}
        self._misplaced: set[str] = set()

    def published(self, plan: Published, seen: Snapshot) -> None:
        """There is another plan, made for what is ``seen``."""
        self._wanted, self._counts = plan.job_of, plan.plan.counts
        self._misplaced = set(compress(seen.sound_ids, map(ne, seen.heads, self._wanted.values())))

    def said(self, before: NodeStatus, now: NodeStatus) -> bool:
        """An agent says what its node does. Whether that and all others is as the coordinator has ordered it."""
        if self._wanted.get(now.node_id) == now.heads_for:
            self._misplaced.discard(now.node_id)
        return before.heads_for == now.heads_for and not self._misplaced

    def are_waiting(self, jobs: Iterable[JobStatus]) -> bool:
        """Whether a job waits for its nodes, to be started."""
        return any(job.phase is Phase.SUBMITTED and self._counts.get(job.name, 0) for job in jobs)
