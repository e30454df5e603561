"""Ranks are lost at any point, once and again: each step applies the gradients of exactly its micro-batches."""

from __future__ import annotations

import pytest
import threads_as_ranks
import torch
from threads_as_ranks import Distributed, Job, fetch_state, gradient_of_step

from unicron_elastic.training import assembly, engine, gradients, meeting

STEPS, MICRO_BATCHES = 4, 8


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (assembly, gradients):
        monkeypatch.setattr(module, "dist", Distributed())
    monkeypatch.setattr(engine, "membership", lambda _serve: threads_as_ranks.here.rank)
    monkeypatch.setattr(engine, "fetch_state", fetch_state)
    monkeypatch.setattr(meeting.Meeting, "connect", lambda *_: threads_as_ranks.here.rank.connect())
    make = gradients.Gradients.__init__
    monkeypatch.setattr(
        gradients.Gradients,
        "__init__",
        lambda self, parameters, count, **_: make(self, parameters, count, bucket_bytes=40),
    )


def _trained(seed: int, *, ranks: int, deaths: int, newcomers: bool, steps: int = STEPS, steps_behind: int = 0) -> None:
    job = Job(
        seed,
        ranks=ranks,
        deaths=deaths,
        newcomers=newcomers,
        steps=steps,
        micro_batches=MICRO_BATCHES,
        steps_behind=steps_behind,
    )
    job.finish()
    total = -sum(gradient_of_step(step, MICRO_BATCHES) for step in range(steps))
    ended = [rank for rank in job.ranks if rank.name not in job.dead]
    assert ended
    for rank in ended:
        assert torch.equal(torch.stack(rank.parameters), total), f"rank {rank.name}, seed {seed}"


@pytest.mark.parametrize("seed", range(40))
def test_survivors_of_any_losses_train_as_if_nothing_had_happened(seed: int) -> None:
    _trained(seed, ranks=2 + seed % 3, deaths=1 + seed % 3, newcomers=False)


@pytest.mark.parametrize("seed", range(40))
def test_newcomers_train_as_if_nothing_had_happened(seed: int) -> None:
    _trained(seed, ranks=2 + seed % 3, deaths=1 + seed % 3, newcomers=True)


@pytest.mark.parametrize("seed", range(10))
def test_a_newcomer_that_is_many_steps_behind_gets_the_state_in_the_group(seed: int) -> None:
    _trained(seed, ranks=3, deaths=1, newcomers=True, steps=12, steps_behind=3)
