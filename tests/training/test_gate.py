"""When the training state may be copied."""

from __future__ import annotations

import threading

import pytest

from unicron_elastic.training.snapshot.gate import StateGate

DEADLINE_S = 10.0


def _in_thread(work: threading.Thread) -> None:
    work.join(DEADLINE_S)
    assert not work.is_alive()


def test_it_is_held_at_the_state_that_is_at_rest() -> None:
    gate = StateGate()
    gate.begin(7)
    assert gate.hold(DEADLINE_S) == 7
    assert gate.close()
    gate.release()
    assert not gate.close()


def test_once_it_is_closed_nobody_begins_to_copy_before_the_next_step() -> None:
    gate, states = StateGate(), list[int]()
    gate.begin(7)
    assert not gate.close()
    with pytest.raises(TimeoutError):
        gate.hold(0)
    asks = threading.Thread(target=lambda: states.append(gate.hold(DEADLINE_S)))
    asks.start()
    gate.begin(8)
    _in_thread(asks)
    assert states == [8]


def test_before_a_step_and_after_its_end_nothing_is_at_rest() -> None:
    gate = StateGate()
    with pytest.raises(TimeoutError, match="not at rest within 0 s"):
        gate.hold(0)
    gate.begin(7)
    assert gate.end(DEADLINE_S, lambda: True)
    with pytest.raises(TimeoutError):
        gate.hold(0)


def test_who_asks_early_waits_for_the_next_step() -> None:
    gate, states = StateGate(), list[int]()
    asks = threading.Thread(target=lambda: states.append(gate.hold(DEADLINE_S)))
    asks.start()
    gate.begin(8)
    _in_thread(asks)
    assert states == [8]


def test_the_step_does_not_end_while_its_state_is_copied() -> None:
    gate, ended = StateGate(), threading.Event()
    gate.begin(7)
    gate.hold(0)
    gate.hold(0)
    waits = threading.Thread(target=lambda: gate.end(DEADLINE_S, lambda: True) and ended.set())
    waits.start()
    gate.release()
    assert not ended.wait(0.1)
    gate.release()
    _in_thread(waits)
    assert ended.is_set()


def test_it_ends_all_the_same_when_the_patience_is_over_and_says_so() -> None:
    gate, expired = StateGate(), list[str]()
    gate.on_expire = lambda: expired.append("told")
    gate.begin(7)
    gate.hold(0)
    assert gate.end(0.05, lambda: True)
    assert expired == ["told"]
    with pytest.raises(TimeoutError):
        gate.hold(0)


def test_it_stays_at_rest_if_a_new_world_comes() -> None:
    gate, expired = StateGate(), list[str]()
    gate.on_expire = lambda: expired.append("told")
    gate.begin(7)
    gate.hold(0)
    assert not gate.end(DEADLINE_S, lambda: False)
    assert expired == []
    assert gate.hold(0) == 7
