"""What a worker says is heard as it was said, and what it cannot have said is left out with a sentence."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.worker import notices
from unicron_elastic.worker.notices import KINDS, Notice, Odd, heard

WHOLE, NUMBER, TEXT = st.integers(-(2**62), 2**62), st.floats(-1e9, 1e9), st.text(max_size=20)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int": WHOLE,
    "int | None": st.none() | WHOLE,
    "float": NUMBER,
    "float | None": st.none() | NUMBER,
    "str": TEXT,
    "bool": st.booleans(),
    "tuple[str, ...]": st.lists(TEXT, max_size=3).map(tuple),
    "dict[str, str | None]": st.dictionaries(TEXT, st.none() | TEXT, max_size=3),
    "dict[str, float | None]": st.dictionaries(TEXT, st.none() | NUMBER, max_size=3),
}


@st.composite
def notices_of_all_kinds(draw: st.DrawFn) -> Notice:
    kind = draw(st.sampled_from(KINDS))
    return kind(**{each.name: draw(VALUES[str(each.type)]) for each in dataclasses.fields(kind)})  # type: ignore[arg-type]


@given(notices_of_all_kinds())
def test_it_is_heard_as_it_was_said(said: Notice) -> None:
    assert heard(json.loads(json.dumps(said.message()))) == said


@given(notices_of_all_kinds(), st.data())
def test_a_wrong_field_is_named(said: Notice, data: st.DataObject) -> None:
    message = said.message()
    name = data.draw(st.sampled_from(sorted(message)))
    message[name] = data.draw(st.sampled_from([[1], {"a": []}, "x" if type(message[name]) is not str else 7, 2**70]))
    found = heard(message)
    if name == "is":
        assert found is None
    else:
        assert isinstance(found, Odd)
        assert found.why.startswith(f"{type(said).__name__}.{name} is not ")


def test_a_field_that_is_missing_is_named() -> None:
    assert heard({"is": "WentOn", "world": 2, "reused": 1, "recomputed": 0}) == Odd("WentOn.regrouped_ns is missing")
    assert heard({"is": "Parted"}) == notices.Parted()
    assert heard({"hello": 1}) is None


def test_every_class_can_be_heard() -> None:
    found = {each for each in vars(notices).values() if isinstance(each, type) and issubclass(each, Notice)}
    assert found == {*KINDS, Notice, Odd}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, True, "1"])
def test_what_is_no_number_is_odd(value: object) -> None:
    assert heard({"is": "FlopsPerStep", "flops": value}) == Odd("FlopsPerStep.flops is not a number")
