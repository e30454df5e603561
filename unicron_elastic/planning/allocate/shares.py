"""Who gives nodes to whom, and who has to wait for some."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from unicron_elastic.planning.allocate.cluster import Cluster
from unicron_elastic.planning.allocate.plan import Move, Share, Wait
from unicron_elastic.planning.model.tasks import Task


def shares_of(cluster: Cluster, counts: Mapping[str, int]) -> tuple[Share, ...]:
    """Before and after, of every task."""
    return tuple(Share(task.name, task.nodes, task.lost_nodes, counts[task.name]) for task in cluster.tasks)


def moves_of(shares: Sequence[Share], idle: int) -> tuple[Move, ...]:
    """The moves that lead from what tasks hold to their shares, in order of names: idle nodes are given first."""
    givers = deque[tuple[str | None, int]]()
    if idle:
        givers.append((None, idle))
    givers.extend((share.task, share.held - share.after) for share in shares if share.held > share.after)
    found = []
    for share in shares:
        wanted = share.after - share.held
        while wanted > 0:
            source, count = givers.popleft()
            taken = min(count, wanted)
            wanted -= taken
            found.append(Move(taken, source, share.task))
            if count > taken:
                givers.appendleft((source, count - taken))
    found.extend(Move(count, source, None) for source, count in givers if source is not None)
    return tuple(found)


def waits_of(cluster: Cluster, shares: Sequence[Share]) -> tuple[Wait, ...]:
    """The tasks that have no nodes after the plan, and why."""
    idle = cluster.nodes - sum(share.after for share in shares)
    return tuple(
        Wait(task.name, _why_it_waits(task, cluster.nodes, idle))
        for task, share in zip(cluster.tasks, shares, strict=True)
        if not share.after
    )


def _why_it_waits(task: Task, nodes: int, idle: int) -> str:
    if task.is_paused:
        return f"{task.name} is paused."
    least = task.pinned_nodes or _least(task)
    if least is None:
        return f"{task.name} waits: there is no number of nodes on which it can run."
    needs = f"{task.name} waits: it needs {'exactly' if task.pinned_nodes else 'at least'} {_nodes(least)}"
    if least > nodes:
        return f"{needs}, and there {'is' if nodes == 1 else 'are'} {nodes}."
    return f"{needs}, {idle or 'none'} {'is' if idle == 1 else 'are'} idle, and the others earn more with theirs."


def _least(task: Task) -> int | None:
    """The smallest number of nodes on which the task runs."""
    units = range(-(-task.min_nodes // task.unit_nodes), task.most_nodes // task.unit_nodes + 1)
    return next((count * task.unit_nodes for count in units if task.rates_flops[count] > 0.0), None)


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"
