"""Simulated time."""

from __future__ import annotations

import pytest

from unicron_elastic.simulation.model.engine import SimulationEngine


def test_things_happen_at_their_moment_and_in_the_order_of_planning() -> None:
    engine, seen = SimulationEngine(), list[tuple[float, str]]()
    for at_s, name in ((2.0, "late"), (1.0, "first"), (1.0, "second")):
        engine.at(at_s, lambda name=name: seen.append((engine.now_s, name)))  # type: ignore[misc]
    engine.run(1.5)
    assert seen == [(1.0, "first"), (1.0, "second")]
    assert engine.now_s == 1.5
    engine.run(2.0)
    assert seen[-1] == (2.0, "late")


def test_what_follows_at_the_same_moment_still_happens() -> None:
    engine, seen = SimulationEngine(), list[float]()
    engine.at(1.0, lambda: engine.after(0.0, lambda: seen.append(engine.now_s)) and None)
    engine.run(1.0)
    assert seen == [1.0]


def test_what_is_cancelled_does_not_happen() -> None:
    engine, seen = SimulationEngine(), list[int]()
    engine.at(1.0, lambda: seen.append(1)).cancel()
    engine.run(2.0)
    assert not seen
    assert engine.happened == 0


def test_what_lies_in_the_past_happens_next_and_time_never_goes_back() -> None:
    engine, seen = SimulationEngine(), list[float]()
    engine.run(5.0)
    engine.at(1.0, lambda: seen.append(engine.now_s))
    engine.run(5.0)
    assert seen == [5.0]


def test_a_moment_is_a_number() -> None:
    with pytest.raises(ValueError, match="must be seconds"):
        SimulationEngine().at(float("nan"), lambda: None)
