"""The wait for the other nodes at the end, with torch's own barrier and store."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from torch.distributed import TCPStore
from torch.distributed.elastic.utils.store import barrier

from unicron_elastic.launcher.agent.core.last_barrier import wait_at_last_barrier

DEADLINE_S = 30.0


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def host_a_store(port: Connection) -> None:
    store = new_store()
    port.send(store.port)
    port.recv()


def test_all_go_on_together() -> None:
    store = new_store()
    client = TCPStore("127.0.0.1", store.port, None, is_master=False)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(wait_at_last_barrier, lambda: False, lambda: barrier(store, 2, "end", DEADLINE_S))
        wait_at_last_barrier(lambda: False, lambda: barrier(client, 2, "end", DEADLINE_S))
        first.result(DEADLINE_S)


def test_a_node_that_is_lost_meanwhile_is_not_waited_for() -> None:
    store = new_store()
    is_lost = threading.Event()
    threading.Timer(0.2, is_lost.set).start()
    wait_at_last_barrier(is_lost.is_set, lambda: barrier(store, 2, "end", DEADLINE_S))
    assert is_lost.is_set()
    other = TCPStore("127.0.0.1", store.port, None, is_master=False)
    barrier(other, 2, "end", DEADLINE_S)  # lets the thread go


def test_nor_is_the_silent_host_of_the_store() -> None:
    ours, theirs = multiprocessing.Pipe()
    host = multiprocessing.get_context("spawn").Process(target=host_a_store, args=(theirs,))
    host.start()
    store = TCPStore("127.0.0.1", ours.recv(), None, is_master=False)
    assert host.pid is not None

    def wait() -> None:
        with contextlib.suppress(RuntimeError):  # when the host goes on and ends
            barrier(store, 2, "end", DEADLINE_S)

    os.kill(host.pid, signal.SIGSTOP)
    try:
        is_lost = threading.Event()
        threading.Timer(0.2, is_lost.set).start()
        wait_at_last_barrier(is_lost.is_set, wait)
        assert is_lost.is_set()
    finally:
        os.kill(host.pid, signal.SIGCONT)
        ours.send("end")
        host.join(DEADLINE_S)


def test_who_was_lost_before_is_not_waited_for_at_all() -> None:
    began: list[bool] = []
    wait_at_last_barrier(lambda: True, lambda: began.append(True))
    assert began == []


def test_a_signal_is_heeded_meanwhile() -> None:
    class Told(Exception):
        pass

    def handler(*_: object) -> None:
        raise Told

    before = signal.signal(signal.SIGUSR1, handler)
    is_told = threading.Event()
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
    try:
        began = time.monotonic()
        wait_at_last_barrier(lambda: False, lambda: is_told.wait(DEADLINE_S) and None)
    except Told:
        assert time.monotonic() - began < DEADLINE_S
    else:
        raise AssertionError("the signal was not heeded")
    finally:
        is_told.set()
        signal.signal(signal.SIGUSR1, before)
