"""When the training state may be copied."""

from __future__ import annotations

import threading

import pytest

from unicron_elastic.training.snapshot.gate import StateGate

DEADLINE_S = 10.0


def _in_thread(work: threading.Thread) -> None:
    work.join(DEADLINE_S)
    assert not work.is_alive()


def test_it_is_held_in_the_step_that_is_open() -> None:
    gate = StateGate()
    gate.open(7)
    assert gate.hold(DEADLINE_S) == 7
    gate.close()
    assert gate.holds == 1
    gate.release()
    assert gate.holds == 0


def test_once_it_is_closed_nobody_begins_to_copy_before_the_next_step() -> None:
    gate, steps = StateGate(), list[int]()
    gate.open(7)
    gate.close()
    with pytest.raises(TimeoutError, match="not at rest within 0 s"):
        gate.hold(0)
    asks = threading.Thread(target=lambda: steps.append(gate.hold(DEADLINE_S)))
    asks.start()
    gate.open(8)
    _in_thread(asks)
    assert steps == [8]


def test_before_a_step_nothing_is_open_and_who_asks_early_waits() -> None:
    gate, steps = StateGate(), list[int]()
    with pytest.raises(TimeoutError):
        gate.hold(0)
    asks = threading.Thread(target=lambda: steps.append(gate.hold(DEADLINE_S)))
    asks.start()
    gate.open(8)
    _in_thread(asks)
    assert steps == [8]


def test_it_is_waited_for_all_who_copy() -> None:
    gate, released = StateGate(), threading.Event()
    gate.open(7)
    gate.hold(0)
    gate.hold(0)
    waits = threading.Thread(target=lambda: gate.wait_released(DEADLINE_S, lambda: True) and released.set())
    waits.start()
    gate.release()
    assert not released.wait(0.1)
    gate.release()
    _in_thread(waits)
    assert released.is_set()


def test_patience_with_those_who_copy_is_over_some_time() -> None:
    gate = StateGate()
    gate.open(7)
    gate.hold(0)
    assert not gate.wait_released(0.05, lambda: True)


def test_a_new_world_ends_the_waiting_and_they_go_on_copying() -> None:
    gate = StateGate()
    gate.open(7)
    gate.hold(0)
    assert gate.wait_released(DEADLINE_S, lambda: False)
    assert gate.holds == 1
