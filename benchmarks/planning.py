"""How long the lookup table of plans takes to build and to read, and how other planners do with the same jobs.

``planning.py``: prints two Markdown tables. In the first the paper's dynamic programme and HiGHS are asked for the same
optimum; "all" is the time of one event times the number of events. In the second all jobs are placed from nothing by
planners that maximise something else, or search differently: the WAF of what they choose, relative to ours.
"""

from __future__ import annotations

import argparse
import os
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from statistics import median

import numpy as np
from _planning_cases import cluster, placed
from _planning_peers import (
    PLANNERS,
    SCIPY,
    Counts,
    Patience,
    Planner,
    chosen,
    earned_flops,
    missing,
    timed,
    unweighted,
)

from unicron_elastic.planning.allocate.cluster import Cluster, NodesLost, after
from unicron_elastic.planning.allocate.optimum import best_counts, exponent_of
from unicron_elastic.planning.allocate.paper import plain_optimum
from unicron_elastic.planning.allocate.plan_table import PlanTable, build_table
from unicron_elastic.planning.model.tasks import Ints
from unicron_elastic.planning.model.waf import IMPOSSIBLE, gains, keys

SIZES = ((128, 6), (2048, 64), (12_500, 100))
LOOKUPS = 20_000
PLACEMENTS = 5


