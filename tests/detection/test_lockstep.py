"""Who left out a collective, from when ranks ended their steps and began their collectives."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.detection.arrivals import Arrivals, Beats
from unicron_elastic.detection.lockstep import PATIENCE_LOOKS, Lockstep, Skip, followed, skip

STEP_S = 0.02


def job(
    ranks: int = 2,
    steps: int = 40,
    *,
    per_step: int = 1,
    skips: dict[tuple[int, int], int] | None = None,  # (rank, step): how many
    evaluations: tuple[int, ...] = (),  # steps before which all ranks do ten collectives more
    no_optimizer: tuple[int, int] | None = None,  # (rank, step): its collectives are done, its optimizer is not
    besides: set[tuple[int, int]] | None = None,  # (rank, step) that takes no time
    op: str = "all_reduce",
) -> dict[int, tuple[Arrivals, Beats]]:
    """Each rank by itself, as times do not matter beyond their order; the first 7 collectives are not on record."""
    chance = random.Random(5)
    told = {}
    for rank in range(ranks):
        now, number, begun, ended = 1000.0, 0, [], []
        for step in range(1, steps + 1):
            count = per_step - (skips or {}).get((rank, step), 0) + 10 * (step in evaluations)
            if (rank, step) not in (besides or set()):
                now += chance.uniform(0.5, 0.6) * STEP_S
            for _ in range(count):
                now += chance.uniform(0.2, 0.4) * STEP_S / (count + 1)
                number += 1
                begun.append(now)
            now += 0.001
            if no_optimizer != (rank, step):
                ended.append(now)
        begun.append(now + 0.001)  # of the step that is being made
        told[rank] = (
            Arrivals(first=8, at_s=tuple(begun[7:]), ops=(op,) * (len(begun) - 7)),
            Beats(first=3, at_s=tuple(ended[2:])),
        )
    return told


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("per_step", [1, 4])
@pytest.mark.parametrize("late", [2, 10])
def test_who_left_one_out_is_named_with_its_step(ranks: int, per_step: int, late: int) -> None:
    found = skip(job(ranks, 40, per_step=per_step, skips={(ranks - 1, 40 - late): 1}))
    assert found == Skip(rank=ranks - 1, step=40 - late, missing=1, op="all_reduce")


def test_a_step_without_any_of_several_collectives_is_told_as_such() -> None:
    assert skip(job(2, 40, per_step=4, skips={(0, 30): 4})) == Skip(rank=0, step=30, missing=4, op="all_reduce")


def test_an_evaluation_is_the_same_for_all() -> None:
    assert skip(job(3, 60, evaluations=(20, 50))) is None
    assert skip(job(3, 60, evaluations=(20, 50), skips={(1, 55): 1})) == Skip(1, 55, 1, "all_reduce")


@pytest.mark.parametrize(
    "told",
    [
        job(2, 40),
        job(2, 40, skips={(1, 39): 1}),  # two steps are no proof
        job(2, 40, skips={(0, 30): 1, (1, 30): 1}),  # both did
        job(2, 40, skips={(1, 30): 1}, besides={(1, 30)}),  # a step of the optimizer beside the training
        job(2, 40, no_optimizer=(1, 30)),  # a gradient that overflowed on one rank: its collectives are all there
        job(2, 40, skips={(1, 30): 1, (1, 32): 1, (1, 34): 1}),  # it goes on to drift
        job(2, 6, skips={(1, 3): 1}),
        {},
        {0: (Arrivals(first=0, at_s=()), Beats(first=0, at_s=()))},
        {rank: (Arrivals(first=1, at_s=(1.0, 2.0)), Beats(first=rank * 50, at_s=(1.5,))) for rank in range(2)},
    ],
)
def test_what_is_not_plain_names_nobody(told: dict[int, tuple[Arrivals, Beats]]) -> None:
    assert skip(told) is None


TIMES = st.lists(st.floats(0, 100), max_size=30).map(sorted).map(tuple)
TOLD = st.tuples(
    st.builds(Arrivals, first=st.integers(0, 50), at_s=TIMES, ops=st.just(("a", "b"))),
    st.builds(Beats, first=st.integers(0, 50), at_s=TIMES),
)


@given(st.dictionaries(st.integers(0, 4), TOLD, max_size=4))
def test_whatever_is_told_does_no_harm(told: dict[int, tuple[Arrivals, Beats]]) -> None:
    found = skip(told)
    assert found is None or found.missing > 0


def looked(*looks: tuple[int, ...], lockstep: Lockstep | None = None) -> Lockstep:
    lockstep = lockstep or Lockstep()
    for number, steps in enumerate(looks):
        lockstep = followed(lockstep, steps, float(number))
    return lockstep


def in_step(count: int, ahead: int = 0, begin: int = 100) -> list[tuple[int, int]]:
    return [(number, number + ahead) for number in range(begin, begin + count)]


def test_it_is_asked_when_a_rank_stays_ahead() -> None:
    assert looked(*in_step(50)).asked_at is None
    assert looked(*in_step(5), *in_step(PATIENCE_LOOKS - 1, 1, 110)).asked_at is None
    apart = looked(*in_step(5), *in_step(PATIENCE_LOOKS, 1, 110))
    assert apart.asked_at is not None
    assert not apart.is_curious


def test_a_rank_ahead_for_a_moment_is_nothing() -> None:
    assert looked(*in_step(5), *in_step(2, 1, 110), *in_step(2, 0, 120), *in_step(2, 1, 130)).asked_at is None


def test_a_look_at_which_somebody_stands_does_not_count() -> None:
    assert looked(*in_step(5), *[(110, 111 + number) for number in range(50)]).asked_at is None


def test_what_nobody_explains_is_asked_less_and_less_and_then_usual() -> None:
    lockstep, asked, begin = looked(*in_step(5)), [], 110
    for number in range(400):
        lockstep = followed(lockstep, (begin + number, begin + number + 1), float(number))
        if lockstep.asked_at is not None:
            asked.append(number)
            lockstep = lockstep.unexplained()
    assert len(asked) == 6
    assert lockstep.usual == (0, 1)
