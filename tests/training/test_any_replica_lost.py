"""Replicas of several ranks are lost at any point, once and again: their ranks decide the same, and sums are exact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from seats_as_threads import MatesHere, SeatJob, parameters
from some_seeds import some_seeds
from threads_as_ranks import Buffered, here, put_threads_in_place

from unicron_elastic.training.shard import mates

STEPS, MICRO_BATCHES = 4, 8
SEEDS = some_seeds(6, of=60)


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    put_threads_in_place(monkeypatch)
    mates.make_present(cast("mates.Mates", MatesHere()))
    yield
    mates._present.clear()


def _trained(seed: int, *, replicas: int, seats: int = 2, steps: int = STEPS, **options: Any) -> None:
    job = SeatJob(seed, replicas=replicas, seats=seats, steps=steps, **{"micro_batches": MICRO_BATCHES, **options})
    job.finish()
    found = parameters(job)
    assert len(found) >= seats
    assert all(each == job.plain.parameters for each in found), f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_replicas_that_are_left_train_as_if_nothing_had_happened(seed: int) -> None:
    _trained(seed, replicas=2 + seed % 2, deaths=1 + seed % 3, newcomers=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_new_replicas_train_as_if_nothing_had_happened(seed: int) -> None:
    _trained(seed, replicas=2 + seed % 2, seats=2 + seed % 2, deaths=1 + seed % 3, newcomers=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_trains_in_several_calls_trains_as_in_one(seed: int) -> None:
    _trained(seed, replicas=2 + seed % 2, deaths=seed % 4, newcomers=True, steps=6, totals=(2, 4, 6), reports=seed % 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_connections_break_though_nobody_is_lost(seed: int) -> None:
    _trained(seed, replicas=2 + seed % 2, deaths=1 + seed % 2, newcomers=seed % 3 > 0, is_shaky=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_some_hear_late_of_a_newcomer(seed: int) -> None:
    _trained(seed, replicas=2, deaths=1 + seed % 2, newcomers=True, is_slow_to_hear=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_those_of_a_node_that_joins_are_members_before_they_say_that_they_are_ready(seed: int) -> None:
    _trained(seed, replicas=2, deaths=1 + seed % 2, newcomers=True, joins_by_node=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_of_different_sizes(seed: int) -> None:
    counts = (8, 2, 16, 4)
    _trained(
        seed,
        replicas=2 + seed % 2,
        deaths=1 + seed % 2,
        newcomers=seed % 3 > 0,
        micro_batches=lambda step: counts[step],
        reports=seed % 2,
    )


@pytest.mark.parametrize("of", ["seat", "replica"])
def test_ranks_that_get_different_sizes_for_a_step_do_not_train_on(monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    job = SeatJob(0, replicas=2, seats=2, steps=STEPS, micro_batches=lambda _: 8, deaths=0, newcomers=False)
    for rank in job.ranks:
        rank.dies_at = None

    def count(step: int) -> int:
        rank = here.rank
        return 4 if step == 2 and (rank.seat if of == "seat" else rank.replica.number) == 1 else 8

    job.counts = count
    monkeypatch.setattr(Buffered, "check", lambda *_: None)
    in_replica = r"seat \d of this replica has [48] micro-batches in step 2, and seat \d has [48] micro-batches"
    where = in_replica if of == "seat" else "of step 2, of 4"
    with pytest.raises(AssertionError, match=where):
        job.finish()
    assert all(max(rank.trained, default=-1) < 2 for rank in job.ranks)


@pytest.mark.parametrize("of", ["seat", "replica"])
def test_ranks_that_begin_with_different_steps_do_not_train(of: str) -> None:
    job = SeatJob(0, replicas=2, seats=2, steps=STEPS, micro_batches=8, deaths=0, newcomers=False, begins_at=1)
    job.begin_of = lambda _: 1 + int(here.rank.seat if of == "seat" else here.rank.replica.number)
    where = "seat 1 of this replica begins with step 2, and seat 0 begins with step 1"
    with pytest.raises(
        AssertionError, match=where if of == "seat" else "rank 1 begins with step 2, and this rank with"
    ):
        job.finish()
    assert not any(rank.trained for rank in job.ranks)


@pytest.mark.parametrize("seed", SEEDS)
def test_replicas_that_have_loaded_a_checkpoint_of_their_own_go_on_from_there(seed: int) -> None:
    _trained(seed, replicas=2 + seed % 2, deaths=1 + seed % 2, newcomers=seed % 3 > 0, steps=7, begins_at=3)
