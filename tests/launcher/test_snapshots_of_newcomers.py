"""What agents tell workers that ask for snapshots, after nodes have met while others train on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from unicron_elastic.launcher.agent.worlds.snapshots import ANSWER_S, Snapshots
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.worker.instructions import Instruction, MakeSnapshot, SnapshotOffers

DEADLINE_S = 10.0  # less than an agent waits for another one's snapshots


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


class Worker:
    """As the agent sees it; ``told`` is what came over its channel."""

    def __init__(self, local_rank: int = 0) -> None:
        self.local_rank, self.told = local_rank, list[SnapshotOffers]()
        self.tell = self.told.append


@pytest.fixture
def agents(loop: Loop) -> Iterator[list[Snapshots]]:
    made = [Snapshots(loop, pytest.fail) for _ in range(2)]
    yield made
    for each in made:
        each.close()


def ask(agent: Snapshots, rank: int) -> Worker:
    worker = Worker()
    agent.wanted(worker, rank, world_size=2)  # type: ignore[arg-type]
    return worker


def test_the_worker_of_a_node_that_joins_others_that_train_on_is_a_newcomer(
    loop: Loop, agents: list[Snapshots]
) -> None:
    old, new, store = *agents, HashStore()
    old.meet(store, 0, 2, "127.0.0.1")
    new.begin(store, 1, 2, "127.0.0.1")
    worker = ask(new, 1)
    assert loop.run_until(lambda: bool(worker.told), time.monotonic() + DEADLINE_S)
    assert worker.told[0].is_replacement


def test_a_job_that_is_to_wait_does_not_wait_for_workers_that_answer_that_they_save_nothing(loop: Loop) -> None:
    agent = Snapshots(loop, pytest.fail)

    def answer(instruction: Instruction) -> None:
        assert instruction == MakeSnapshot()
        agent.saving(worker, will_save=False)

    worker: Any = SimpleNamespace(local_rank=0, returncode=None, control=object(), tell=answer)
    began = time.monotonic()
    assert agent.save([worker]).startswith("The job is to wait, and no snapshot of it was made")
    assert time.monotonic() - began < ANSWER_S
    agent.close()


def test_workers_that_all_begin_are_not(loop: Loop, agents: list[Snapshots]) -> None:
    store = HashStore()
    for rank, agent in enumerate(agents):
        agent.begin(store, rank, 2, "127.0.0.1")
    workers = [ask(agent, rank) for rank, agent in enumerate(agents)]
    assert loop.run_until(lambda: all(worker.told for worker in workers), time.monotonic() + DEADLINE_S)
    assert [worker.told[0].is_replacement for worker in workers] == [False, False]


def test_a_worker_that_asked_before_its_nodes_met_again_is_answered(agents: list[Snapshots]) -> None:
    agents[0].begin(HashStore(), 0, 2, "127.0.0.1")
    worker = ask(agents[0], 0)  # the other one has not come, and never will in that round
    agents[0].meet(HashStore(), 0, 3, "127.0.0.1")
    assert worker.told[0].is_replacement
    agents[0].begin(None, 0, 1, None)
    assert not ask(agents[0], 0).told[0].is_replacement
