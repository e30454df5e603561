"""Who begins collectives late."""

from __future__ import annotations

import random

import pytest

from unicron_elastic.detection.arrivals import Arrivals, later_s


def _job(
    ranks: int, steps: int, *, per_step: int = 1, slow: int = 0, by_s: float = 0.0, who: int = 1, habit_s: float = 0.0
) -> dict[int, Arrivals]:
    """Of ``ranks`` in step; ``who`` is late ``by_s`` in the last ``slow`` steps, and rank 0 always is ``habit_s``."""
    chance = random.Random(3)
    at, begun = 0.0, {rank: [] for rank in range(ranks)}
    for step in range(steps):
        at += 0.02
        for part in range(per_step):
            for rank, times in begun.items():
                late = by_s if rank == who and step >= steps - slow and part == 0 else 0.0
                times.append(at + 0.001 * part + late + habit_s * (rank == 0) + chance.uniform(0, 0.0005))
    return {rank: Arrivals(first=7 + rank, at_s=tuple(times[rank:])) for rank, times in begun.items()}


@pytest.mark.parametrize("per_step", [1, 4])
def test_the_late_one_stands_out(per_step: int) -> None:
    found = later_s(_job(4, 40, per_step=per_step, slow=6, by_s=0.006, habit_s=0.003), per_step + 0.2, 6)
    assert found[1] == pytest.approx(0.006, abs=0.001)
    assert all(abs(found[rank]) < 0.001 for rank in (0, 2, 3))


def test_who_was_always_late_is_not_named() -> None:
    assert all(abs(late) < 0.001 for late in later_s(_job(2, 40, habit_s=0.01), 1.0, 6).values())


@pytest.mark.parametrize("steps", [0, 1, 12])
def test_too_few_steps_tell_nothing(steps: int) -> None:
    assert later_s(_job(2, steps, slow=2, by_s=0.01), 1.0, 6) == {}
    assert later_s({}, 1.0, 6) == {}


def test_ranks_that_share_no_collective_tell_nothing() -> None:
    apart = {0: Arrivals(first=0, at_s=(1.0,) * 50), 1: Arrivals(first=100, at_s=(1.0,) * 50)}
    assert later_s(apart, 1.0, 3) == {}
