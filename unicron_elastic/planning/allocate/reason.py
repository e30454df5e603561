"""Why a plan is as it is, in one sentence that a manager understands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from unicron_elastic.planning.allocate.cluster import (
    Cluster,
    Event,
    NodesJoined,
    NodesLost,
    NothingChanged,
    TaskFinished,
    TaskSubmitted,
)
from unicron_elastic.planning.allocate.plan import Move, Share
from unicron_elastic.planning.model.tasks import Task
from unicron_elastic.planning.model.waf import standstill_s, waf_flops

Drained: TypeAlias = Sequence[tuple[str, str]]  # host and job, "" for none

NAMED = 3  # so many tasks or moves are named; of more it is said how many they are


def reason_of(
    cluster: Cluster, event: Event, shares: Sequence[Share], moves: Sequence[Move], *, drained: Drained = ()
) -> str:
    """``cluster``: the situation after ``event``, before the plan; ``shares`` are of its tasks, in their order.

    ``drained``: those of the nodes that the event has lost that are there still, and are drained, with their jobs.
    """
    happened = "; ".join([_happened(event, drained), *_goes_on(event, shares, moves, drained)])
    if not moves:
        return (
            f"{happened}: no node moves, as no move would earn what it costs before the next fault, expected in "
            f"{_duration(cluster.running_s)}."
        )
    of = {share.task: share for share in shares}
    tasks = {task.name: task for task in cluster.tasks if of[task.name].after != task.nodes or task.lost_nodes}
    resting = {name: _resting(task) for name, task in tasks.items()}
    moved = _listed([_moved(move, of, tasks, _subject(event, drained)) for move in moves], "; ", "moves")
    return f"{happened}; {moved}{_ratio(moves, tasks, of, resting)}: {_effect(cluster, of, tasks, resting)}."


def _happened(event: Event, drained: Drained) -> str:
    match event:
        case NothingChanged():
            return "Nothing has changed"
        case NodesJoined(count):
            return f"{_nodes(count).capitalize()} joined"
        case TaskFinished(task):
            return f"Job {task} finished"
        case TaskSubmitted(task):
            return f"Job {task.name} was submitted"
        case NodesLost(names, idle):
            found = Counter(names) - Counter(job for _, job in drained if job)
            lost = [f"job {name} lost {_nodes(found[name])}" for name in dict.fromkeys(names) if found[name]]
            idle -= sum(not job for _, job in drained)
            gone = [f"{_nodes(idle, 'idle ')} went away"] if idle else []
            sent = [f"node {host}{f' of job {job}' if job else ''} is drained" for host, job in drained[:NAMED]]
            more = [f"{len(drained) - NAMED} more"] if len(drained) > NAMED else []
            text = " and ".join([*lost, *gone, *sent, *more])
            return text[0].upper() + text[1:]


def _subject(event: Event, drained: Drained = ()) -> str | None:
    """The one task that the event is about, which can be called "it"."""
    if drained:  # "it" would be the node
        return None
    match event:
        case TaskSubmitted(task):
            return task.name
        case NodesLost(names, 0) if len(set(names)) == 1:
            return names[0]
    return None


def _goes_on(event: Event, shares: Sequence[Share], moves: Sequence[Move], drained: Drained) -> Iterator[str]:
    """What becomes of tasks that lost nodes and get none."""
    targets = {move.target for move in moves}
    lost = set(event.tasks) if isinstance(event, NodesLost) else set()
    for share in shares:
        name = "it" if share.task == _subject(event, drained) else share.task
        if share.task not in lost or share.task in targets:
            continue
        if share.after:
            yield f"{name} goes on with {share.after} of its {_nodes(share.before)}"
        elif not share.held:
            yield f"{name} has to wait"


def _moved(move: Move, of: Mapping[str, Share], tasks: Mapping[str, Task], subject: str | None) -> str:
    target = "it" if subject is not None and move.target == subject else move.target
    if move.source is None:
        return f"{target} gets {_nodes(move.nodes, 'idle ')}"
    share = of[move.source]
    giver = "it" if move.source == subject else move.source
    if move.nodes < share.held:
        part = f"{move.nodes} of its {share.held} nodes"
    else:
        part = f"all of its {share.held} nodes" if share.held > 1 else "its last node"
    waits = "" if share.after else f" and waits{_unsaved(tasks[move.source])}"
    return f"{giver} gives up {part}{waits}" if target is None else f"{giver} gives {target} {part}{waits}"


def _unsaved(task: Task) -> str:
    """What a task does again that has to wait."""
    unsaved_s = task.transition.unsaved_s
    return f" (it has not saved {_duration(unsaved_s)} of training)" if unsaved_s else ""


def _ratio(
    moves: Sequence[Move], tasks: Mapping[str, Task], of: Mapping[str, Share], resting: Mapping[str, int]
) -> str:
    """Why a single move pays."""
    if len(moves) > 1 or moves[0].source is None or moves[0].target is None:
        return ""
    source, target = moves[0].source, moves[0].target
    gain = waf_flops(tasks[target], of[target].after) - waf_flops(tasks[target], resting[target])
    loss = waf_flops(tasks[source], resting[source]) - waf_flops(tasks[source], of[source].after)
    them = "it" if moves[0].nodes == 1 else "them"
    if loss <= 0.0:
        return f", as {source} earns no less without {them}"
    return f", as {target} earns {gain / loss:.2g} times as much with {them}" if gain > loss else ""


def _effect(cluster: Cluster, of: Mapping[str, Share], tasks: Mapping[str, Task], resting: Mapping[str, int]) -> str:
    """What the moves bring, against a plan in which nobody gives or gets a node, and for how much standing still."""
    others = sum(waf_flops(task, task.nodes) for task in cluster.tasks if task.name not in tasks)
    with_moves = others + sum(waf_flops(task, of[name].after) for name, task in tasks.items())
    without = others + sum(waf_flops(task, resting[name]) for name, task in tasks.items())
    still = [
        (name, standstill_s(task, of[name].after))
        for name, task in tasks.items()
        if of[name].after and not task.lost_nodes and waf_flops(task, task.nodes) > 0.0
    ]
    return f"{_more(with_moves, without)}{_standing([(name, seconds) for name, seconds in still if seconds])}"


def _more(flops: float, without: float) -> str:
    if not without:
        return f"{flops:.2g} weighted FLOP/s instead of none" if flops else "no more weighted FLOP/s"
    percent = 100.0 * (flops / without - 1.0)
    text = f"{abs(percent):.2g}" if abs(percent) < 100.0 else f"{abs(percent):.0f}"
    if float(text) < 1e-6:
        return "no less weighted FLOP/s"
    return f"{text} % {'more' if percent > 0 else 'less'} weighted FLOP/s"


def _standing(still: Sequence[tuple[str, float]]) -> str:
    if not still:
        return ""
    if len(still) > NAMED:
        return f" for {_duration(sum(seconds for _, seconds in still))} of standing still in {len(still)} tasks"
    *first, last = [f"{_duration(seconds)} of {name}" for name, seconds in still]
    return f" for {', '.join(first)}{' and ' if first else ''}{last} standing still"


def _resting(task: Task) -> int:
    """How many nodes the task uses of those that it holds, if it gets and gives none."""
    if task.can_have(task.held_nodes):
        return task.held_nodes
    least, most = -(-task.min_nodes // task.unit_nodes), min(task.held_nodes, task.most_nodes) // task.unit_nodes
    rates = task.rates_flops[least : most + 1]
    return (least + int(np.argmax(rates))) * task.unit_nodes if rates.any() else 0


def _listed(texts: Sequence[str], separator: str, what: str) -> str:
    rest = len(texts) - NAMED
    return separator.join([*texts[:NAMED], *([f"{rest} more {what if rest > 1 else what[:-1]}"] if rest > 0 else [])])


def _nodes(count: int, kind: str = "") -> str:
    if count == 1:
        return f"an {kind}node" if kind else "a node"
    return f"{count} {kind}nodes"


def _duration(seconds: float) -> str:
    for name, length in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)):
        if seconds >= 2.0 * length:
            return f"{seconds / length:.3g} {name}"
    return f"{seconds:.3g} s"
