"""The comparison of divisions keeps its own promises, and docs/planning.md shows what the code does."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from situations import linear, plainly, task

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from _multi_task_cases import CASES, GPUS, NODE_GPUS, Job, Variant, cluster_of, jobs_of
from _multi_task_shares import SHARES, Counts, equal, ours, ours_all_run, sized, useful, waf, weighted
from multi_task import MAIN, VARIANTS, divided, faulted, lines

DOCUMENT = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
SITUATIONS = list(product(CASES, VARIANTS.values()))
POWERS = [1.0 * count if count in (1, 2, 4, 8, 16, 32, 64, 128) else 0.0 for count in range(GPUS + 1)]


def job(name: str, weight: float = 1.0, parameters: int = 1, least: int = 1) -> Job:
    """One that runs on powers of two."""
    return Job(task(name, POWERS, weight=weight, min_nodes=least), parameters)


def require_feasible(jobs: list[Job], counts: Counts) -> None:
    """Fails unless the division could be carried out."""
    assert sum(counts.values()) <= GPUS
    for each in jobs:
        count = counts[each.task.name]
        assert count == 0 or (count >= each.task.min_nodes and each.task.can_have(count)), each.task.name


@pytest.mark.parametrize(("case", "variant"), SITUATIONS)
@pytest.mark.parametrize("hands_out_rest", [True, False])
def test_no_share_earns_more(case: str, variant: Variant, hands_out_rest: bool) -> None:
    found = divided(case, variant, hands_out_rest=hands_out_rest)
    for name, counts in found.counts.items():
        require_feasible(found.jobs, counts)
        assert found.waf("ours") >= found.waf(name) * (1.0 - 1e-9), name


@pytest.mark.parametrize(("case", "variant"), SITUATIONS)
def test_with_all_jobs_running_no_share_that_runs_all_earns_more(case: str, variant: Variant) -> None:
    found = divided(case, variant)
    assert all(found.counts["all run"].values())
    for name in SHARES:
        if all(found.counts[name].values()):
            assert found.waf("all run") >= found.waf(name) * (1.0 - 1e-9), name


@pytest.mark.parametrize("case", CASES)
def test_ours_is_the_paper_s_dynamic_programme(case: str) -> None:
    jobs = jobs_of(case, MAIN)
    assert ours(jobs) == plainly(cluster_of(jobs))


@pytest.mark.parametrize("case", CASES)
def test_the_best_with_all_jobs_running(case: str) -> None:
    jobs = jobs_of(case, MAIN)
    best = np.zeros(GPUS + 1)
    for each in jobs:
        values = [(k, each.task.weight * each.task.rate_flops(k)) for k in range(GPUS + 1) if each.task.can_have(k)]
        with_it = [[best[j - k] + value for k, value in values if k <= j] for j in range(GPUS + 1)]
        best = np.array([max(sums, default=-np.inf) for sums in with_it])
    assert waf(jobs, ours_all_run(jobs)) == pytest.approx(best[-1], rel=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_whole_nodes_earn_no_more_than_gpus(case: str) -> None:
    nodes = divided(case, VARIANTS["whole nodes"])
    assert all(count % NODE_GPUS == 0 for counts in nodes.counts.values() for count in counts.values())
    assert nodes.waf("ours") <= divided(case, MAIN).waf("ours") * (1.0 + 1e-9)


@pytest.mark.parametrize("case", CASES)
def test_after_a_lost_node_the_plan_is_worth_at_least_as_much_as_changing_nothing_else(case: str) -> None:
    found = faulted(case)
    victim = next(each.task for each in jobs_of(case, MAIN) if each.task.name == found.victim)
    share = next(share for share in found.lost.shares if share.task == found.victim)
    penalty_flop = victim.weight * victim.rate_flops(share.before) * victim.transition.shrink_s
    alone_flop = found.waf_alone_flops * found.lost.running_s - penalty_flop
    assert found.lost.waf_after_flops * found.lost.running_s - found.lost.lost_flop >= alone_flop * (1.0 - 1e-9)
    assert (found.lost.nodes, found.back.nodes) == (GPUS - NODE_GPUS, GPUS)
    assert found.back.waf_after_flops == pytest.approx(found.lost.waf_before_flops)


def test_shares_are_rounded_down_and_the_rest_is_handed_out() -> None:
    jobs = [job("a"), job("b"), job("c")]
    assert equal(jobs, hands_out_rest=False) == {"a": 32, "b": 32, "c": 32}
    assert equal(jobs) == {"a": 64, "b": 32, "c": 32}
    assert weighted([job("a", weight=0.5), job("b", weight=1.5)]) == {"a": 64, "b": 64}  # b has no use for 96
    assert sized([job("a", parameters=3), job("b")]) == {"a": 64, "b": 64}


def test_a_share_below_the_minimum_waits_unless_there_is_a_rest() -> None:
    jobs = [job("a", weight=0.1, least=64), job("b", weight=1.0)]
    assert weighted(jobs, hands_out_rest=False) == {"a": 0, "b": 64}
    assert weighted(jobs) == {"a": 0, "b": 128}
    jobs = [job("a", weight=0.8, least=64), job("b", weight=1.0)]
    assert weighted(jobs, hands_out_rest=False) == {"a": 0, "b": 64}
    assert weighted(jobs) == {"a": 64, "b": 64}


def test_useful_numbers_are_those_that_bring_more() -> None:
    assert useful(task("a", [0, 1, 0, 3, 2, 3, 4]), 6) == [0, 1, 3, 6]
    assert useful(task("a", linear(4), unit_nodes=2, min_nodes=3), 7) == [0, 4, 6]


def test_the_document_has_the_tables() -> None:
    missing = [line for line in lines() if line not in DOCUMENT]
    assert not missing, "run benchmarks/multi_task.py and copy what it prints into docs/planning.md"


def test_the_document_s_example_prints_what_it_says() -> None:
    blocks = re.findall(r"```python\n(.*?)```\s*```text\n(.*?)```", DOCUMENT, re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "docs/planning.md", "exec"), names)
        assert printed.getvalue() == expected
