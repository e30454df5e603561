"""Ways to divide GPUs between jobs: the planner, and shares that know nothing of FLOP/s.

A share is made feasible so: each task gets the largest useful number that is at most its share. Then, again and again,
the task whose next useful number is the smallest multiple of its share gets that, until none fits into what is left.
A number is useful if the task runs on it, and faster than on any smaller one: so no share is spent on making a task
slower, and GPUs stay idle only where no task can use them. That is more than a plain share would do.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from _multi_task_cases import GPUS, Job, cluster_of

from unicron_elastic.planning.allocate.optimum import best_counts
from unicron_elastic.planning.model.tasks import Task
from unicron_elastic.planning.model.waf import waf_flops

Counts = dict[str, int]


def waf(jobs: list[Job], counts: Counts) -> float:
    """The sum of F over all tasks, in weighted FLOP/s."""
    return sum(waf_flops(job.task, counts[job.task.name]) for job in jobs)


def ours(jobs: list[Job], gpus: int = GPUS) -> Counts:
    """The planner's first placement: nothing runs yet, so nothing stands still and the WAF alone is maximised."""
    return best_counts(cluster_of(jobs, gpus))


def ours_all_run(jobs: list[Job], gpus: int = GPUS) -> Counts:
    """The best division in which no task waits: the planner divides what is above the minimums."""
    least = {job.task.name: job.task.min_nodes for job in jobs}
    above = [replace(job, task=_above_minimum(job.task)) for job in jobs]
    more = best_counts(cluster_of(above, gpus - sum(least.values())))
    return {name: count + more[name] for name, count in least.items()}


def _above_minimum(task: Task) -> Task:
    first = task.min_nodes // task.unit_nodes
    gained = np.maximum(task.rates_flops[first:] - task.rates_flops[first], 0.0)
    return replace(task, rates_flops=gained, min_nodes=1)


def equal(jobs: list[Job], *, hands_out_rest: bool = True) -> Counts:
    """As many GPUs for each."""
    return _feasible(jobs, [1.0] * len(jobs), hands_out_rest)


def weighted(jobs: list[Job], *, hands_out_rest: bool = True) -> Counts:
    """In proportion to weights."""
    return _feasible(jobs, [job.task.weight for job in jobs], hands_out_rest)


def sized(jobs: list[Job], *, hands_out_rest: bool = True) -> Counts:
    """In proportion to the models' parameters."""
    return _feasible(jobs, [float(job.parameters) for job in jobs], hands_out_rest)


SHARES = {"equal": equal, "weighted": weighted, "by size": sized}


def useful(task: Task, most: int) -> list[int]:
    """0, and the numbers of GPUs up to ``most`` on which the task is faster than on any smaller one."""
    found, best = [0], 0.0
    for count in range(1, most + 1):
        if task.can_have(count) and task.rate_flops(count) > best:
            found.append(count)
            best = task.rate_flops(count)
    return found


def _feasible(jobs: list[Job], parts: list[float], hands_out_rest: bool) -> Counts:
    shares = {job.task.name: GPUS * part / sum(parts) for job, part in zip(jobs, parts, strict=True)}
    possible = {job.task.name: useful(job.task, GPUS) for job in jobs}
    counts = {name: max(count for count in possible[name] if count <= share) for name, share in shares.items()}
    while hands_out_rest:
        left = GPUS - sum(counts.values())
        steps = [
            (count / shares[name], name, count)
            for name, has in counts.items()
            for count in [next((each for each in possible[name] if each > has), 0)]
            if count and count - has <= left
        ]
        if not steps:
            break
        _, name, count = min(steps)
        counts[name] = count
    return counts
