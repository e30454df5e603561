"""Nodes in quarantine, as values: who is kept out until when, in words and as plain data."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.base.quarantine import (
    LAUNCHER,
    Quarantined,
    active,
    add,
    check_node,
    find,
    from_document,
    is_active,
    lift,
    parse_duration,
    sentence,
    to_document,
)

SINCE = datetime(2026, 11, 21, 10, 2, tzinfo=timezone.utc).timestamp()
HOUR, DAY = 3600.0, 86400.0
ENTRY = Quarantined(
    node="gpu-7", reason="GPU 3 fell off the bus.", since=SINCE, until=SINCE + 6 * HOUR, by=LAUNCHER, is_broken=True
)

moments = st.floats(0, 250e9)
texts = st.text(st.characters(), min_size=1).filter(lambda text: any(c.isprintable() and not c.isspace() for c in text))
nodes = st.from_regex(r"[A-Za-z0-9._ü-]{1,20}", fullmatch=True)
entries = st.builds(
    Quarantined,
    node=nodes,
    reason=texts,
    since=moments,
    until=st.none() | moments,
    by=texts | st.just(LAUNCHER),
    is_broken=st.booleans(),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def _utc(moment: float) -> datetime:
    return datetime.fromtimestamp(moment, timezone.utc)


def test_an_entry_holds_until_its_cool_down_is_over() -> None:
    until = SINCE + 6 * HOUR
    assert is_active(ENTRY, until - 0.001)
    assert not is_active(ENTRY, until)
    assert is_active(replace(ENTRY, until=None), 1e12)
    other = replace(ENTRY, node="gpu-8", until=None)
    assert active((ENTRY, other), SINCE) == (ENTRY, other)
    assert active((ENTRY, other), until) == (other,)


def test_a_node_is_found_by_its_name_while_it_is_kept_out() -> None:
    assert find((ENTRY,), "gpu-7", SINCE) is ENTRY
    assert find((ENTRY,), "gpu-7", SINCE + 6 * HOUR) is None
    assert find((ENTRY,), "gpu-70", SINCE) is None


def test_a_new_node_is_added() -> None:
    other = replace(ENTRY, node="gpu-8")
    assert add((ENTRY,), other) == (ENTRY, other)


@pytest.mark.parametrize(
    ("old", "new", "until"),
    [(7.0, 9.0, 9.0), (9.0, 7.0, 9.0), (None, 7.0, None), (7.0, None, None), (None, None, None)],
)
def test_a_node_that_is_there_keeps_its_start_and_gets_the_newest_reason_and_the_later_end(
    old: float | None, new: float | None, until: float | None
) -> None:
    there = replace(ENTRY, since=1.0, until=old)
    again = replace(ENTRY, since=2.0, until=new, reason="Again.", by="ada")
    assert add((there,), again) == (replace(again, since=1.0, until=until),)


def test_a_broken_node_stays_broken_whoever_else_wants_it_out() -> None:
    broken, drained = ENTRY, replace(ENTRY, by="ada", reason="Moves to another rack.", is_broken=False)
    for first, second in ((broken, drained), (drained, broken)):
        assert add((first,), second) == (replace(second, is_broken=True),)


@pytest.mark.parametrize(("by", "is_broken"), [(LAUNCHER, True), ("unicron-runner", False)])
def test_entries_of_before_are_broken_if_no_operator_made_them(by: str, is_broken: bool) -> None:
    data = replace(ENTRY, by=by).to_json()
    del data["is_broken"]
    assert Quarantined.from_json(data).is_broken is is_broken


def test_an_earlier_start_counts_also_if_it_comes_later() -> None:
    assert add((ENTRY,), replace(ENTRY, since=SINCE - 5))[0].since == SINCE - 5


def test_a_quarantine_that_was_over_does_not_count() -> None:
    again = replace(ENTRY, since=SINCE + DAY, until=SINCE + DAY + 60)
    assert add((ENTRY,), again) == (again,)


def test_a_node_is_lifted_alone() -> None:
    other = replace(ENTRY, node="gpu-8")
    assert lift((ENTRY, other), "gpu-7") == (other,)
    assert lift((ENTRY,), "gpu-8") == (ENTRY,)


@given(st.lists(entries), entries)
def test_adding_leaves_the_others_and_never_shortens(old: list[Quarantined], new: Quarantined) -> None:
    there: tuple[Quarantined, ...] = ()
    for each in old:
        there = add(there, each)
    after = add(there, new)
    assert lift(after, new.node) == lift(there, new.node)
    (merged,) = (each for each in after if each.node == new.node)
    assert (merged.reason, merged.by) == (new.reason, new.by)
    for each in filter(None, (new, find(there, new.node, new.since))):
        assert merged.since <= each.since
        assert merged.until is None or (each.until is not None and merged.until >= each.until)


@pytest.mark.parametrize(
    ("change", "after", "words"),
    [
        ({}, 2 * HOUR + 180, "(2 h 3 min): GPU 3 fell off the bus; it returns at 16:02."),
        ({"until": SINCE + DAY}, 0, "(0 s): GPU 3 fell off the bus; it returns on 2026-11-22 at 10:02."),
        ({"until": None}, 59, "(59 s): GPU 3 fell off the bus; it stays there until it is lifted by hand."),
        ({"until": None}, 60, "(1 min): "),
        ({"until": None}, 2 * HOUR + 59, "(2 h): "),
        ({"until": None}, 3 * DAY + 4 * HOUR, "(3 d 4 h): "),
        ({"until": None}, 3 * DAY + 59, "(3 d): "),
        ({}, -5, "(0 s): "),
        ({"reason": "a\nb\x1b[2J"}, 0, "(0 s): a b [2J; it returns at 16:02."),
    ],
)
def test_an_entry_is_said_in_one_sentence(change: dict[str, Any], after: float, words: str) -> None:
    said = sentence(replace(ENTRY, **change), SINCE + after, _utc)
    assert said.startswith(f"node gpu-7 is in quarantine since 2026-11-21 10:02 {words}")


def test_what_is_over_is_said_so() -> None:
    assert sentence(ENTRY, SINCE + DAY, _utc) == (
        "node gpu-7 was in quarantine from 2026-11-21 10:02 to 2026-11-21 16:02: GPU 3 fell off the bus."
    )


@given(entries, moments)
def test_every_entry_can_be_said(entry: Quarantined, now: float) -> None:
    said = sentence(entry, now, _utc)
    assert said.isprintable()
    assert entry.node in said


@given(st.lists(entries, unique_by=lambda entry: entry.node))
def test_what_is_written_is_read_back(some: list[Quarantined]) -> None:
    assert from_document(json.loads(json.dumps(to_document(some)))) == tuple(some)


def test_the_document_is_as_documented() -> None:
    data = {"node": "gpu-7", "reason": ENTRY.reason, "since": SINCE, "until": SINCE + 6 * HOUR, "by": "unicron-run"}
    assert to_document([ENTRY]) == {"version": 1, "nodes": [data | {"is_broken": True}]}
    assert Quarantined.from_json({**data, "rack": 12, "since": int(SINCE)}) == ENTRY


@pytest.mark.parametrize("name", ["node", "reason", "since", "until", "by"])
def test_a_missing_field_is_named(name: str) -> None:
    data = {key: value for key, value in ENTRY.to_json().items() if key != name}
    with pytest.raises(ValueError, match=f"^{name} is missing$"):
        Quarantined.from_json(data)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("node", 7, "node must be a text, not 7"),
        ("node", "", "node is empty"),
        ("node", "a b", "node must be a name without blanks and control characters, not 'a b'"),
        ("reason", None, "reason must be a text, not None"),
        ("reason", " \n", "reason is empty"),
        ("by", [], "by must be a text, not a list"),
        ("by", "", "by is empty"),
        ("since", None, "since must be a number of unix seconds, not None"),
        ("since", True, "since must be a number of unix seconds, not True"),
        ("since", "x" * 500, f"since must be a number of unix seconds, not '{'x' * 56}..."),
        ("since", -1, "since must be unix seconds from 1970 to 9999, not -1.0"),
        ("since", float("nan"), "since must be unix seconds from 1970 to 9999, not nan"),
        ("until", {}, "until must be a number of unix seconds, not a JSON object"),
        ("until", 10**400, "until must be unix seconds from 1970 to 9999, not inf"),
        ("until", 1e12, "until must be unix seconds from 1970 to 9999, not 1000000000000.0"),
    ],
)
def test_a_malformed_field_is_named(name: str, value: object, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        Quarantined.from_json({**ENTRY.to_json(), name: value})
    assert str(caught.value) == words


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "an object was expected"),
        ({}, "version is missing"),
        ({"version": 1}, "nodes is missing"),
        ({"version": 1, "nodes": {}}, "nodes must be a list, not a JSON object"),
        ({"version": True, "nodes": []}, "version must be 1, not True"),
        ({"version": "1", "nodes": []}, "version must be 1, not '1'"),
        ({"version": 0, "nodes": []}, "version must be 1, not 0"),
        ({"version": 2, "nodes": []}, "version 2 is newer than 1, the newest that is understood here"),
        (
            {"version": 10**5000, "nodes": []},
            "version a huge number is newer than 1, the newest that is understood here",
        ),
        ({"version": 1, "nodes": ["gpu-7"]}, "nodes[0]: an object was expected"),
        ({"version": 1, "nodes": [ENTRY.to_json(), {}]}, "nodes[1]: node is missing"),
        ({"version": 1, "nodes": [ENTRY.to_json()] * 2}, "nodes[1]: node gpu-7 is there twice"),
    ],
)
def test_what_is_wrong_with_a_document_is_said(data: object, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        from_document(data)
    assert str(caught.value) == words


@given(json_values, st.sampled_from(["node", "reason", "since", "until", "by"]))
def test_any_value_is_read_or_refused_by_name(value: object, name: str) -> None:
    problem = ""
    try:
        assert getattr(Quarantined.from_json({**ENTRY.to_json(), name: value}), name) == value
    except ValueError as error:
        problem = str(error)
    assert problem == "" or problem.startswith(f"{name} ")
    assert len(problem) < 200
    assert problem.isascii()


@given(json_values)
def test_any_document_is_read_or_refused(data: object) -> None:
    with pytest.raises(ValueError):
        from_document(data)


@pytest.mark.parametrize("name", ["gpu-7", "node1.rack2.example.org", "10.0.0.1", "knoten-ü"])
def test_a_name_can_be_a_node(name: str) -> None:
    check_node(name)


@pytest.mark.parametrize("name", ["", " ", "a b", "a\tb", "a\n", "a\x1b[2J", "a\0", "\ud800", "a\xa0b"])
def test_a_name_cannot_be_a_node(name: str) -> None:
    with pytest.raises(ValueError, match=r"^node "):
        check_node(name)


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("15m", 900), ("6h", 21600), (" 2d ", 172800)])
def test_a_duration_is_understood(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "6", "h", "0s", "-1h", "1.5h", "6 h", "6H", "6h30m", "²s", "9999999d", "1w"])
def test_a_text_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a number and a unit such as 30s, 15m, 6h or 2d"):
        parse_duration(text)


def test_the_longest_duration_ends_before_the_calendar() -> None:
    longest = replace(ENTRY, until=SINCE + parse_duration("999999d"))
    assert "it returns on 4764-" in sentence(longest, SINCE, _utc)
