"""How long the lookup table of plans takes to build and to read, beside the paper's dynamic programme and HiGHS.

``planning.py``: prints a Markdown table. All three are asked for the same optimum; "all" of the other two is the time
of one event times the number of events.
"""

from __future__ import annotations

import argparse
import os
import time
import tracemalloc
from collections.abc import Callable
from statistics import median
from typing import TypeVar

import numpy as np
from _planning_cases import cluster, placed

from unicron_elastic.planning.cluster import Cluster, NodesLost, after
from unicron_elastic.planning.optimum import best_counts, exponent_of
from unicron_elastic.planning.plain import plain_optimum
from unicron_elastic.planning.table import Table, build_table
from unicron_elastic.planning.tasks import Ints
from unicron_elastic.planning.waf import IMPOSSIBLE, gains, keys

SIZES = ((128, 6), (2048, 64), (12_500, 100))
LOOKUPS = 20_000
PLAIN_OPERATIONS = 6e8  # one event of a larger size is not waited for
HIGHS_LIMIT_S = 20.0
Found = TypeVar("Found")
HIGHS_OPTIONS = 20_000  # more options than that are not solved within minutes


def main() -> None:
    """Measures each size in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="how often each table is built")
    parser.add_argument("--clusters", type=int, default=3, help="so many different clusters of each size")
    parser.add_argument("--sizes", type=int, nargs="*", default=range(len(SIZES)), help="which of the sizes, from 0 on")
    given = parser.parse_args()
    print(f"numpy {np.__version__}, load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, one used\n")
    print("| nodes x jobs | events | table, median [min, max] | one event | lookup, median | memory | plain | HiGHS |")
    print("|---|---|---|---|---|---|---|---|")
    for place in given.sizes:
        nodes, jobs = SIZES[place]
        print(row(nodes, jobs, given.clusters, given.runs), flush=True)


def row(nodes: int, jobs: int, clusters: int, runs: int) -> str:
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
    cells = [
        f"{nodes:,} x {jobs}",
        f"{min(events)} to {max(events)}",
        f"{span(median(built))} [{span(min(built))}, {span(max(built))}]",
        span(median(single)),
        span(lookup_s(tables[0])),
        f"{peak_mib(situations[0]):.0f} MiB",
        against(situations[0], len(tables[0].plans), plain),
        against(situations[0], len(tables[0].plans), highs),
    ]
    return f"| {' | '.join(cells)} |"


def lost(situation: Cluster) -> Cluster:
    """The situation in which the first task that runs has lost a node."""
    name = next(task.name for task in situation.tasks if task.nodes)
    return after(situation, NodesLost((name,)))


def lookup_s(table: Table) -> float:
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


def against(situation: Cluster, events: int, solve: Callable[[list[Ints], int], int | str]) -> str:
    """Another solver: one event, and all of them; whether it found the same value."""
    changed = lost(situation)
    rows = rows_of(changed)
    seconds, found = timed(lambda: solve(rows, changed.nodes))
    if isinstance(found, str):
        return found
    counts = best_counts(changed).values()
    ours = sum(int(row[count]) for row, count in zip(rows, counts, strict=True))
    difference = "" if found == ours else f", value {found / ours - 1.0:+.1e}"
    return f"{span(seconds)}, all {span(seconds * events)}{difference}"


def rows_of(situation: Cluster) -> list[Ints]:
    """The keys of all tasks by number of nodes."""
    found = [
        gains(each, situation.nodes, situation.running_s, is_pin_held=situation.are_pins_held)
        for each in situation.tasks
    ]
    exponent = exponent_of([float(np.abs(row[row > -np.inf]).max()) for row in found])
    return [keys(each, row, exponent) for each, row in zip(situation.tasks, found, strict=True)]


def plain(rows: list[Ints], nodes: int) -> int | str:
    """The dynamic programme of the paper, with NumPy over its inner loop."""
    operations = sum(int((row > IMPOSSIBLE).sum()) for row in rows) * nodes
    if operations > PLAIN_OPERATIONS:
        return f"not run: {operations:.0e} operations for each event"
    counts = plain_optimum(rows, nodes)
    return sum(int(row[count]) for row, count in zip(rows, counts, strict=True))


def highs(rows: list[Ints], nodes: int) -> int | str:
    """An integer programme: a binary variable for each option, one option for each task."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError:
        return "not run: no scipy here"
    options = [np.flatnonzero(row > IMPOSSIBLE) for row in rows]
    if sum(map(len, options)) > HIGHS_OPTIONS:
        return f"not run: {sum(map(len, options)):,} options"
    values = np.concatenate([row[option] for row, option in zip(rows, options, strict=True)])
    places = np.repeat(np.arange(len(rows)), [len(option) for option in options])
    one = csr_array((np.ones(len(values)), (places, np.arange(len(values)))))
    found = milp(
        -values / np.abs(values).max(),
        integrality=np.ones(len(values)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one, 1, 1),
            LinearConstraint(np.concatenate(options)[None, :].astype(float), -np.inf, nodes),
        ],
        options={"time_limit": HIGHS_LIMIT_S, "mip_rel_gap": 0.0},
    )
    if found.x is None:
        return f"nothing in {HIGHS_LIMIT_S:.0f} s"
    return int(values[found.x > 0.5].sum())


def timed(call: Callable[[], Found]) -> tuple[float, Found]:
    """Seconds, and what was found."""
    began = time.perf_counter()
    found = call()
    return time.perf_counter() - began, found


def span(seconds: float) -> str:
    """A time in the unit that suits it."""
    for unit, length in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 1e-9:.0f} ns"


if __name__ == "__main__":
    main()
