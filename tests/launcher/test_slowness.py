"""Which slowness people hear of."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from unicron_elastic.detection.verdicts import Degraded
from unicron_elastic.launcher import slowness
from unicron_elastic.launcher.loop import Loop
from unicron_elastic.launcher.slowness import MILD_FACTOR, PATIENCE_S, Slowness


class Timers(Loop):
    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], None]]] = []

    def call_at(self, at: float, callback: Callable[[], None]) -> None:
        self.set.append((at, callback))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> tuple[Slowness, Timers, list[str]]:
    monkeypatch.setattr(slowness.time, "monotonic", lambda: 100.0)
    said: list[str] = []
    timers = Timers()
    return Slowness(timers, said.append), timers, said


def slow(factor: float) -> Degraded:
    return Degraded(at=time.monotonic(), ranks=(1,), factor=factor, usual_s=0.02, reason=f"{factor}x.")


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
    assert at == 100.0 + PATIENCE_S
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
    watch.begins(slow(1.2))
    timers.set[0][1]()  # of the first, which is over
    assert said == []
    timers.set[1][1]()
    assert said == ["1.2x."]
