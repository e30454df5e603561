"""How fast the simulator is, whether a seed means the same bytes, and what a large cluster asks of the control plane.

    python benchmarks/simulation.py                # about a minute
    python benchmarks/simulation.py --large 28     # 100,000 GPUs for 28 days as well: two minutes

Prints Markdown. Times are of one process, without its start and imports; rates of faults are those of presets. Those of
large clusters are of its processor, so that other programs count little; what it stands by the wall is beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import statistics
import time
from collections.abc import Iterator

import numpy as np

from unicron_elastic.planning.coordinate import coordinator
from unicron_elastic.planning.coordinate.coordinator import CoordinatorState, PublishPlan, handle
from unicron_elastic.simulation.model.scenario import Generated, Scenario
from unicron_elastic.simulation.model.study_result import SeedResult
from unicron_elastic.simulation.policies.policies import COMPARED, POLICIES
from unicron_elastic.simulation.study.job_set import gpt
from unicron_elastic.simulation.study.report import to_json
from unicron_elastic.simulation.study.run import Simulation
from unicron_elastic.simulation.study.scenario_file import preset_scenario
from unicron_elastic.simulation.study.studies import study

NODE_GPUS = 8
SIZES = ("70B", "175B", "175B", "70B")
WEIGHTS = (0.5, 1.0, 1.5, 2.0)
BATCH = 2048  # samples of 2,048 tokens: 4 million tokens a step
CLUSTERS = ((128, 4), (1024, 10), (4096, 32), (12_500, 100))  # nodes and jobs
DAY_S = 86_400.0


def large(nodes: int, jobs: int, days: float) -> Scenario:
    """Jobs of 70B and 175B, each on half as many nodes again as its equal share at most; RSC-1's rate of faults."""
    most = max(6, 3 * nodes // jobs // 2)
    specs = tuple(
        gpt(f"job-{n:03}", SIZES[n % 4], weight=WEIGHTS[n // 4 % 4], max_nodes=most, batch=BATCH) for n in range(jobs)
    )
    source = Generated(preset="rsc-1", duration_s=days * DAY_S)
    return Scenario(name=f"{nodes} nodes", nodes=nodes, jobs=specs, source=source)


def timed(scenario: Scenario, policy: str, seed: int = 0) -> tuple[float, Simulation, SeedResult]:
    """Seconds, what was simulated, and what it came to."""
    history = scenario.history(seed)
    begun = time.perf_counter()
    simulation = Simulation(scenario, POLICIES[policy], seed, history)
    result = simulation.run()
    return time.perf_counter() - begun, simulation, result


def lines(rounds: int, large_days: float, cluster_days: float) -> Iterator[str]:
    """All tables."""
    load = os.getloadavg()[0]
    yield f"{os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}; load average {load:.1f}"
    yield ""
    yield from _small(rounds)
    yield ""
    yield from _bytes()
    yield ""
    yield from _control_plane(cluster_days, large_days)


def _small(rounds: int) -> Iterator[str]:
    yield "| 128 GPUs, six jobs, one seed; s | trace-a, 8 weeks | trace-b, 1 week |"
    yield "|---|---|---|"
    scenarios = [preset_scenario(name) for name in ("trace-a", "trace-b")]
    for policy in COMPARED:
        cells = []
        for scenario in scenarios:
            timed(scenario, policy)  # rates of jobs are computed once
            found = [timed(scenario, policy, seed)[0] for seed in range(rounds)]
            cells.append(f"{statistics.median(found):.3f} [{min(found):.3f} - {max(found):.3f}] ({rounds})")
        yield f"| {policy} | {' | '.join(cells)} |"


def _bytes() -> Iterator[str]:
    yield "| the same seeds give the same bytes | SHA-256 of all results |"
    yield "|---|---|"
    scenario = preset_scenario("trace-b")
    for processes in (1, 1, 2):
        text = to_json(study(scenario, ["unicron", "megatron"], [0, 1], processes=processes), curves=True)
        yield f"| {processes} process{'es' * (processes > 1)} | {hashlib.sha256(text.encode()).hexdigest()[:16]} |"


class Decisions:
    """Listens to the coordinator of a simulation: how long it thinks, and how large its plans are."""

    def __init__(self) -> None:
        self.plan_s: list[float] = []
        self.look_s: list[float] = []
        self.plan_bytes: list[int] = []

    def handle(self, state: CoordinatorState, event: coordinator.Event) -> coordinator.Outcome:
        """As the coordinator's own."""
        begun = time.process_time()
        outcome = handle(state, event)
        took_s = time.process_time() - begun
        plans = [each.published for each in outcome[1] if isinstance(each, PublishPlan)]
        (self.plan_s if plans else self.look_s).append(took_s)
        if plans and len(self.plan_s) % 50 == 1:  # to write it takes longer than to make it
            self.plan_bytes.append(len(plans[0].to_json()))
        return outcome


def _control_plane(days: float, large_days: float) -> Iterator[str]:
    yield "| GPUs, jobs | days | s of processor (wall) | faults/day | looks/day | plans/day | nodes moved/day | WAF |"
    yield "|---|---|---|---|---|---|---|---|"
    asked = []
    for nodes, jobs in CLUSTERS:
        covered = large_days if nodes == CLUSTERS[-1][0] else days
        if not covered:
            continue
        scenario, decisions = large(nodes, jobs, covered), Decisions()
        begun_s = time.process_time()
        took_s, simulation, result = timed(scenario, "unicron")
        spent_s = time.process_time() - begun_s
        start = _listened(large(nodes, jobs, 1e-6), Decisions())
        counts = (len(result.incidents), simulation.looks, result.plans, result.moves)
        daily = " | ".join(f"{count / covered:,.1f}" for count in counts)
        size = f"{nodes * NODE_GPUS:,}, {jobs}"
        yield f"| {size} | {covered:g} | {spent_s:.1f} ({took_s:.1f}) | {daily} | {result.waf_ratio:.1%} |"
        _listened(large(nodes, jobs, min(covered, 2.0)), decisions)
        asked.append(_asked(size, decisions, start, (simulation.writes - start) / covered))
    yield ""
    yield "| GPUs, jobs | to make a plan, ms | to look, ms | a plan, KiB | writes until all work | writes/day then |"
    yield "|---|---|---|---|---|---|"
    yield from asked


def _listened(scenario: Scenario, decisions: Decisions) -> int:
    """Simulates it with somebody who listens; how much was written."""
    coordinator.handle = decisions.handle  # type: ignore[assignment]
    try:
        return timed(scenario, "unicron")[1].writes
    finally:
        coordinator.handle = handle


def _asked(size: str, decisions: Decisions, start: int, daily: float) -> str:
    times = " | ".join(_milliseconds(found) for found in (decisions.plan_s, decisions.look_s))
    return f"| {size} | {times} | {max(decisions.plan_bytes) / 1024:.0f} | {start:,} | {daily:,.0f} |"


def _milliseconds(found_s: list[float]) -> str:
    low, middle, high = (1e3 * float(each) for each in np.quantile(found_s, (0.1, 0.5, 0.9)))
    return f"{middle:.1f} [{low:.1f} - {high:.1f}] ({len(found_s)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="seeds for each figure of 128 GPUs")
    parser.add_argument("--days", type=float, default=7.0, help="simulated days of the clusters but the largest")
    parser.add_argument("--large", type=float, default=0.0, help="simulated days of the largest; 0: it is left out")
    options = parser.parse_args()
    for line in lines(options.rounds, options.large, options.days):
        print(line, flush=True)


if __name__ == "__main__":
    main()
