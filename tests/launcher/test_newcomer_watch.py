"""Newcomers that are stopped on their way are seen, and those that only take their time are left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from unicron_elastic.launcher.agent.hangs.newcomer_watch import NewcomerWatch
from unicron_elastic.launcher.agent.process.activity import state
from unicron_elastic.launcher.common.loop import Loop

DEADLINE_S = 30.0


class Newcomer:
    """A real process, as the watch sees a worker."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        self.pid = self.process.pid
        self.local_rank = 1
        self.returncode: int | None = None

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + DEADLINE_S
        while state(self.pid) != "T":
            assert time.monotonic() < deadline

    def end(self) -> None:
        self.process.kill()
        self.returncode = self.process.wait()


class Watched:
    """The watch, and what it told."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.stopped: list[tuple[int, int, float]] = []
        self.going_on: list[int] = []
        self.seen = 0
        self.watch = NewcomerWatch(
            self.loop,
            lambda rank, worker, lasted_s: self.stopped.append((rank, worker.pid, lasted_s)),
            self.going_on.append,
            look_s=0.01,
            stopped_s=0.2,
            state=self._state,
        )

    def are(self, **workers: Any) -> None:
        self.watch.watch({int(rank.strip("r")): worker for rank, worker in workers.items()})

    def until(self, is_so: Callable[[], bool]) -> None:
        assert self.loop.run_until(is_so, time.monotonic() + DEADLINE_S)

    def looks(self, count: int) -> None:
        """Runs until it has looked so often."""
        enough = self.seen + count
        self.until(lambda: self.seen >= enough)

    def _state(self, pid: int) -> str:
        self.seen += 1
        return state(pid)


@pytest.fixture
def newcomer() -> Iterator[Newcomer]:
    found = Newcomer()
    yield found
    found.end()


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    yield found
    found.loop.close()


def test_one_that_is_stopped_is_told_once_and_so_is_that_it_goes_on(watched: Watched, newcomer: Newcomer) -> None:
    newcomer.stop()
    watched.are(r3=newcomer)
    watched.until(lambda: bool(watched.stopped))
    ((rank, pid, lasted_s),) = watched.stopped
    assert (rank, pid) == (3, newcomer.pid)
    assert lasted_s >= 0.2
    watched.looks(5)
    assert len(watched.stopped) == 1
    newcomer.process.send_signal(signal.SIGCONT)
    watched.until(lambda: bool(watched.going_on))
    watched.looks(5)
    assert watched.going_on == [3]
    newcomer.stop()  # once more
    watched.until(lambda: len(watched.stopped) == 2)


def test_one_that_goes_on_as_a_member_is_told_to_go_on(watched: Watched, newcomer: Newcomer) -> None:
    newcomer.stop()
    watched.are(r3=newcomer)
    watched.until(lambda: bool(watched.stopped))
    newcomer.process.send_signal(signal.SIGCONT)
    watched.are()
    watched.until(lambda: bool(watched.going_on))


def test_one_that_only_takes_its_time_is_left_alone(watched: Watched, newcomer: Newcomer) -> None:
    watched.are(r3=newcomer)
    watched.looks(40)
    assert not watched.stopped
    assert not watched.going_on


def test_nobody_is_looked_at_any_more_when_all_have_joined_or_ended(watched: Watched, newcomer: Newcomer) -> None:
    newcomer.stop()
    watched.are(r3=newcomer)
    watched.until(lambda: bool(watched.stopped))
    newcomer.end()
    watched.until(lambda: not watched.watch._is_looking)
    assert not watched.going_on
    following = Newcomer()
    try:
        watched.are(r3=following)  # in its place
        watched.looks(3)
        watched.are()
        watched.until(lambda: not watched.watch._is_looking)
    finally:
        following.end()
    assert len(watched.stopped) == 1
