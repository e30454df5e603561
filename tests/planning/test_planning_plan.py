"""A plan as a value: it contradicts itself nowhere, and what is read back is what was written or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from situations import clusters

from unicron_elastic.planning.allocate.cluster import Cluster
from unicron_elastic.planning.allocate.plan import Move, Plan, Share, Wait
from unicron_elastic.planning.allocate.plan_table import build_table

PLAN = Plan(
    nodes=6,
    shares=(Share("a", 3, 1, 3), Share("b", 4, 0, 2), Share("c", 0, 0, 0)),
    moves=(Move(1, "b", "a"), Move(1, "b", None)),
    waits=(Wait("c", "c is paused."),),
    waf_before_flops=7.5e12,
    waf_after_flops=5e12,
    lost_flop=1e13,
    running_s=86_400.0,
    reason="Job a lost a node.",
)


def test_it_comes_back_as_it_was_written() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN
    assert Plan.from_json(PLAN.to_json().encode()) == PLAN
    assert PLAN.counts == {"a": 3, "b": 2, "c": 0}
    assert PLAN.shares[0].held == 2


@settings(max_examples=100, deadline=None)
@given(clusters())
def test_every_plan_comes_back(cluster: Cluster) -> None:
    for plan in build_table(cluster).plans.values():
        assert Plan.from_json(plan.to_json()) == plan


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    """The JSON of the plan after a change."""
    found = json.loads(PLAN.to_json())
    change(found)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda plan: plan.pop("nodes"), "the plan has no nodes"),
        (lambda plan: plan.update(more=1), "the plan has more: it must have nodes, shares, "),
        (lambda plan: plan.update(nodes="6"), "nodes is '6': it must be a whole number, at least 0"),
        (lambda plan: plan.update(nodes=4), "the shares are 5 nodes: they must be at most nodes, which is 4"),
        (lambda plan: plan.update(reason=None), "reason is None: it must be a sentence"),
        (lambda plan: plan.update(shares={}), "shares is {}: it must be a list"),
        (lambda plan: plan.update(shares=[3]), "a share is 3: it must be an object"),
        (lambda plan: plan["shares"][0].pop("lost"), "a share has no lost"),
        (lambda plan: plan["shares"][0].update(lost=4), "lost of a is 4: it must be at most before"),
        (lambda plan: plan["shares"][0].update(after=True), "after of a is True: it must be a whole number"),
        (lambda plan: plan["shares"][0].update(task=[]), r"a share's task is \[\]: it must be a name"),
        (lambda plan: plan["shares"][1].update(task="a"), "two shares are of one task: each task must have one"),
        (lambda plan: plan["moves"][0].update(nodes=0), "nodes of a move is 0: it must be a whole number, at least 1"),
        (lambda plan: plan["moves"][0].update(source="z"), "a move names z: it must name a task that has a share"),
        (lambda plan: plan["moves"][0].update(target=""), "a move's target is '': it must be a name"),
        (lambda plan: plan["moves"][0].update(target="b"), "a move leads nowhere: source and target must differ"),
        (lambda plan: plan["moves"].pop(), r"the moves do not lead to the share of \['b'\]: they must"),
        (lambda plan: plan["waits"].clear(), r"waits must name the tasks without nodes, \['c'\]"),
        (lambda plan: plan["waits"][0].update(reason=1), "the reason of a wait is 1: it must be a text"),
        (lambda plan: plan.update(running_s=-1), "running_s is -1: it must be a number, 0 or more"),
        (lambda plan: plan.update(lost_flop="1"), "lost_flop is '1': it must be a number"),
        (lambda plan: plan.update(lost_flop=True), "lost_flop is True: it must be a number"),
        (lambda plan: plan.update(lost_flop=10**400), r"lost_flop is 10+\.\.\.: it must be a number, 0 or more"),
    ],
)
def test_what_is_malformed_is_refused(change: Callable[[dict[str, Any]], object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}"):
        Plan.from_json(changed(change))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not a plan: it must be JSON, and is not: Expecting value"),
        ("[", "not a plan: it must be JSON, and is not: "),
        (b"\xff", "not a plan: it must be JSON, and is not: "),
        ("[" * 100_000, "not a plan: it must be JSON, and is not: "),
        ('{"lost_flop": NaN}', "not a plan: it must be JSON, and is not: NaN is no number"),
        ("[]", r"the plan is \[\]: it must be an object"),
        ("null", "the plan is None: it must be an object"),
    ],
)
def test_what_is_no_plan_is_refused(text: str | bytes, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}"):
        Plan.from_json(text)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_anything_else_raises_nothing_else(data: st.DataObject) -> None:
    found = json.loads(PLAN.to_json())
    place: Any = found
    while isinstance(place, dict | list) and place and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else list(range(len(place)))))
        if not isinstance(place[key], dict | list) or data.draw(st.booleans()):
            place[key] = data.draw(JSON)
            break
        place = place[key]
    try:
        read = Plan.from_json(json.dumps(found))
    except ValueError:
        return
    assert Plan.from_json(read.to_json()) == read
