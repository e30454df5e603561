"""The event loop: readiness, timers, calls from other threads, and callbacks that fail or change what is watched."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from unicron_elastic.launcher.common.loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def sockets() -> Iterator[list[socket.socket]]:
    """Two connected pairs: 0 with 1, 2 with 3."""
    made = [*socket.socketpair(), *socket.socketpair()]
    yield made
    for sock in made:
        sock.close()


def _deadline() -> float:
    return time.monotonic() + 10.0


def test_readable_sources_call_back_until_they_are_read(loop: Loop, sockets: list[socket.socket]) -> None:
    heard: list[bytes] = []
    loop.on_readable(sockets[0], lambda: heard.append(sockets[0].recv(1)))
    sockets[1].send(b"ab")
    assert loop.run_until(lambda: len(heard) == 2, _deadline())
    assert heard == [b"a", b"b"]


def test_a_closed_peer_is_readable(loop: Loop, sockets: list[socket.socket]) -> None:
    heard: list[bytes] = []
    loop.on_readable(sockets[0], lambda: heard.append(sockets[0].recv(1)))
    sockets[1].close()
    assert loop.run_until(lambda: bool(heard), _deadline())
    assert heard[0] == b""


def test_timers_run_in_the_order_of_their_times_and_not_before(loop: Loop) -> None:
    ran: list[tuple[str, float]] = []
    start = time.monotonic()
    for name, delay in (("c", 0.03), ("a", 0.01), ("b", 0.02)):
        loop.call_at(start + delay, lambda name=name: ran.append((name, time.monotonic())))  # type: ignore[misc]
    assert loop.run_until(lambda: len(ran) == 3, _deadline())
    assert [name for name, _ in ran] == ["a", "b", "c"]
    assert all(at >= start + delay for (_, at), delay in zip(ran, (0.01, 0.02, 0.03), strict=True))


def test_timers_of_the_same_time_run_in_the_order_of_their_making(loop: Loop) -> None:
    ran: list[int] = []
    for number in range(5):
        loop.call_at(1.0, lambda number=number: ran.append(number))  # type: ignore[misc]
    assert loop.run_until(lambda: len(ran) == 5, _deadline())
    assert ran == [0, 1, 2, 3, 4]


def test_it_stops_at_the_deadline(loop: Loop) -> None:
    start = time.monotonic()
    assert not loop.run_until(lambda: False, start + 0.02)
    assert start + 0.02 <= time.monotonic()


def test_what_is_done_already_runs_nothing(loop: Loop) -> None:
    ran: list[int] = []
    loop.call_at(0.0, lambda: ran.append(1))
    assert loop.run_until(lambda: True)
    assert ran == []


def test_a_call_from_another_thread_wakes_it(loop: Loop) -> None:
    threads: list[threading.Thread | None] = []
    caller = threading.Timer(0.02, lambda: loop.call_soon(lambda: threads.append(threading.current_thread())))
    caller.start()
    assert loop.run_until(lambda: bool(threads))  # without a deadline: only the call can wake it
    assert threads == [threading.current_thread()]


def test_calls_from_many_threads_all_arrive(loop: Loop) -> None:
    heard: list[int] = []

    def call() -> None:
        for number in range(200):
            loop.call_soon(partial(heard.append, number))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert loop.run_until(lambda: len(heard) == 800, _deadline())
    for thread in threads:
        thread.join()


def test_a_callback_may_forget_and_close_another_that_is_ready(loop: Loop, sockets: list[socket.socket]) -> None:
    ran: list[int] = []

    def close_other(mine: int, other: int) -> None:
        ran.append(mine)
        sockets[mine].recv(1)
        loop.forget(sockets[other])
        sockets[other].close()

    loop.on_readable(sockets[0], lambda: close_other(0, 2))
    loop.on_readable(sockets[2], lambda: close_other(2, 0))
    sockets[1].send(b"x")
    sockets[3].send(b"x")
    assert not loop.run_until(lambda: False, time.monotonic() + 0.02)
    assert len(ran) == 1


def test_forgetting_what_is_unknown_is_no_error(loop: Loop, sockets: list[socket.socket]) -> None:
    loop.forget(sockets[0])
    loop.on_readable(sockets[0], lambda: None)
    loop.forget(sockets[0])
    loop.forget(sockets[0])
    sockets[0].close()
    loop.forget(sockets[0])


def test_an_exception_passes_through_and_the_loop_goes_on(loop: Loop, sockets: list[socket.socket]) -> None:
    heard: list[str] = []

    def fail() -> None:
        raise RuntimeError("from a callback")

    def read() -> None:
        heard.append(sockets[0].recv(10).decode())

    loop.on_readable(sockets[0], read)
    loop.call_at(0.0, fail)
    loop.call_at(0.0, lambda: heard.append("timer"))
    sockets[1].send(b"readable")
    with pytest.raises(RuntimeError, match="from a callback"):
        loop.run_until(lambda: len(heard) == 2, _deadline())
    assert loop.run_until(lambda: len(heard) == 2, _deadline())
    assert sorted(heard) == ["readable", "timer"]


def test_an_exception_loses_no_call_of_another_thread(loop: Loop) -> None:
    heard: list[str] = []

    def fail() -> None:
        raise RuntimeError("from a callback")

    loop.call_soon(fail)
    loop.call_soon(lambda: heard.append("second"))
    with pytest.raises(RuntimeError, match="from a callback"):
        loop.run_until(lambda: bool(heard), _deadline())
    assert loop.run_until(lambda: bool(heard), time.monotonic() + 1.0)


def test_call_soon_after_the_end_is_no_error() -> None:
    loop = Loop()
    loop.close()
    loop.call_soon(lambda: None)


def test_a_signal_is_handled_between_callbacks(loop: Loop, sockets: list[socket.socket]) -> None:
    heard: list[bytes] = []

    def fail(_number: int, _frame: object) -> None:
        raise RuntimeError("from a handler")

    def read() -> None:
        message = sockets[0].recv(1)
        signal.raise_signal(signal.SIGUSR1)
        heard.append(message)  # is not lost

    before = signal.signal(signal.SIGUSR1, loop.between_callbacks(fail))
    try:
        loop.on_readable(sockets[0], read)
        sockets[1].send(b"x")
        with pytest.raises(RuntimeError, match="from a handler"):
            loop.run_until(lambda: False, _deadline())
        assert heard == [b"x"]
        sockets[1].send(b"y")
        with pytest.raises(RuntimeError, match="from a handler"):  # also when the loop was just done
            loop.run_until(lambda: len(heard) == 2, _deadline())
        with pytest.raises(RuntimeError, match="from a handler"):  # and at once when it does not run
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_wakes_a_loop_that_waits(loop: Loop) -> None:
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, loop.between_callbacks(lambda number, _frame: handled.append(number)))
    try:
        threading.Timer(0.02, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        assert loop.run_until(lambda: bool(handled))  # without a deadline: only the signal can wake it
    finally:
        signal.signal(signal.SIGUSR1, before)
