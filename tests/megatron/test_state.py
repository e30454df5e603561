"""What a process takes over of another's training state, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from unicron_elastic.megatron.state import State


class Counted:
    """Something that a script counts on by itself behind each step."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def _of_step(step: int) -> tuple[State, SimpleNamespace]:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, float(step))
    parts = SimpleNamespace(model=model, optimizer=Counted(step), scheduler=Counted(step))
    return State([model], parts.optimizer, {"scheduler": parts.scheduler}), parts


def test_a_newcomer_takes_over_all_of_it_at_once() -> None:
    (theirs, _), (mine, parts) = _of_step(5), _of_step(0)
    mine.load_state_dict(theirs.state_dict())
    assert (parts.model.weight[0, 0].item(), parts.optimizer.count, parts.scheduler.count) == (5, 5, 5)


def test_a_script_that_goes_on_behind_the_step_brings_the_rest_there_itself() -> None:
    (theirs, _), (mine, parts) = _of_step(5), _of_step(4)
    mine.load_state_dict(theirs.state_dict(), behind=1)
    assert (parts.model.weight[0, 0].item(), parts.optimizer.count) == (5, 5)
    parts.scheduler.count += 1
    assert parts.scheduler.count == 5
    mine.load_rest()
    assert parts.scheduler.count == 5


def test_the_rest_of_a_step_further_on_is_taken_over_again_when_the_next_begins_and_others_get_it_before() -> None:
    (theirs, _), (mine, parts) = _of_step(7), _of_step(4)
    mine.load_state_dict(theirs.state_dict(), behind=3)
    parts.scheduler.count += 1
    given = mine.state_dict()
    assert given["scheduler"] == {"count": 7}
    assert torch.equal(given["chunks"][0]["weight"], torch.full((2, 2), 7.0))
    mine.load_rest()
    assert parts.scheduler.count == 7
    mine.load_rest()
    assert parts.scheduler.count == 7
