"""Collectives that were broken off end, or are abandoned."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from warm_launcher import WarmLaunchers

from unicron_elastic.engine.transport.of_script import is_of_script
from unicron_elastic.engine.transport.references import count_references, wait_let_go
from unicron_elastic.engine.transport.waiter import PATIENCE_S, AbandonedError, Waiter

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

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raises RuntimeError."""
        if timeout is None:
            raise RuntimeError("Connection closed by peer")
        self.looks -= 1
        super().wait(timeout)

    def is_completed(self) -> bool:
        """After so many looks."""
        return self.looks == 0


class EndedInTime(Late):
    """One that ends well right after a time-out, before anybody asks whether it has."""

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raises RuntimeError, but not once it has ended."""
        if timeout is not None:
            super().wait(timeout)


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
    with pytest.raises(RuntimeError, match="closed by peer"):
        Waiter(lambda: True).wait(Late(2))  # type: ignore[arg-type]


def test_one_that_ends_well_between_two_looks_is_no_failure() -> None:
    Waiter(lambda: False).wait(EndedInTime(2))  # type: ignore[arg-type]


# Sends and receives while the peer sleeps for longer than a look takes.
PAIR = """
import sys, time
import torch, torch.distributed as dist
from unicron_elastic.engine.transport.waiter import LOOK_S, Waiter
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
waiter, tensor = Waiter(lambda: False), torch.full((1_000_000,), float(rank))
for sleeper in (0, 1):
    if rank == sleeper:
        time.sleep(4 * LOOK_S)
    waiter.wait_one_to_one(dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0))
print(tensor.sum().item())
dist.destroy_process_group()
"""


def test_a_peer_may_be_late_to_a_send_or_a_receive(tmp_path: Path, warm_launchers: WarmLaunchers) -> None:
    script = tmp_path / "pair.py"
    script.write_text(PAIR)
    said = [tmp_path / f"said-{rank}" for rank in range(2)]
    ranks = [warm_launchers.begin(each, str(script), str(rank)) for rank, each in enumerate(said)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    assert [each.read_text() for each in said] == ["0.0\n", "0.0\n"]


def test_a_send_that_does_not_end_is_abandoned() -> None:
    ended = threading.Event()

    class Held:
        def wait(self) -> None:
            ended.wait(60)

    with pytest.raises(AbandonedError):
        Waiter(lambda: True).wait_one_to_one(Held())  # type: ignore[arg-type]
    ended.set()


def test_calls_one_after_another_share_a_thread() -> None:
    threads = set()
    for _ in range(9):
        Waiter(lambda: False).call(lambda: threads.add(threading.get_ident()))
    assert len(threads) == 1


def test_a_tensor_is_let_go() -> None:
    tensor = torch.zeros(1)
    held = [tensor]
    references = count_references(held)
    by_gloo = [tensor]
    threading.Timer(0.1, by_gloo.clear).start()
    wait_let_go(held, references)
    assert not by_gloo


# -- exceptions of the script ----------------------------------------------------------------------------------------


def time_is_up(*_: Any) -> NoReturn:
    """A handler of the script."""
    raise RuntimeError("time is up")


class Clock:
    """Handlers that are methods, and objects."""

    def ring(self, *_: Any) -> NoReturn:
        """A method."""
        time_is_up()

    def __call__(self, *_: Any) -> NoReturn:
        """An object."""
        raise RuntimeError("time is up")


class Interrupted(Stuck):
    """One during which a signal comes."""

    was_interrupted = False

    def wait(self, timeout: timedelta) -> None:
        """Raises what the handler raises."""
        assert not self.was_interrupted, "what the handler raised was lost"
        self.was_interrupted = True
        os.kill(os.getpid(), signal.SIGUSR1)
        super().wait(timeout)


def rings_once(number: int, _frame: object) -> NoReturn:
    """Is no handler any more when it raises, as those of time-outs."""
    signal.signal(number, signal.SIG_IGN)
    raise RuntimeError("time is up")


@pytest.mark.parametrize("handler", [time_is_up, Clock().ring, Clock(), functools.partial(time_is_up, 7), rings_once])
@pytest.mark.parametrize("is_broken", [False, True])
def test_what_a_signal_handler_raises_is_raised(handler: Any, is_broken: bool) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    waiter: Any = Waiter(lambda: is_broken)
    try:
        for waits in (waiter.wait, waiter.has_ended):
            signal.signal(signal.SIGUSR1, handler)
            with pytest.raises(RuntimeError, match="time is up") as raised:
                waits(Interrupted())
            assert is_of_script(raised.value)
    finally:
        signal.signal(signal.SIGUSR1, before)


class TimeIsUp(RuntimeError):
    """As a watching thread of the script may raise it in the main thread, without a frame of its own."""


class Broken(Stuck):
    """One that fails."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def wait(self, timeout: timedelta) -> NoReturn:  # noqa: ARG002 - as torch's
        """Raises it."""
        raise self._error


def test_an_exception_of_the_scripts_own_kind_is_raised() -> None:
    waiter: Any = Waiter(lambda: True)
    for waits in (waiter.wait, waiter.has_ended):
        with pytest.raises(TimeIsUp):
            waits(Broken(TimeIsUp()))


def test_what_a_collective_raises_is_not_the_scripts() -> None:
    waiter: Any = Waiter(lambda: True)
    for error in (RuntimeError("Connection closed by peer"), dist.DistNetworkError("reset"), ValueError("no group")):
        assert not is_of_script(error)
    assert not waiter.has_ended(Broken(RuntimeError("Connection closed by peer")))  # it does not end, either
