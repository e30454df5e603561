"""Many seeds and policies, in parallel processes; and what one assumption changes.

The results do not depend on how many processes there are: each seed of each policy is simulated by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from types import MappingProxyType

from unicron_elastic.base.require import require
from unicron_elastic.simulation.history.events import History
from unicron_elastic.simulation.model.scenario import Generated, Scenario
from unicron_elastic.simulation.model.study_result import PolicyResult, SeedResult, StudyResult
from unicron_elastic.simulation.policies.policies import POLICIES
from unicron_elastic.simulation.study.run import simulate

Done = Callable[[], None]

# What can be varied, with values that bracket what the sources have.
VARIED: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "checkpoint-interval": (300.0, 900.0, 1800.0, 3600.0, 7200.0),
        "fault-rate": (0.25, 0.5, 1.0, 2.0, 4.0),
        "spares": (0.0, 1.0, 2.0, 4.0),
    }
)


def study(
    scenario: Scenario,
    policies: Sequence[str],
    seeds: Sequence[int],
    *,
    processes: int = 1,
    done: Done = lambda: None,
    told: str = "",
) -> StudyResult:
    """All ``policies`` on the histories of all ``seeds``; ``done`` is called after each of them.

    Raises ``ValueError`` for an unknown policy, and for a history that cannot be.
    """
    for name in policies:
        require(name in POLICIES, f"there is no policy {name!r}: known are {', '.join(POLICIES)}")
    require(len(seeds) > 0 and len(policies) > 0, "there is nothing to simulate: give a policy and a seed")
    history = scenario.history(seeds[0])
    tasks = [(scenario, name, seed) for name in policies for seed in seeds]
    found: list[SeedResult] = []
    for result in _results(tasks, processes):
        found.append(result)
        done()
    by_policy = [found[start : start + len(seeds)] for start in range(0, len(found), len(seeds))]
    return StudyResult(
        scenario=scenario.name,
        history=f"{history.name}: {_source(scenario, history, seeds[0])}",
        nodes=scenario.all_nodes,
        gpus=scenario.all_nodes * scenario.gpus_per_node,
        policies=tuple(
            PolicyResult(policy=name, seeds=tuple(each)) for name, each in zip(policies, by_policy, strict=True)
        ),
        varied=told,
    )


def study_count(policies: Sequence[str], seeds: Sequence[int]) -> int:
    """How often ``study`` calls ``done``."""
    return len(policies) * len(seeds)


def varied(scenario: Scenario, what: str, value: float) -> tuple[Scenario, str]:
    """The scenario with another value, and that in words. Raises ``ValueError`` for what cannot be varied there."""
    if what == "checkpoint-interval":
        return replace(scenario, checkpoint_s=value), f"checkpoint interval {value:g} s"
    if what == "spares":
        require(value == int(value), f"{value:g} spares: it must be a whole number")
        return replace(scenario, spares=int(value)), f"spares {value:g} nodes"
    require(what == "fault-rate", f"{what!r} cannot be varied: known are {', '.join(VARIED)}")
    require(
        isinstance(scenario.source, Generated),
        "the fault rate of a history that is replayed is as it was: use a preset",
    )
    assert isinstance(scenario.source, Generated)
    factor = scenario.source.fault_factor * value
    return replace(scenario, source=replace(scenario.source, fault_factor=factor)), f"fault rate {value:g} times"


def _source(scenario: Scenario, history: History, seed: int) -> str:
    """Say of what the faults are made: that of one seed, but for the seed."""
    is_generated = isinstance(scenario.source, Generated)
    return history.source.replace(f"; seed {seed}", "", 1) if is_generated else history.source


def _results(tasks: Sequence[tuple[Scenario, str, int]], processes: int) -> Iterator[SeedResult]:
    if processes == 1 or len(tasks) == 1:
        yield from map(_one, tasks)
        return
    # Not forked: a progress bar has a thread.
    with ProcessPoolExecutor(min(processes, len(tasks)), mp_context=get_context("spawn")) as pool:
        yield from pool.map(_one, tasks)


def _one(task: tuple[Scenario, str, int]) -> SeedResult:
    scenario, name, seed = task
    return simulate(scenario, POLICIES[name], seed)
