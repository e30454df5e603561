"""What a replacement's callback becomes of what another rank's says of itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from unicron_elastic.transformers.callback_state import callback_state, take_callback_state


class Counting:
    """Counts, and is made with what it has counted, as some callbacks of people are."""

    def __init__(self, steps: int = 0, names: Any = ()) -> None:
        self.steps, self.names = steps, names
        self.best = 0.0
        self.made = object()

    def state(self) -> dict[str, Any]:
        return {"args": {"steps": self.steps, "names": self.names}, "attributes": {"best": self.best}}


def _sent(callback: Any) -> Any:
    return json.loads(json.dumps(callback_state(callback), default=float))


def test_it_is_made_as_the_others_is_and_has_its_attributes() -> None:
    theirs, mine = Counting(7, ("a", "b")), Counting()
    theirs.best = 0.5
    take_callback_state(mine, *_sent(theirs))
    assert (mine.steps, list(mine.names), mine.best) == (7, ["a", "b"], 0.5)


def test_what_it_has_of_the_training_stays() -> None:
    theirs, mine = Counting(7), Counting(2)
    made, mine.begun = mine.made, "at 12:00"  # type: ignore[attr-defined]
    take_callback_state(mine, *_sent(theirs))
    assert (mine.steps, mine.begun, mine.made) == (7, "at 12:00", made)  # type: ignore[attr-defined]


def test_one_that_is_made_so_already_is_not_made_again() -> None:
    theirs, mine = Counting(7, ("a",)), Counting(7, ("a",))
    made = mine.made
    take_callback_state(mine, *_sent(theirs))
    assert mine.made is made


def test_a_state_of_before_has_attributes_alone() -> None:
    mine = Counting(3)
    take_callback_state(mine, {"best": 0.25})
    assert (mine.steps, mine.best) == (3, 0.25)


@pytest.mark.parametrize("odd", [object(), {1: object()}])
def test_what_cannot_be_written_is_left_out(odd: object) -> None:
    theirs, mine = Counting(7, odd), Counting(2)
    theirs.best = 0.5
    take_callback_state(mine, *_sent(theirs))
    assert (mine.steps, mine.best) == (2, 0.5)


def test_a_state_without_attributes_or_arguments_is_empty() -> None:
    class Silent:
        def state(self) -> dict[str, Any]:
            return {}

    assert callback_state(Silent()) == ({}, {})
