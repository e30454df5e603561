"""When the training state may be copied."""

from __future__ import annotations

import threading

import pytest

from unicron_elastic.training.snapshot.gate import Rest

DEADLINE_S = 10.0


def _in_thread(work: threading.Thread) -> None:
    work.join(DEADLINE_S)
    assert not work.is_alive()


def test_it_is_held_at_the_state_that_is_at_rest() -> None:
    rest = Rest()
    rest.begin(7)
    assert rest.hold(DEADLINE_S) == 7
    assert rest.close()
    rest.release()
    assert not rest.close()


def test_once_it_is_closed_nobody_begins_to_copy_before_the_next_step() -> None:
    rest, states = Rest(), list[int]()
    rest.begin(7)
    assert not rest.close()
    with pytest.raises(TimeoutError):
        rest.hold(0)
    asks = threading.Thread(target=lambda: states.append(rest.hold(DEADLINE_S)))
    asks.start()
    rest.begin(8)
    _in_thread(asks)
    assert states == [8]


def test_before_a_step_and_after_its_end_nothing_is_at_rest() -> None:
    rest = Rest()
    with pytest.raises(TimeoutError, match="not at rest within 0 s"):
        rest.hold(0)
    rest.begin(7)
    assert rest.end(DEADLINE_S, lambda: True)
    with pytest.raises(TimeoutError):
        rest.hold(0)


def test_who_asks_early_waits_for_the_next_step() -> None:
    rest, states = Rest(), list[int]()
    asks = threading.Thread(target=lambda: states.append(rest.hold(DEADLINE_S)))
    asks.start()
    rest.begin(8)
    _in_thread(asks)
    assert states == [8]


def test_the_step_does_not_end_while_its_state_is_copied() -> None:
    rest, ended = Rest(), threading.Event()
    rest.begin(7)
    rest.hold(0)
    rest.hold(0)
    waits = threading.Thread(target=lambda: rest.end(DEADLINE_S, lambda: True) and ended.set())
    waits.start()
    rest.release()
    assert not ended.wait(0.1)
    rest.release()
    _in_thread(waits)
    assert ended.is_set()


def test_it_ends_all_the_same_when_the_patience_is_over_and_says_so() -> None:
    rest, expired = Rest(), list[str]()
    rest.on_expire = lambda: expired.append("told")
    rest.begin(7)
    rest.hold(0)
    assert rest.end(0.05, lambda: True)
    assert expired == ["told"]
    with pytest.raises(TimeoutError):
        rest.hold(0)


def test_it_stays_at_rest_if_a_new_world_comes() -> None:
    rest, expired = Rest(), list[str]()
    rest.on_expire = lambda: expired.append("told")
    rest.begin(7)
    rest.hold(0)
    assert not rest.end(DEADLINE_S, lambda: False)
    assert expired == []
    assert rest.hold(0) == 7
