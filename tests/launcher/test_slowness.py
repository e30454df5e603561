"""Which slowness people hear of."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from unicron_elastic.detection.telling import Degraded
from unicron_elastic.launcher.agent.hangs.slowness import FORGET_S, MILD_FACTOR, PATIENCE_MAX_S, PATIENCE_S, Slowness
from unicron_elastic.launcher.common.loop import Loop

NOW = [0.0]


class Timers(Loop):
    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []

    def call_at(self, at: float, callback: Callable[[], None]) -> None:
        self.set.append((at, callback))


@pytest.fixture
def told() -> tuple[Slowness, Timers, list[str]]:
    NOW[0] = 10_000.0
    said: list[str] = []
    timers = Timers()
    return Slowness(timers, said.append, lambda: NOW[0]), timers, said


def slow(factor: float) -> Degraded:
    return Degraded(at=NOW[0], ranks=(1,), factor=factor, usual_s=0.02, reason=f"{factor}x.")


def test_large_slowness_is_told_at_once(told: tuple[Slowness, Timers, list[str]]) -> None:
    watch, timers, said = told
    watch.begins(slow(MILD_FACTOR))
    watch.ends("over.")
    assert said == [f"{MILD_FACTOR}x.", "over."]
    assert timers.set == []


def test_mild_slowness_is_told_when_it_lasts(told: tuple[Slowness, Timers, list[str]]) -> None:
    watch, timers, said = told
    watch.begins(slow(1.1))
    assert said == []
    [(at, lasts)] = timers.set
    assert at == NOW[0] + PATIENCE_S
    lasts()
    watch.ends("over.")
    assert said == ["1.1x.", "over."]


@pytest.mark.parametrize("end", [lambda watch: watch.ends("over."), lambda watch: watch.forget()])
def test_mild_slowness_that_passes_is_not_told(
    told: tuple[Slowness, Timers, list[str]], end: Callable[[Slowness], None]
) -> None:
    watch, timers, said = told
    watch.begins(slow(1.1))
    end(watch)
    watch.begins(slow(1.15))
    timers.set[0][1]()  # of the first, which is over
    assert said == []
    timers.set[1][1]()
    assert said == ["1.15x."]


def test_a_host_that_is_always_busy_tells_less_and_less(told: tuple[Slowness, Timers, list[str]]) -> None:
    watch, timers, said = told
    waits = []
    for _ in range(9):
        timers.set.clear()
        watch.begins(slow(2.0))
        for at, lasts in timers.set:
            waits.append(at - NOW[0])
            NOW[0] = at
            lasts()
        watch.ends("over.")
    assert waits == [10, 20, 40, 80, 160, 320, PATIENCE_MAX_S, PATIENCE_MAX_S]
    assert len(said) == 18
    NOW[0] += FORGET_S + 1
    timers.set.clear()
    watch.begins(slow(2.0))
    assert timers.set == []
    assert len(said) == 19
