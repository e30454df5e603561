"""What a plan draws at random, and how it is told in words."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.testing.chaos_plan import UNDRAWABLE, ChaosKind, RandomFaults
from unicron_elastic.testing.explain_chaos import explain
from unicron_elastic.testing.parse_chaos import parse

_RANDOMS = st.builds(
    RandomFaults,
    mtbf=st.floats(min_value=0.001, max_value=1e6),
    seed=st.integers(0, 10**17),
    kinds=st.lists(st.sampled_from(sorted(set(ChaosKind) - UNDRAWABLE, key=str)), min_size=1).map(tuple),
    restart=st.none() | st.integers(0, 3),
)


@given(_RANDOMS, st.integers(1, 10_000), st.integers(0, 3))
def test_draws_depend_on_nothing_but_their_arguments(random: RandomFaults, world_size: int, restart: int) -> None:
    first, second = (list(itertools.islice(random.draw(world_size, restart), 5)) for _ in range(2))
    assert first == second
    assert len(first) == (5 if random.restart in (None, restart) else 0)
    times = [fault.after for fault in first if fault.after is not None]
    assert times == sorted(times)
    for fault in first:
        assert fault.kind in random.kinds
        assert fault.rank in range(world_size)
        assert fault.restart == restart


def test_what_is_drawn_stays_the_same_between_versions() -> None:
    drawn = list(itertools.islice(parse("mtbf=30,seed=7,kinds=kill|hang").random[0].draw(4, 0), 4))
    assert [(fault.kind.value, fault.rank, round(fault.after or 0, 3)) for fault in drawn] == [
        ("kill", 0, 1.928),
        ("hang", 2, 17.06),
        ("hang", 0, 63.772),
        ("kill", 1, 102.927),
    ]


def test_draws_have_the_mean_and_spread_over_all_ranks() -> None:
    drawn = list(itertools.islice(RandomFaults(mtbf=30.0, kinds=(ChaosKind.KILL, ChaosKind.HANG)).draw(4, 0), 4000))
    assert drawn[-1].after is not None
    assert math.isclose(drawn[-1].after / len(drawn), 30.0, rel_tol=0.1)
    for rank in range(4):
        assert math.isclose(sum(fault.rank == rank for fault in drawn), 1000, rel_tol=0.15)
    assert math.isclose(sum(fault.kind is ChaosKind.KILL for fault in drawn), 2000, rel_tol=0.1)


def test_each_generation_and_each_world_draws_its_own() -> None:
    random = RandomFaults(mtbf=30.0)
    times = [next(random.draw(world_size, restart)).after for world_size in (2, 3) for restart in (0, 1)]
    assert len(set(times)) == 4


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "kill:rank=1,step=50",
            "Rank 1 kills itself (SIGKILL) in step 50, as the model's forward call begins, in the first generation",
        ),
        (
            "hang:rank=all,step=2,phase=before-reduce,nth=3",
            "in step 2, before the reduction of gradients begins (reduction number 3 of that step), in the first",
        ),
        (
            "exit:rank=0,code=3,phase=optimizer,restart=any",
            "Rank 0 exits with code 3 in step 1, before the optimizer changes the weights, after each restart anew.",
        ),
        (
            "sleep:rank=0,after=2.5,restart=2",
            "Rank 0 sleeps for ever in its main thread 2.5 s after it started, only after restart 2.",
        ),
        (
            "slow:rank=2,step=9,factor=3,steps=1,how=cpu",
            "Rank 2 takes 3 times as long for each step, burning CPU, for 1 step (beginning with step 9), in the first",
        ),
        ("skip:rank=0,step=4", "Rank 0 leaves out its next reduction in step 4, in the first generation only."),
        (
            "leak:rank=0,limit_mb=inf",
            "Rank 0 keeps 64 MB more of host memory after each step, without a limit (beginning with step 1), in the",
        ),
        (
            "mtbf=30,kinds=kill|hang",
            "A random rank does kill or hang at random moments, every 30 s on average (seed 0).",
        ),
    ],
)
def test_words(text: str, sentence: str) -> None:
    (found,) = explain(parse(text))
    assert sentence in found
