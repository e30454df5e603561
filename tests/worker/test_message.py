"""What a process of ours says is heard as it was said, and what none can have said is left out with a sentence."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.base.world import Member, World
from unicron_elastic.launcher.common import shelf_messages
from unicron_elastic.launcher.common.shelf_messages import SHELF_MESSAGES, ShelfMessage
from unicron_elastic.worker import helper_tasks, instructions, notices
from unicron_elastic.worker.helper_tasks import (
    KEEPER_ANSWERS,
    KEEPER_TASKS,
    WARM_ANSWERS,
    WARM_TASKS,
    HelperAnswer,
    HelperTask,
)
from unicron_elastic.worker.instructions import INSTRUCTIONS, Instruction
from unicron_elastic.worker.message import Descriptors, Message, Odd, heard
from unicron_elastic.worker.notices import NOTICES, FlopsPerStep, Notice, Parted, Position, SnapshotMade, WentOn

ROOT, PRODUCT = Path(__file__).parent.parent.parent, ("unicron_elastic", "launcher")
TEXT = st.text(max_size=20)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**62), 2**62),
    float: st.floats(-1e9, 1e9),
    str: TEXT,
    bool: st.booleans(),
    Any: st.none() | TEXT | st.integers(0, 9),
}
HELPERS = (*KEEPER_TASKS, *WARM_TASKS, *KEEPER_ANSWERS, *WARM_ANSWERS)
KINDS: tuple[type[Message], ...] = (*NOTICES, *INSTRUCTIONS, *HELPERS, *SHELF_MESSAGES)
WORLDS = st.builds(
    World,
    number=st.integers(1, 99),
    members=st.just((Member(name="a", node="n1", local_rank=0),)),
    store=st.just("10.0.0.1:4711"),
)


def values(type_: Any) -> st.SearchStrategy[Any]:
    """All that a field of this type can be."""
    if type_ in SCALARS:
        return SCALARS[type_]
    inside = get_args(type_)
    if get_origin(type_) is types.UnionType:
        return st.none() | values(inside[0])
    if get_origin(type_) is dict:
        return st.dictionaries(TEXT, values(inside[1]), max_size=3)
    if get_origin(type_) is tuple:
        is_row = inside[1:] != (...,)
        return st.tuples(*map(values, inside)) if is_row else st.lists(values(inside[0]), max_size=3).map(tuple)
    return WORLDS if type_ is World else messages(type_)


def messages(kind: Any) -> st.SearchStrategy[Any]:
    types_of = get_type_hints(kind)
    return st.builds(kind, **{each.name: values(types_of[each.name]) for each in dataclasses.fields(kind)})


OF_ALL_KINDS = st.sampled_from(KINDS).flatmap(messages)


@given(OF_ALL_KINDS)
def test_it_is_heard_as_it_was_said(said: Message) -> None:
    assert heard(json.loads(json.dumps(said.message())), KINDS, said.fds) == said


@given(OF_ALL_KINDS, st.data())
def test_a_wrong_field_is_named(said: Message, data: st.DataObject) -> None:
    message = said.message()
    name = data.draw(st.sampled_from(sorted(message)))
    may_be_text = name == "is" or "str" in str(type(said).__annotations__[name])
    message[name] = data.draw(st.sampled_from([[[]], {"a": []}, 7 if may_be_text else "x", 2**70]))
    found = heard(message, KINDS)
    if isinstance(found, Odd):
        assert found.why.startswith("it is of no kind" if name == "is" else f"{type(said).__name__}.{name}")
    else:  # a table that its reader checks may hold anything
        assert "Any" in str(type(said).__annotations__[name])


def test_a_field_that_is_missing_is_named() -> None:
    message = {"is": "WentOn", "world": 2, "reused": 1, "recomputed": 0}
    assert heard(message, [WentOn]) == Odd("WentOn.regrouped_ns is missing")
    assert heard({"is": "Parted"}, [Parted]) == Parted()


@pytest.mark.parametrize("body", [{"hello": 1}, {"is": "Entered"}, {"is": ["Parted"]}, {"is": None}, {}])
def test_what_is_of_another_kind_is_odd(body: dict[str, Any]) -> None:
    assert heard(body, [Parted]) == Odd("it is of no kind that is known here")


@pytest.mark.parametrize(
    ("group", "why"),
    [
        ({"name": "0", "begun": 1}, ".ended is missing"),
        ({"name": "0", "begun": True, "ended": 1}, ".begun is not a whole number"),
        ({"name": "0", "begun": 1, "ended": 1.5}, ".ended is not a whole number"),
        ({"name": 0, "begun": 1, "ended": 1}, ".name is not a text"),
        (7, " is not a table"),
    ],
)
def test_what_is_wrong_inside_is_named(group: Any, why: str) -> None:
    first = {"name": "0", "begun": 1, "ended": None}
    message = {"is": "Position", "question": 1, "groups": [first, group], "uses_gpu": False, "is_at_prompt": False}
    assert heard(message, [Position]) == Odd(f"Position.groups[1]{why}")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, True, "1"])
def test_what_is_no_number_is_odd(value: object) -> None:
    assert heard({"is": "FlopsPerStep", "flops": value}, [FlopsPerStep]) == Odd("FlopsPerStep.flops is not a number")


def test_descriptors_travel_beside_the_text_of_a_kind_that_has_some() -> None:
    made = SnapshotMade(slot=1, is_for_peer=True, fds=(7,))
    assert made.message() == {"is": "SnapshotMade", "slot": 1, "is_for_peer": True}
    assert heard(made.message(), NOTICES, [9]) == dataclasses.replace(made, fds=(9,))
    assert heard({**made.message(), "fds": [9]}, NOTICES).fds == ()  # a number alone is nobody's descriptor
    assert heard(Parted().message(), NOTICES, [9]).fds == ()


@pytest.mark.parametrize("type_", [complex, set[int], int | str, dict[int, str], Callable[[], None]])
def test_a_field_that_cannot_be_sent_fails_where_it_is_written(type_: Any) -> None:
    kind = dataclasses.make_dataclass("Wrong", [("field", type_)], bases=(Message,))
    with pytest.raises(TypeError, match="cannot be sent"):
        heard({"is": "Wrong", "field": 1}, [kind])


@pytest.mark.parametrize(
    ("module", "base", "kinds"),
    [
        (notices, Notice, NOTICES),
        (instructions, Instruction, INSTRUCTIONS),
        (helper_tasks, HelperTask, (*KEEPER_TASKS, *WARM_TASKS)),
        (helper_tasks, HelperAnswer, (*KEEPER_ANSWERS, *WARM_ANSWERS)),
        (shelf_messages, ShelfMessage, SHELF_MESSAGES),
    ],
)
def test_every_class_can_be_heard(module: Any, base: type[Message], kinds: tuple[type[Message], ...]) -> None:
    found = {each for each in vars(module).values() if isinstance(each, type) and issubclass(each, base)}
    assert found == {*kinds, base}
    fields = [(each, name, type_) for each in kinds for name, type_ in get_type_hints(each).items()]
    assert {type_ for _, name, type_ in fields if name == "fds"} <= {Descriptors}


def test_every_message_is_sent_and_read() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for top in PRODUCT for path in (ROOT / top).rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    sent = {ast.unparse(call.func) for call in calls}
    readers = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in ("hear", "isinstance", "ask")]
    read = {ast.unparse(node.cls) for node in nodes if isinstance(node, ast.MatchClass)}
    read |= {name for call in readers for name in re.findall(r"\w+", ast.unparse(call))}
    names = {kind.__name__ for kind in KINDS}
    assert (names - sent, names - read) == (set(), set())
