"""Other planners for the same jobs: Pollux as AdaptDL ships it, and integer programmes with scipy's HiGHS.

None is needed: one whose package is missing says so. Each gets jobs that wait, so that it decides everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing import get_context
from typing import TypeVar

import numpy as np

from unicron_elastic.planning.allocate.cluster import Cluster
from unicron_elastic.planning.model.tasks import Floats, Ints, Task
from unicron_elastic.planning.model.waf import waf_flops

NODE_WORKERS = 8  # Pollux places replicas on machines; here a worker is a GPU of one
SIA_POWER, SIA_WAITING = -0.5, 1.1  # p and lambda_n as Sia's artifacts have them
CYCLES = 1  # AdaptDL has one every minute, each from the placement before
Counts = dict[str, int]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Planner:
    """One of the others. ``modules``: what it needs."""

    name: str
    maximises: str
    modules: tuple[str, ...]
    counts: Callable[[Cluster], Counts]
    reads_weights: bool = True


def missing(modules: Sequence[str]) -> str:
    """The package that has to be installed first, if any; imports what is there, so that no time includes it."""
    for module in modules:
        try:
            import_module(module)
        except ImportError:
            return module.partition(".")[0]
    return ""


def timed(call: Callable[[], Found]) -> tuple[float, Found]:
    """Seconds, and what was found."""
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


class Patience:
    """Waits ``limit_s`` at most, and does not try the same search on more once that was not enough."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.given_up: set[tuple[str, ...]] = set()

    def measured(self, search: tuple[str, ...], call: Callable[[], Found]) -> tuple[float, Found] | str:
        """As ``timed``, in a process that can be ended: not every solver minds a limit. Or why there is no result."""
        if search in self.given_up:
            return "not tried: too slow before"
        context = get_context("fork")
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=lambda: there.send(timed(call)), daemon=True)
        child.start()
        there.close()
        try:
            if here.poll(self.limit_s):
                return here.recv()
        finally:
            child.kill()
            child.join()
        self.given_up.add(search)
        return f"not within {self.limit_s:.0f} s"


def unweighted(situation: Cluster) -> Cluster:
    """The same with all weights 1."""
    return replace(situation, tasks=tuple(replace(task, weight=1.0) for task in situation.tasks))


