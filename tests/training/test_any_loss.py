"""Ranks are lost at any point, once and again: each step applies the gradients of exactly its micro-batches."""

from __future__ import annotations

import pytest
import threads_as_ranks
from some_seeds import some_seeds
from threads_as_ranks import Changes, Counts, Job, put_threads_in_place

from unicron_elastic.base.world import Member, World
from unicron_elastic.engine.protocol import agreement, handle
from unicron_elastic.engine.protocol.agreement import NoStateLeft
from unicron_elastic.training.group import arrival
from unicron_elastic.worker.instructions import Invitation

STEPS, MICRO_BATCHES = 4, 8


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    put_threads_in_place(monkeypatch)


def _trained(
    seed: int,
    *,
    ranks: int,
    deaths: int,
    newcomers: bool,
    steps: int = STEPS,
    steps_behind: int = 0,
    micro_batches: int | Counts = MICRO_BATCHES,
    changes: Changes | None = None,
    totals: tuple[int, ...] = (),
    reports: int = 0,
    is_shaky: bool = False,
    is_torn: bool = False,
    is_slow_to_hear: bool = False,
    begins_at: int = 0,
) -> None:
    job = Job(
        seed,
        ranks=ranks,
        deaths=deaths,
        newcomers=newcomers,
        steps=steps,
        micro_batches=micro_batches,
        steps_behind=steps_behind,
        changes=changes,
        totals=totals,
        reports=reports,
        is_shaky=is_shaky,
        is_torn=is_torn,
        is_slow_to_hear=is_slow_to_hear,
        begins_at=begins_at,
    )
    job.finish()
    ended = [rank for rank in job.ranks if rank.name not in job.dead]
    assert ended
    for rank in ended:
        assert rank.parameters == job.plain.parameters, f"rank {rank.name}, seed {seed}"


@pytest.mark.parametrize("seed", some_seeds(12, of=40))
def test_survivors_of_any_losses_train_as_if_nothing_had_happened(seed: int) -> None:
    _trained(seed, ranks=2 + seed % 3, deaths=1 + seed % 3, newcomers=False)


@pytest.mark.parametrize("seed", some_seeds(9, of=20))
def test_ranks_that_hear_late_of_a_newcomer_train_as_if_nothing_had_happened(seed: int) -> None:
    _trained(seed, ranks=2 + seed % 3, deaths=1 + seed % 3, newcomers=True, is_slow_to_hear=True)


@pytest.mark.parametrize("seed", some_seeds(12, of=40))
def test_newcomers_train_as_if_nothing_had_happened(seed: int) -> None:
    _trained(seed, ranks=2 + seed % 3, deaths=1 + seed % 3, newcomers=True)


@pytest.mark.parametrize("seed", some_seeds(6, of=20))
def test_a_newcomer_that_has_copied_what_was_changed_meanwhile_trains_as_if_it_had_not(seed: int) -> None:
    _trained(seed, ranks=2 + seed % 3, deaths=1 + seed % 3, newcomers=True, steps=6, is_torn=True)


@pytest.mark.parametrize("seed", some_seeds(6, of=10))
def test_a_newcomer_that_is_many_steps_behind_gets_the_state_in_the_group(seed: int) -> None:
    _trained(seed, ranks=3, deaths=1, newcomers=True, steps=12, steps_behind=3)


