"""Who waits for a rank at work waits as long as that is, and for an idle one as long as the time-out says."""

from __future__ import annotations

import os
import threading
import time

import pytest
from torch.distributed import HashStore

from unicron_elastic.training.group import signs
from unicron_elastic.training.group.signs import PHASE_S, Effort, Signs
from unicron_elastic.worker import phases
from unicron_elastic.worker.pulse import Pulse, PulsePage

TIMEOUT_S = 80.0


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Two:
    """A rank that waits, and one for which it does; time passes in steps of a second."""

    def __init__(self) -> None:
        self.clock, self.store = Clock(), HashStore()
        self.is_at_work = False
        self.waits = Signs(TIMEOUT_S, lambda: True, self.clock)
        self.other = Signs(TIMEOUT_S, lambda: self.is_at_work, self.clock)
        self.waits._store = self.other._store = self.store  # without threads

    def pass_until_over(self, limit_s: float) -> bool:
        """Whether the patience of the one is over within that time."""
        self.waits.begin()
        end = self.clock.now + limit_s
        with self.waits.waiting():
            while self.clock.now < end:
                self.clock.now += 1.0
                if self.clock.now % 10 == 0:
                    self.waits.give()
                    self.other.give()
                if self.waits.is_over():
                    return True
        return False


def test_an_idle_rank_is_waited_for_as_long_as_the_time_out_says() -> None:
    two = Two()
    assert two.pass_until_over(1000.0)
    assert two.clock.now == TIMEOUT_S + 1.0


def test_a_rank_at_work_is_waited_for_until_it_falls_idle() -> None:
    two = Two()
    two.is_at_work = True
    assert not two.pass_until_over(50 * TIMEOUT_S)
    two.is_at_work = False
    began = two.clock.now
    assert two.pass_until_over(1000.0)
    assert two.clock.now - began <= TIMEOUT_S + 1.0


def test_who_waits_gives_no_signs() -> None:
    two = Two()
    with two.other.waiting():
        two.is_at_work = True
        assert two.pass_until_over(1000.0)


def test_nothing_is_written_or_read_in_short_waits() -> None:
    two = Two()
    two.is_at_work = True
    assert not two.pass_until_over(TIMEOUT_S / 4 - 1.0)
    assert two.store.num_keys() == 0
    assert two.waits._seen is None


def test_the_thread_of_signs_that_are_gone_ends_at_once() -> None:
    present = set(threading.enumerate())
    given = Signs(8000.0, lambda: True)  # its thread looks once in a quarter of a minute
    given.watch(HashStore())
    (thread,) = set(threading.enumerate()) - present
    del given
    thread.join(5.0)
    assert not thread.is_alive()


class Broken(HashStore):  # type: ignore[misc]
    """A store that is lost."""

    def check(self, keys: list[str]) -> bool:  # noqa: ARG002
        raise RuntimeError("Connection reset by peer")

    def add(self, key: str, amount: int) -> int:  # noqa: ARG002
        raise RuntimeError("Connection reset by peer")


def test_a_lost_store_gives_no_signs_and_ends_nothing() -> None:
    two = Two()
    two.waits._store = two.other._store = Broken()
    two.is_at_work = True
    assert two.pass_until_over(1000.0)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> PulsePage:
    """That of this process, as a worker has it."""
    made = PulsePage()
    announcer = phases._Announcer()
    announcer.pulse = Pulse(os.dup(made.fd))
    monkeypatch.setattr(phases, "_announcer", announcer)
    return made


@pytest.mark.usefixtures("page")
def test_an_idle_rank_is_at_work_in_a_phase_that_has_not_lasted_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    effort = Effort(clock)
    clock.now += 1000.0
    monkeypatch.setattr(signs, "_runs", lambda: False)  # as this thread does
    assert not effort.look()
    with phases.phase("evaluation"):
        for _ in range(9):
            assert effort.look()
            clock.now += PHASE_S / 10
        clock.now += PHASE_S
        assert not effort.look()
    clock.now += 1000.0
    assert not effort.look()


def test_a_rank_on_a_cpu_is_at_work_and_one_that_sleeps_is_not() -> None:
    effort = Effort()
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass
    assert effort.look()
    found = list[bool]()

    def look() -> None:
        time.sleep(0.3)
        found.append(effort.look())

    looks = threading.Thread(target=look)
    looks.start()
    looks.join()  # the main thread sleeps, too
    assert found == [False]
