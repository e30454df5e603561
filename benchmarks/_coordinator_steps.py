"""What the parts of a look of the coordinator take, one after the other, on the state of a measured cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import TypeVar

from unicron_elastic.planning.allocate.plan_table import build_table
from unicron_elastic.planning.coordinate.coordinator import CoordinatorState, SnapshotSeen, handle
from unicron_elastic.planning.coordinate.node_status import Health, NodeStatus
from unicron_elastic.planning.coordinate.proposal import propose, why_overtaken
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.reconcile import reconcile
from unicron_elastic.planning.coordinate.situation import Bounds, PlanDifferences, situation_of
from unicron_elastic.rendezvous.plan.mirror import PlanMirror

TIMES = 9
T = TypeVar("T")


def steps(mirror: PlanMirror, lost: NodeStatus) -> dict[str, float]:
    """By words, the median milliseconds of processor time of each part when ``lost`` is lost."""
    found: dict[str, float] = {}

    def timed(words: str, call: Callable[[], T], times: int = TIMES) -> T:
        took = []
        for _ in range(times):
            began = time.thread_time()
            answer = call()
            took.append((time.thread_time() - began) * 1e3)
        found[words] = median(took)
        return answer

    now = time.time()
    before = timed("snapshot of the mirror", lambda: mirror.planning_snapshot(lambda _host: Health.OK))
    left = replace(before, nodes=tuple(node for node in before.nodes if node is not lost))
    cluster, _ = timed("situation of it", lambda: situation_of(before, PlanDifferences(), Bounds()))
    table = timed("table, beside everything else", lambda: build_table(cluster), 3)
    timed("why overtaken", lambda: why_overtaken(left, now))
    timed("proposal, without a table", lambda: propose(left, now))
    proposal = timed("proposal, from the table", lambda: propose(left, now, table))
    timed("proposal without its times, once", proposal.without_times)
    ready = CoordinatorState(snapshot=before, table=table, asked=cluster)
    state, _ = timed("first look: all that is decided", lambda: handle(ready, SnapshotSeen(now, left)))
    text = timed("plan to JSON", proposal.to_json)
    published = timed("plan from JSON", lambda: Published.from_json(text, 1 + before.plan_revision))
    after = replace(left, published=published)
    timed("reconcile", lambda: reconcile(after, published))
    timed("second look: all that is decided", lambda: handle(state, SnapshotSeen(now + 0.05, after)))
    return found