@pytest.mark.parametrize("is_shaky", [False, True])
@pytest.mark.parametrize("totals", [(2, 4, 6), (4, 3, 4, 6), (1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize("seed", some_seeds(6, of=20))
def test_those_who_train_in_several_calls_train_as_in_one(seed: int, totals: tuple[int, ...], is_shaky: bool) -> None:
    _trained(
        seed,
        ranks=2 + seed % 3,
        deaths=seed % 4,
        newcomers=True,
        steps=6,
        totals=totals,
        reports=seed % 3,
        is_shaky=is_shaky,
    )


@pytest.mark.parametrize("newcomers", [False, True])
@pytest.mark.parametrize("seed", some_seeds(9, of=30))
def test_reports_are_exact_or_said_to_be_partial_and_the_same_for_all(seed: int, newcomers: bool) -> None:
    _trained(seed, ranks=2 + seed % 3, deaths=1 + seed % 3, newcomers=newcomers, reports=1 + seed % 3)


@pytest.mark.parametrize("seed", some_seeds(3, of=5))
def test_a_newcomer_is_not_outrun_for_ever_by_those_who_train_in_many_short_calls(seed: int) -> None:
    calls = 40
    totals = range(1, calls + 1)
    job = Job(
        seed, ranks=2, deaths=1, newcomers=True, steps=calls, micro_batches=MICRO_BATCHES, totals=totals, is_outrun=True
    )
    job.ranks[0].dies_at, job.ranks[1].dies_at = None, 30 + seed
    job.finish()
    replacement = next(rank for rank in job.ranks if rank.name == "1'")
    assert replacement.fetches <= 2
    assert len(replacement.trained) > calls // 2
    assert replacement.parameters == job.ranks[0].parameters == job.plain.parameters


FREEZING: Changes = {
    0: {"second": False},
    1: {"second": True},
    2: {"first": False},
    4: {"first": True, "second": False},
    5: {"second": True},
}


@pytest.mark.parametrize("newcomers", [False, True])
@pytest.mark.parametrize("seed", some_seeds(9, of=30))
def test_what_is_frozen_and_unfrozen_on_the_way_is_trained_as_by_plain_torch(seed: int, newcomers: bool) -> None:
    _trained(seed, ranks=1 + seed % 4, deaths=seed % 4, newcomers=newcomers, steps=7, changes=FREEZING)


@pytest.mark.parametrize("seed", some_seeds(6, of=10))
def test_a_newcomer_that_has_missed_what_was_unfrozen_trains_it_all_the_same(seed: int) -> None:
    _trained(seed, ranks=3, deaths=1, newcomers=True, steps=12, steps_behind=3, changes=FREEZING)


def of_step(step: int) -> int:
    """Return of how many micro-batches a step is: powers of two, so that sums are exact; some are fewer than ranks."""
    return (8, 2, 16, 4, 8)[step % 5]


@pytest.mark.parametrize("newcomers", [False, True])
@pytest.mark.parametrize("seed", some_seeds(12, of=40))
def test_steps_of_different_sizes_are_trained_as_by_plain_torch(seed: int, newcomers: bool) -> None:
    _trained(
        seed,
        ranks=1 + seed % 4,
        deaths=seed % 4,
        newcomers=newcomers,
        steps=7,
        micro_batches=of_step,
        changes=FREEZING if seed % 3 == 0 else None,
        is_shaky=seed % 5 == 2,
        reports=seed % 3,
    )


@pytest.mark.parametrize("seed", some_seeds(8, of=20))
def test_steps_of_different_sizes_in_several_calls(seed: int) -> None:
    _trained(
        seed,
        ranks=2 + seed % 3,
        deaths=seed % 4,
        newcomers=True,
        steps=6,
        totals=(2, 4, 6),
        micro_batches=of_step,
        reports=seed % 3,
        is_shaky=seed % 2 == 1,
    )


@pytest.mark.parametrize("seed", some_seeds(6, of=10))
def test_a_newcomer_that_is_many_steps_behind_takes_part_in_steps_of_different_sizes(seed: int) -> None:
    _trained(seed, ranks=3, deaths=1, newcomers=True, steps=12, steps_behind=3, micro_batches=of_step)


@pytest.mark.parametrize("seed", [0, 2])  # with sums of any order, and reproducible ones
@pytest.mark.parametrize("step", [0, 2])
def test_ranks_that_get_different_sizes_for_a_step_do_not_train_on(
    monkeypatch: pytest.MonkeyPatch, seed: int, step: int
) -> None:
    def count(number: int) -> int:
        name = getattr(getattr(threads_as_ranks.here, "rank", None), "name", "0")
        return 4 if (number, name) == (step, "1") else 8

    job = Job(seed, ranks=2, deaths=0, newcomers=False, steps=STEPS, micro_batches=lambda _: 8)
    job.counts = count
    monkeypatch.setattr(threads_as_ranks.Buffered, "check", lambda *_: None)
    for rank in job.ranks:
        rank.dies_at = None
    where = "of step 2, of 8 .* of step 2, of 4 " if step else "in step 0 rank . has . micro-batches, and this rank ."
    with pytest.raises(AssertionError, match=where):
        job.finish()
    assert all(max(rank.trained, default=-1) < step for rank in job.ranks)


@pytest.mark.parametrize("totals", [(), (5, 8)])
@pytest.mark.parametrize("seed", some_seeds(8, of=20))
def test_scripts_that_have_loaded_a_checkpoint_of_their_own_go_on_from_there(
    seed: int, totals: tuple[int, ...]
) -> None:
    _trained(seed, ranks=1 + seed % 4, deaths=seed % 4, newcomers=True, steps=8, totals=totals, begins_at=3)


def test_ranks_that_begin_with_different_steps_do_not_train() -> None:
    job = Job(0, ranks=2, deaths=0, newcomers=False, steps=STEPS, micro_batches=MICRO_BATCHES, begins_at=1)
    job.begin_of = lambda rank: 1 + int(rank.name)
    with pytest.raises(AssertionError, match=r"rank 1 begins with step 2, and this rank with step 1"):
        job.finish()
    assert not any(rank.trained for rank in job.ranks)


@pytest.mark.parametrize("lengths", [(MICRO_BATCHES, MICRO_BATCHES - 1, 1), (MICRO_BATCHES - 1, 0, 0)])
def test_a_micro_batch_that_is_there_twice_or_not_at_all_is_not_trained_on(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]
) -> None:
    monkeypatch.setattr(handle, "shares", lambda *_: [range(length) for length in lengths])
    job = Job(0, ranks=3, deaths=0, newcomers=False, steps=STEPS, micro_batches=MICRO_BATCHES)
    with pytest.raises(AssertionError, match="each micro-batch once"):
        job.finish()


def test_a_micro_batch_that_is_lost_and_dealt_to_nobody_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "deal", lambda _lost, held: [()] * len(held))
    job = Job(0, ranks=3, deaths=1, newcomers=False, steps=STEPS, micro_batches=MICRO_BATCHES)
    job.ranks[1].dies_at, job.ranks[0].dies_at, job.ranks[2].dies_at = 12, None, None
    with pytest.raises(AssertionError, match="each micro-batch once"):
        job.finish()


def test_ranks_that_train_different_parameters_of_one_size_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(model: threads_as_ranks.Model, _: dict[str, bool]) -> None:
        rank = getattr(threads_as_ranks.here, "rank", None)
        if rank is not None and rank.run.step == 2:
            model.get_parameter("first" if rank.name == "0" else "second").requires_grad_(False)

    monkeypatch.setattr(threads_as_ranks.Model, "change", change)
    job = Job(0, ranks=2, deaths=0, newcomers=False, steps=STEPS, micro_batches=MICRO_BATCHES)
    with pytest.raises(AssertionError, match="different steps, or of different parameters"):
        job.finish()


def test_a_newcomer_that_is_left_alone_without_the_state_does_not_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrival, "fetch_state", lambda *_: None)
    monkeypatch.setattr(arrival, "ASK_AGAIN_S", 0.0)
    job = Job(0, ranks=1, deaths=0, newcomers=False, steps=STEPS, micro_batches=MICRO_BATCHES)
    job.ranks[0].name, job.ranks[0].dies_at = "0'", None
    job.newest = World(number=2, members=(Member(name="0'", node="n", local_rank=0),), store="h:1")
    job.ranks[0].enter = lambda: Invitation(sources=({},))  # type: ignore[method-assign]
    job.ranks[0].is_ready = lambda _state: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="rank 0'") as caught:
        job.finish()
    assert isinstance(caught.value.__cause__, NoStateLeft)
