"""The world as a value, and as a text from elsewhere."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.base.world import Member, World

NAMES = st.text(st.characters(codec="utf-8").filter(str.isprintable), min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 70000) | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
PARTS = {
    "number": st.integers(1, 9) | JSON,
    "members": st.lists(st.lists(JSON, min_size=3, max_size=3), max_size=3) | JSON,
    "store": st.sampled_from(["h:1", "[::1]:80", "h", ":1", "h:x"]) | JSON,
    "reason": JSON,
}


def _member(name: str, node: str = "a", local_rank: int = 0) -> Member:
    return Member(name=name, node=node, local_rank=local_rank)


def _world(*members: Member) -> World:
    return World(number=1, members=members, store="h:1")


@given(st.lists(st.tuples(NAMES, NAMES, st.integers(0, 9)), min_size=1, max_size=5, unique_by=lambda m: m[0]))
def test_a_world_is_read_as_it_was_written(members: list[tuple[str, str, int]]) -> None:
    world = World(number=3, members=tuple(_member(*each) for each in members), store="h:1", reason="rank 1 is gone.")
    assert World.parse(world.to_json()) == world


@given(st.fixed_dictionaries({}, optional=PARTS) | JSON)
def test_whatever_is_malformed_is_a_value_error(data: Any) -> None:
    with contextlib.suppress(ValueError):
        World.parse(json.dumps(data))


@given(st.text(max_size=30) | st.binary(max_size=30))
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with contextlib.suppress(ValueError):
        World.parse(text)


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"number": 0}, "number must be 1 or more"),
        ({"number": True}, "number must be 1 or more"),
        ({"store": "nowhere"}, "store must be host:port"),
        ({"members": []}, "must have members"),
        ({"members": [["m", "a", -1]]}, "a member must be"),
        ({"members": [["m", "a", 0], ["m", "b", 0]]}, "a member twice"),
        ({"reason": 1}, "reason must be a sentence"),
    ],
)
def test_what_is_wrong_is_named(changed: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        World.from_message(_world(_member("m")).to_message() | changed)


def test_deep_nesting_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="must be an object"):
        World.parse("[" * 100_000)


def test_a_replacement_gets_the_rank_of_whom_it_replaces() -> None:
    world = _world(_member("0", "b", 0), _member("1", "b", 1), _member("2", "a", 0), _member("3", "a", 1))
    smaller = world.after(store="h:2", reason="", lost=["1"])
    assert [member.name for member in smaller.members] == ["0", "2", "3"]
    whole = smaller.after(store="h:2", reason="", joined=[_member("1'", "b", 1)])
    assert [member.name for member in whole.members] == ["0", "1'", "2", "3"]
    assert (whole.number, whole.store) == (3, "h:2")


def _after(world: World, **change: Any) -> World:
    return world.after(store="h:1", reason="", **change)


def test_what_goes_on_ends_when_a_member_is_lost_or_all_connect_anew_and_not_when_others_join() -> None:
    first = _world(_member("0"), _member("1"))
    joined = _after(first, joined=[_member("2")])
    again = _after(joined, lost=["2"])
    assert not joined.breaks(first)
    assert not again.breaks(first)  # which has not met the one that was lost again
    assert again.breaks(joined)
    assert _after(again, lost=["1"]).breaks(first)
    assert not _after(joined).breaks(joined)
    anew = _after(joined, anew=True)
    assert anew.breaks(joined)
    assert _after(anew, joined=[_member("3")]).breaks(first)  # also to one who has not heard of the world between
    assert not _after(anew, joined=[_member("3")]).breaks(anew)
    assert not first.breaks(first)


def test_that_the_training_is_over_breaks_nothing() -> None:
    first = _world(_member("0"), _member("1"))
    over = _after(first, over=1)
    assert not over.breaks(first)
    assert (over.number, over.over, _after(over, lost=["1"]).over) == (2, 1, 1)


def test_a_node_that_comes_later_comes_last() -> None:
    world = _world(_member("0", "b"), _member("1", "c")).after(store="h:1", reason="", joined=[_member("2", "a")])
    assert [member.name for member in world.members] == ["0", "1", "2"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=8, unique=True),
    st.sets(st.integers(0, 7)),
)
def test_those_who_stay_keep_their_order(places: list[tuple[str, int]], lost: set[int]) -> None:
    world = _world(_member("first", "z")).after(
        store="h:1", reason="", joined=[_member(f"{node}{local}", node, local) for node, local in places]
    )
    names = [member.name for member in world.members]
    gone = [names[number] for number in lost if number < len(names)]
    after = world.after(store="h:1", reason="", lost=gone)
    assert [member.name for member in after.members] == [name for name in names if name not in gone]
    assert all(after.rank_of(name) is None for name in gone)
