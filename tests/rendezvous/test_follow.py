"""What a watch tells, decided without a store."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.rendezvous.store.follower import Follower
from unicron_elastic.rendezvous.store.interface import (
    Blind,
    Change,
    Changes,
    Entry,
    Replaced,
    Sighted,
    Snapshot,
    WatchItem,
)


def _entry(key: str, revision: int) -> Entry:
    return Entry(key=key, value=b"%d" % revision, revision=revision, created=revision, lease_id=None)


def _put(key: str, revision: int) -> Change:
    return Change(key=key, revision=revision, entry=_entry(key, revision))


def _snapshot(revision: int, *entries: Entry) -> Snapshot:
    return Snapshot(prefix="", revision=revision, entries=entries)


def test_what_comes_twice_is_told_once() -> None:
    follower = Follower(_snapshot(5))
    assert follower.moved([_put("a", 4), _put("a", 6), _put("b", 6), _put("a", 7)]) == [
        Changes(revision=6, changes=(_put("a", 6), _put("b", 6))),
        Changes(revision=7, changes=(_put("a", 7),)),
    ]
    assert follower.moved([_put("a", 6), _put("a", 7)]) == []


def test_blindness_is_told_once() -> None:
    follower = Follower(_snapshot(5))
    assert follower.lost_sight("gone", 1.0) == [Blind(reason="gone", silent_s=1.0)]
    assert follower.lost_sight("still gone", 2.0) == []


def test_sight_returns_only_when_all_that_was_missed_is_told() -> None:
    follower = Follower(_snapshot(5))
    follower.lost_sight("gone", 1.0)
    assert follower.reached(_snapshot(9, _entry("a", 7))) == []
    assert isinstance(follower.moved([_put("a", 6)])[-1], Changes)
    assert follower.is_blind
    assert follower.moved([_put("a", 7)])[-1] == Sighted()
    assert not follower.is_blind


def test_a_reader_that_goes_blind_again_waits_for_the_new_goal() -> None:
    follower = Follower(_snapshot(5))
    follower.lost_sight("gone", 1.0)
    follower.reached(_snapshot(9, _entry("a", 7)))
    follower.lost_sight("gone again", 1.0)
    assert len(follower.moved([_put("a", 7)])) == 1
    assert follower.reached(_snapshot(9, _entry("a", 7))) == [Sighted()]


def test_the_end_is_told_once_and_last() -> None:
    follower = Follower(_snapshot(5))
    assert follower.replaced("new") == [Replaced(reason="new")]
    assert follower.replaced("new") == []
    assert follower.lost_sight("gone", 1.0) == []


def _apply(state: dict[str, bytes], items: list[WatchItem]) -> None:
    for item in items:
        for change in item.changes if isinstance(item, Changes) else ():
            if change.entry is None:
                state.pop(change.key, None)
            else:
                state[change.key] = change.entry.value


@given(
    history=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30),
    steps=st.lists(st.sampled_from(["stream", "repeat", "cut", "compact"]), max_size=30),
)
def test_the_end_state_is_right_whatever_the_connection_does(history: list[tuple[str, bool]], steps: list[str]) -> None:
    """The store runs through ``history``, one change per step, and the follower sees it as ``steps`` say."""
    log: list[Change] = []
    now: dict[str, Entry] = {}
    follower, state, is_cut = Follower(_snapshot(1)), dict[str, bytes](), False
    for revision, (key, is_put) in enumerate(history, start=2):
        if is_put:
            now[key] = _entry(key, revision)
        else:
            now.pop(key, None)
        log.append(Change(key=key, revision=revision, entry=now.get(key)))
        step = steps[revision - 2] if revision - 2 < len(steps) else "stream"
        here = _snapshot(revision, *now.values())
        if step == "cut":
            is_cut = True
            _apply(state, follower.lost_sight("cut", 0.0))
        elif is_cut:
            is_cut = False
            _apply(state, follower.reached(here))
        if step in ("stream", "repeat"):
            start = 0 if step == "repeat" else follower.revision - 1
            _apply(state, follower.moved(log[start:]))
        elif step == "compact":
            _apply(state, follower.summed_up(here))
        if not is_cut:
            assert state == {entry.key: entry.value for entry in now.values()}
            assert not follower.is_blind