def main() -> None:
    """Measures each size in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="how often each table is built")
    parser.add_argument("--clusters", type=int, default=3, help="so many different clusters of each size")
    parser.add_argument("--sizes", type=int, nargs="*", default=range(len(SIZES)), help="which of the sizes, from 0 on")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for which another planner is waited for")
    given = parser.parse_args()
    patience = Patience(given.limit)
    print(f"numpy {np.__version__}, load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, one used\n")
    print("| nodes x jobs | events | table, median [min, max] | one event | lookup, median | memory | plain | HiGHS |")
    print("|---|---|---|---|---|---|---|---|")
    for place in given.sizes:
        nodes, jobs = SIZES[place]
        print(row(nodes, jobs, given.clusters, given.runs, patience), flush=True)
    print("\n| nodes x jobs | planner | maximises | one plan | jobs that run | WAF / ours | all weights 1 |")
    print("|---|---|---|---|---|---|---|")
    for place in given.sizes:
        for line in beside(*SIZES[place], patience):
            print(line, flush=True)


def row(nodes: int, jobs: int, clusters: int, runs: int, patience: Patience) -> str:
    """One size, as a line of the table."""
    waiting = [cluster(nodes, jobs, seed) for seed in range(clusters)]
    situations = [placed(each, best_counts(each)) for each in waiting]
    built, tables = [], []
    for situation in situations:
        for _ in range(runs):
            began = time.perf_counter()
            table = build_table(situation)
            built.append(time.perf_counter() - began)
        tables.append(table)
    events = [len(table.plans) for table in tables]
    single = [timed(lambda each=each: best_counts(lost(each)))[0] for each in situations]
    return cells(
        f"{nodes:,} x {jobs}",
        f"{min(events)} to {max(events)}",
        f"{span(median(built))} [{span(min(built))}, {span(max(built))}]",
        span(median(single)),
        span(lookup_s(tables[0])),
        f"{peak_mib(situations[0]):.0f} MiB",
        against(situations[0], len(tables[0].plans), plain_optimum, patience),
        not_run(SCIPY) or against(situations[0], len(tables[0].plans), highs, patience),
    )


def beside(nodes: int, jobs: int, patience: Patience) -> Iterator[str]:
    """All planners on one size, each a line of the other table."""
    waiting = cluster(nodes, jobs)
    seconds = median(timed(lambda: best_counts(waiting))[0] for _ in range(PLACEMENTS))
    ours = best_counts(waiting)
    alike = best_counts(unweighted(waiting))
    size = f"{nodes:,} x {jobs}"
    yield cells(size, "ours", "WAF", span(seconds), running(ours), "1", "1")
    for planner in PLANNERS:
        yield cells(size, planner.name, planner.maximises, *placing(planner, waiting, ours, alike, patience))


def placing(planner: Planner, waiting: Cluster, ours: Counts, alike: Counts, patience: Patience) -> tuple[str, ...]:
    """How long it takes, how many jobs run, and its WAF relative to ours, with weights and without."""
    found = not_run(planner.modules) or patience.measured(planner.modules, lambda: planner.counts(waiting))
    if isinstance(found, str):
        return found, "", "", ""
    seconds, counts = found
    equal = unweighted(waiting)
    same = patience.measured(planner.modules, lambda: planner.counts(equal)) if planner.reads_weights else found
    return (
        span(seconds),
        running(counts),
        f"{earned_flops(waiting, counts) / earned_flops(waiting, ours):.3f}",
        same if isinstance(same, str) else f"{earned_flops(equal, same[1]) / earned_flops(equal, alike):.3f}",
    )


def running(counts: Counts) -> str:
    """How many jobs got anything, and how many nodes they got."""
    return f"{sum(count > 0 for count in counts.values())} on {sum(counts.values()):,}"


def not_run(modules: tuple[str, ...]) -> str:
    """Why a planner is not run, if it is not."""
    package = missing(modules)
    return f"not run: {package} is not installed" if package else ""


def cells(*texts: str) -> str:
    """One line of a table."""
    return f"| {' | '.join(texts)} |"


def lost(situation: Cluster) -> Cluster:
    """The situation in which the first task that runs has lost a node."""
    name = next(task.name for task in situation.tasks if task.nodes)
    return after(situation, NodesLost((name,)))


def lookup_s(table: PlanTable) -> float:
    """The median of many lookups of any event."""
    events = list(table.plans)
    found = []
    for number in range(LOOKUPS):
        event = events[number % len(events)]
        began = time.perf_counter()
        table.plan(event)
        found.append(time.perf_counter() - began)
    return median(found)


def peak_mib(situation: Cluster) -> float:
    """The most memory that building a table takes at any time."""
    tracemalloc.start()
    build_table(situation)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def against(situation: Cluster, events: int, solve: Callable[[list[Ints], int], list[int]], patience: Patience) -> str:
    """Another solver: one event, and all of them; whether it found the same value."""
    changed = lost(situation)
    rows = rows_of(changed)
    measured = patience.measured((solve.__name__,), lambda: solve(rows, changed.nodes))
    if isinstance(measured, str):
        return measured
    seconds, counts = measured
    found, ours = value(rows, counts), value(rows, best_counts(changed).values())
    difference = "" if found == ours else f", value {found / ours - 1.0:+.1e}"
    return f"{span(seconds)}, all {span(seconds * events)}{difference}"


def value(rows: list[Ints], counts: Iterable[int]) -> int:
    """The sum of keys."""
    return sum(int(row[count]) for row, count in zip(rows, counts, strict=True))


def rows_of(situation: Cluster) -> list[Ints]:
    """The keys of all tasks by number of nodes."""
    found = [
        gains(each, situation.nodes, situation.running_s, is_pin_held=situation.are_pins_held)
        for each in situation.tasks
    ]
    exponent = exponent_of([float(np.abs(row[row > -np.inf]).max()) for row in found])
    return [keys(each, row, exponent) for each, row in zip(situation.tasks, found, strict=True)]


def highs(rows: list[Ints], nodes: int) -> list[int]:
    """An integer programme: a binary variable for each option, one option for each task."""
    options = [np.flatnonzero(row > IMPOSSIBLE) for row in rows]
    return chosen(options, [row[option].astype(float) for row, option in zip(rows, options, strict=True)], nodes)


def span(seconds: float) -> str:
    """A time in the unit that suits it."""
    if seconds >= 1000.0:
        return f"{round(seconds, -1):,.0f} s"
    for unit, length in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 1e-9:.0f} ns"


if __name__ == "__main__":
    main()
