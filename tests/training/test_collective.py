"""Collectives that were broken off end, or are abandoned."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from unicron_elastic.training.collective import PATIENCE_S, AbandonedError, Waiter

SLOW_S = 0.2  # as a look takes, at the most, on a machine with other things to do


class Stuck:
    """A collective that neither ends nor fails."""

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError when the time is over, as torch does."""
        time.sleep(timeout.total_seconds())
        raise RuntimeError("Operation timed out!")

    def is_completed(self) -> bool:
        """Never."""
        return False


class Late(Stuck):
    """One that fails after some looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError."""
        self.looks -= 1
        super().wait(timeout)

    def is_completed(self) -> bool:
        """After so many looks."""
        return self.looks == 0


def wait(waiter: Waiter, work: Any) -> float:
    """How long it takes until the collective is abandoned, in seconds."""
    began = time.monotonic()
    with pytest.raises(AbandonedError):
        waiter.wait(work)
    return time.monotonic() - began


def test_a_broken_one_that_does_not_end_is_abandoned() -> None:
    assert wait(Waiter(lambda: True), Stuck()) > PATIENCE_S


def test_all_of_a_group_share_one_moment() -> None:
    waiter = Waiter(lambda: True)
    wait(waiter, Stuck())
    began = time.monotonic()
    assert not any(waiter.has_ended(work) for work in [Stuck(), Stuck(), Stuck()])  # type: ignore[arg-type]
    assert time.monotonic() - began < 3 * SLOW_S


def test_the_next_group_has_its_own() -> None:
    waiter = Waiter(lambda: True)
    wait(waiter, Stuck())
    waiter.begin()
    assert wait(waiter, Stuck()) > PATIENCE_S


def test_while_nothing_is_broken_it_waits() -> None:
    looks: list[int] = []
    waiter = Waiter(lambda: len(looks) > 3)

    class Counted(Stuck):
        def wait(self, timeout: timedelta) -> None:
            looks.append(1)
            super().wait(timeout)

    wait(waiter, Counted())
    assert len(looks) > 4


def test_one_that_fails_by_itself_says_so() -> None:
    with pytest.raises(RuntimeError, match="timed out"):
        Waiter(lambda: True).wait(Late(2))  # type: ignore[arg-type]
