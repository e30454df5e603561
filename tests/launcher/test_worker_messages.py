"""What a worker says reaches the part of the agent that it is for, and what is odd is told and left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unicron_elastic.launcher.agent.core.worker_messages import WorkerMessages
from unicron_elastic.worker.message import Odd, heard
from unicron_elastic.worker.notices import Saving

WORKER: Any = SimpleNamespace(local_rank=0)


@pytest.fixture
def told() -> list[object]:
    return []


@pytest.fixture
def messages(told: list[object]) -> WorkerMessages:
    group: Any = SimpleNamespace(workers=[SimpleNamespace(global_rank=3, local_rank=0, id=1)])
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
