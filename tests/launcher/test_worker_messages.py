"""What a worker says reaches the part of the agent that it is for, and what is odd is told and left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unicron_elastic.launcher.agent.core.worker_messages import WorkerMessages
from unicron_elastic.recovery.events import MemberEntered
from unicron_elastic.worker.message import Odd, heard
from unicron_elastic.worker.notices import Entered, Saving

WORKER: Any = SimpleNamespace(local_rank=0)


@pytest.fixture
def told() -> list[object]:
    return []


@pytest.fixture
def messages(told: list[object]) -> WorkerMessages:
    return of_workers(told, 1)


def of_workers(told: list[object], count: int) -> WorkerMessages:
    """Return what reads the messages of so many workers of one node."""
    workers = [SimpleNamespace(global_rank=3 + each, local_rank=each, id=1 + each) for each in range(count)]
    group: Any = SimpleNamespace(workers=workers)
    made = WorkerMessages(
        1,
        group,
        "n1",
        post=told.append,
        say=told.append,
        say_once=lambda *said: told.append(said),
        why_killed=lambda _code, _at: "",
    )
    made.on_saving = lambda worker, will_save: told.append((worker, will_save))
    return made


@pytest.mark.parametrize("will_save", [True, False])
def test_whether_a_worker_saves_is_told_to_who_waits_for_it(
    messages: WorkerMessages, told: list[object], will_save: bool
) -> None:
    messages.said(WORKER, Saving(will_save=will_save))
    assert told == [(WORKER, will_save)]


def test_an_answer_that_is_neither_yes_nor_no_is_left_out_with_a_sentence(
    messages: WorkerMessages, told: list[object]
) -> None:
    said = heard({"is": "Saving", "will_save": 1}, [Saving])
    assert isinstance(said, Odd)
    messages.said(WORKER, said)
    sentence = "rank 3 said what is no message of ours, which is left out: Saving.will_save is not true or false."
    assert told == [("odd", sentence)]


def sizes(told: list[object]) -> list[int]:
    """Return of how many workers each one that asked has said that a replica is, as the agent has it."""
    return [each.replica_size for each in told if isinstance(each, MemberEntered)]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_of_how_many_processes_a_replica_is_comes_with_the_wish_for_a_part(told: list[object], size: int) -> None:
    said = heard(Entered(replica_size=size).message(), [Entered])
    of_workers(told, 4).said(WORKER, said)
    assert sizes(told) == [size]
    assert len(told) == 1


def test_who_does_not_say_of_how_many_is_a_replica_of_one(told: list[object]) -> None:
    said = heard({"is": "Entered"}, [Entered])
    of_workers(told, 4).said(WORKER, said)
    assert sizes(told) == [1]


@pytest.mark.parametrize("size", [0, -2, 3, 8])
def test_replicas_to_which_no_workers_can_be_dealt_are_told_and_count_as_one(told: list[object], size: int) -> None:
    messages = of_workers(told, 4)
    messages.said(WORKER, Entered(replica_size=size))
    sentence = (
        f"rank 3 said that a replica is {size} of the 4 workers of this node, which cannot be dealt to such replicas: "
        "each counts as one of its own."
    )
    assert told[0] == ("replica size", sentence)
    assert sizes(told) == [1]


def test_the_first_one_is_believed(told: list[object]) -> None:
    messages = of_workers(told, 4)
    for local_rank, size in ((0, 2), (1, 4), (2, 3)):
        messages.said(SimpleNamespace(local_rank=local_rank), Entered(replica_size=size))  # type: ignore[arg-type]
    sentence = "rank 4 said that a replica is 4 of the 4 workers of this node, and another one had said 2, which holds."
    assert ("replica size", sentence) in told
    assert sizes(told) == [2, 2, 2]


def test_half_a_process_is_no_message() -> None:
    said = heard({"is": "Entered", "replica_size": 0.5}, [Entered])
    assert said == Odd("Entered.replica_size is not a whole number")
