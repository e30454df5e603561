"""Nobody waits for a process between a warm process and a worker, and none of them stays as a zombie."""

from __future__ import annotations

import os
import signal
import threading
import time

from unicron_elastic.worker.channel import Channel
from unicron_elastic.worker.process.prctl import REPARENT_DEADLINE_S
from unicron_elastic.worker.start.in_between import InBetween
from unicron_elastic.worker.start.learner import Learner


def _forked(until: int) -> int:
    """Fork a child that ends when ``until`` is closed by all others."""
    child = os.fork()
    if child == 0:
        os.read(until, 1)
        os._exit(0)
    return child


def test_what_comes_is_heard_while_one_of_them_still_ends_and_that_is_collected_later() -> None:
    ours, theirs = Channel.pair()
    until, told = os.pipe()
    child = _forked(until)
    between = InBetween()
    between.add(child)
    between.add(2**22 - 1)  # which another has collected
    os.write(theirs.fileno(), b"x")
    assert between.wait_readable([ours]) == [ours]
    os.read(ours.fileno(), 1)
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "it runs"

    os.write(told, b"x")
    waits = threading.Thread(target=between.wait_readable, args=([ours],))
    waits.start()
    deadline = threading.Event()
    while os.path.exists(f"/proc/{child}"):
        assert not deadline.wait(0.01)
    os.write(theirs.fileno(), b"x")
    waits.join(30.0)
    assert not waits.is_alive()
    for each in (ours, theirs):
        each.close()
    for fd in (until, told):
        os.close(fd)


def test_the_learner_that_adopts_orphans_begins_when_all_workers_are_the_keepers() -> None:
    until, told = os.pipe()
    child = _forked(until)
    between, learner = InBetween(), Learner()
    between.add(child)
    ends = threading.Timer(0.05, os.write, (told, b"x"))
    ends.start()
    if learner.begin(between) is not None:
        signal.pause()
    try:
        assert not os.path.exists(f"/proc/{child}")
        began = time.monotonic()
        if learner.begin(between) is not None:  # in the place of the one that waits
            signal.pause()
        assert time.monotonic() - began < REPARENT_DEADLINE_S
    finally:
        learner.stop()
        ends.join()
        for fd in (until, told):
            os.close(fd)
