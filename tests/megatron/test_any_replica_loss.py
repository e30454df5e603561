"""Ranks are lost anywhere, once and again, from replicas of several: each step applies exactly its micro-batches.

``UNICRON_SCHEDULES`` is how many jobs are played, ``UNICRON_SEED`` the only one to play, with its story.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from replica_jobs import Job
from replica_modules import install
from replicas import Case, Violation

from unicron_elastic.engine.protocol import handle_member, replica_agreement
from unicron_elastic.engine.protocol.replica_agreement import MemberSaid
from unicron_elastic.engine.protocol.replica_layout import ReplicaLayout, ReplicaShape, lay_out
from unicron_elastic.engine.protocol.replica_member import ReplicaMember
from unicron_elastic.engine.protocol.replica_phase import Standing
from unicron_elastic.megatron import buckets, members, run

SCHEDULES = int(os.environ.get("UNICRON_SCHEDULES", "600"))
SEED = os.environ.get("UNICRON_SEED")
BLOCKS = 4
SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2))


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def case_of(seed: int) -> Case:
    chance = random.Random(seed)
    tensor, pipeline = SHAPES[seed % 4]
    return Case(
        tensor=tensor,
        pipeline=pipeline,
        replicas=chance.choice((2, 2, 3, 4)) if tensor * pipeline < 4 else 2,
        deaths=chance.choice((0, 1, 1, 2, 3)),
        troubles=chance.choice((0, 0, 1)),
        newcomers=chance.random() < 0.8,
        overlap=chance.random() < 0.5,
        reports=chance.random() < 0.3,
    )


def violations(word: str, most: int = 400) -> list[str]:
    """The first line of each, up to the first that has the word."""
    found: list[str] = []
    for seed in range(most):
        try:
            Job(seed, replace(case_of(seed), deaths=2, troubles=1)).play()
        except Violation as violation:
            found.append(str(violation).split("\n", 1)[0].split("): ", 1)[1])
            if word in found[-1]:
                break
    return found


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=[pytest.mark.slow] if block % 4 else []) for block in range(BLOCKS)]
)
def test_each_step_applies_each_micro_batch_once(block: int) -> None:
    if SEED is not None:
        if block == 0:
            print("\n".join(Job(int(SEED), case_of(int(SEED)), tells=True).play().story))
        return
    for seed in range(block * SCHEDULES // BLOCKS, (block + 1) * SCHEDULES // BLOCKS):
        Job(seed, case_of(seed)).play()


def test_the_jobs_are_worth_playing() -> None:
    """Most go on to the end, through several worlds."""
    jobs = [Job(seed, replace(case_of(seed), deaths=2, newcomers=True)).play() for seed in range(60)]
    assert sum(job.newest.number > 3 for job in jobs) > 20
    assert sum(job.is_lost for job in jobs) < 12
    agreed = [each for job in jobs for each in job.agreed.values()]
    for what in ("advance", "pull", "fill"):
        assert any(getattr(each, what) for each in agreed), what
    assert any(each.layout.spares for each in agreed)
    assert any(None in each.layout.names for each in agreed)


def test_the_same_seed_is_the_same_story() -> None:
    case = replace(case_of(3), deaths=2)
    assert Job(3, case, tells=True).play().story == Job(3, case, tells=True).play().story


# -- the invariants bite -----------------------------------------------------------------------------------------------


def held_of_the_first(said: Sequence[MemberSaid], layout: ReplicaLayout, replica: int) -> frozenset[int]:
    return said[layout.replicas[replica][0]].held


def ready_with_the_last_state(said: MemberSaid, step: int) -> bool:
    return said.heads_for == step or said.state == step - 1


def laid_out_without_state(shape: ReplicaShape, places: Sequence[Any]) -> ReplicaLayout:
    return lay_out(shape, [replace(place, has_state=True) for place in places])


@contextmanager
def reduced_too_early(_self: buckets.Buckets) -> Iterator[None]:
    yield


TAKE_PART, END_MAKING, RESTORE = handle_member._take_part, handle_member._end_making, run.MegatronRun._restore


def take_part_whatever_was_dealt(member: ReplicaMember, record: Any, agreed: Any) -> handle_member.MemberAnswer:
    share = tuple(sorted(handle_member._share(member)))
    return TAKE_PART(member, record, replace(agreed, dealt=(share,) * len(agreed.dealt)))


def take_part_with_what_there_is(member: ReplicaMember, record: Any, agreed: Any) -> handle_member.MemberAnswer:
    return TAKE_PART(member, record, replace(agreed, fill=()))


def stay_after_taking(member: ReplicaMember, standing: Standing) -> handle_member.MemberAnswer:
    return handle_member._meet_within(member) if standing is Standing.APART else END_MAKING(member, standing)


def restore_what_is_not_reduced(self: run.MegatronRun, *, is_within: bool) -> None:
    del is_within
    RESTORE(self, is_within=False)


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "word"),
    [
        (replica_agreement, "_held", held_of_the_first, "applies"),
        (replica_agreement, "_is_ready", ready_with_the_last_state, "applies"),
        (replica_agreement, "lay_out", laid_out_without_state, "nobody has the state"),
        (replica_agreement, "deal", lambda _lost, held: tuple(() for _ in held), "applies"),
        (buckets.Buckets, "restore", lambda _self: None, "two reductions"),
        (buckets.Buckets, "held_back", reduced_too_early, "applies"),
        (members.Members, "must_break", lambda _self, _world: False, "goes on"),
        (handle_member, "_take_part", take_part_whatever_was_dealt, "applies"),
        (handle_member, "_take_part", take_part_with_what_there_is, "begins bucket"),
        pytest.param(handle_member, "_end_making", stay_after_taking, "", marks=pytest.mark.slow),
        (run.MegatronRun, "_restore", restore_what_is_not_reduced, "applies"),
    ],
    ids=["held", "ready", "layout", "deal", "restore", "held-back", "break", "dealt", "fill", "leaves", "reduced"],
)
def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mutant: Any, word: str) -> None:
    monkeypatch.setattr(owner, name, mutant)
    found = violations(word)
    assert found
    assert word in found[-1], found