def earned_flops(situation: Cluster, counts: Counts) -> float:
    """The WAF, if each task uses as many of its nodes as it earns most with."""
    return sum(float(usable(task)[counts.get(task.name, 0) // task.unit_nodes]) for task in situation.tasks)


def usable(task: Task) -> Floats:
    """F by number of units, where a task may leave some idle: without it Pollux would meet many rates of 0."""
    values = [waf_flops(task, units * task.unit_nodes) for units in range(len(task.rates_flops))]
    return np.maximum.accumulate(np.array(values))


def chosen(options: Sequence[Ints], values: Sequence[Floats], nodes: int) -> list[int]:
    """One option for each task, and at most ``nodes`` in all: the best, as far as HiGHS tells values apart."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    counts, gained = np.concatenate(options), np.concatenate(values)
    places = np.repeat(np.arange(len(options)), [len(option) for option in options])
    one = csr_array((np.ones(len(counts)), (places, np.arange(len(counts)))))
    found = milp(
        -gained / np.abs(gained).max(),
        integrality=np.ones(len(counts)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one, 1, 1),
            LinearConstraint(csr_array(counts[None, :].astype(float)), -np.inf, nodes),
        ],
        options={"mip_rel_gap": 0.0},
    )
    return [int(count) for count in counts[found.x > 0.5]]


def powers_of_two(task: Task, nodes: int) -> Ints:
    """The configurations of a task: powers of two on which it runs."""
    counts = 2 ** np.arange(nodes.bit_length())
    return np.array([count for count in counts if count <= nodes and task.can_have(int(count))], dtype=np.int64)


def fair_values(task: Task, counts: Ints) -> Floats:
    """What Sia's objective gains against waiting: w * (lambda_n - A**p), A relative to the slowest configuration."""
    rates = np.array([task.rate_flops(int(count)) for count in counts])
    return task.weight * (SIA_WAITING - (rates / rates.min(initial=np.inf)) ** SIA_POWER)


def weighted_values(task: Task, counts: Ints) -> Floats:
    """F."""
    return np.array([waf_flops(task, int(count)) for count in counts])


def programme(values: Callable[[Task, Ints], Floats]) -> Callable[[Cluster], Counts]:
    """An integer programme over powers of two."""

    def counts(situation: Cluster) -> Counts:
        options = [powers_of_two(task, situation.nodes) for task in situation.tasks]
        gained = [values(task, option) for task, option in zip(situation.tasks, options, strict=True)]
        waiting = np.zeros(1, dtype=np.int64)
        found = chosen(
            [np.concatenate((waiting, option)) for option in options],
            [np.concatenate((waiting, value)) for value in gained],
            situation.nodes,
        )
        return dict(zip((task.name for task in situation.tasks), found, strict=True))

    return counts


def speedups(situation: Cluster) -> dict[str, Floats]:
    """What Pollux is meant to be told: the rate by replicas, relative to one."""
    return {task.name: usable(replace(task, weight=1.0)) / task.rates_flops[1] for task in situation.tasks}


def values_as_speedups(situation: Cluster) -> dict[str, Floats]:
    """F in the place of speed-ups. Pollux multiplies by the resources of a replica, hence the division."""
    least = min(task.weight * task.rates_flops[1] / task.unit_nodes for task in situation.tasks)
    return {task.name: usable(task) / task.unit_nodes / least for task in situation.tasks}


def pollux(told: Callable[[Cluster], dict[str, Floats]]) -> Callable[[Cluster], Counts]:
    """``CYCLES`` of AdaptDL's own ``PolluxPolicy.optimize``, from nothing."""

    def counts(situation: Cluster) -> Counts:
        with old_numpy_names():
            from adaptdl_sched.policy.pollux import PolluxPolicy
            from adaptdl_sched.policy.utils import JobInfo, NodeInfo
            from pymoo.config import Config

            Config.show_compile_hint = False
            np.random.seed(0)
            gained = told(situation)
            jobs = {
                task.name: JobInfo(
                    {"worker": task.unit_nodes},
                    lambda _, replicas, table=gained[task.name]: table[replicas],
                    number,
                    min_replicas=0,  # the speed-up is 0 below: its mutation would put all minimums on the first nodes
                    max_replicas=task.most_nodes // task.unit_nodes,
                )
                for number, task in enumerate(situation.tasks)
            }
            places = range(0, situation.nodes, NODE_WORKERS)
            nodes = {
                f"{place:06}": NodeInfo({"worker": min(NODE_WORKERS, situation.nodes - place)}, preemptible=False)
                for place in places
            }
            no_more = NodeInfo({"worker": 0}, preemptible=False)  # or it would plan for a cluster of twice the size
            policy, placed = PolluxPolicy(), {}
            for _ in range(CYCLES):
                placed, _ = policy.optimize(jobs, nodes, placed, no_more)
        return {task.name: len(placed.get(task.name, ())) * task.unit_nodes for task in situation.tasks}

    return counts


@contextmanager
def old_numpy_names() -> Iterator[None]:
    """``np.int`` and ``np.float``, which AdaptDL and its pymoo use and NumPy has no longer."""
    names = {"int": int, "float": float}
    for name, meant in names.items():
        setattr(np, name, meant)
    try:
        yield
    finally:
        for name in names:
            delattr(np, name)


SCIPY = ("scipy.optimize", "scipy.sparse")
ADAPTDL = ("pymoo.optimize", "adaptdl_sched.policy.pollux")
PLANNERS = (
    Planner("Sia's programme", "w * A**p, p = -0.5", SCIPY, programme(fair_values)),
    Planner("powers of two", "WAF", SCIPY, programme(weighted_values)),
    Planner("Pollux", "speed-ups", ADAPTDL, pollux(speedups), reads_weights=False),
    Planner("Pollux told F", "WAF", ADAPTDL, pollux(values_as_speedups)),
)
