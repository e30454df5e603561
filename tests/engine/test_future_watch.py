"""Connections are broken for futures that do not end in a world that is left, and for no others."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from unicron_elastic.engine.group.future_watch import FutureWatch
from unicron_elastic.engine.transport.waiter import LOOK_S, PATIENCE_S

DEADLINE_S = 20.0


def test_a_future_of_a_world_that_is_left_has_its_connections_broken_after_a_moment() -> None:
    broken, left_at = threading.Event(), time.monotonic()
    watch = FutureWatch(lambda: True, broken.set)
    watch.add(torch.futures.Future())
    assert broken.wait(DEADLINE_S)
    assert time.monotonic() - left_at > PATIENCE_S


def test_one_that_ends_in_that_moment_breaks_nothing() -> None:
    broken = threading.Event()
    future: Any = torch.futures.Future()
    watch = FutureWatch(lambda: True, broken.set)
    watch.add(future)
    future.set_result(None)
    assert not broken.wait(2 * PATIENCE_S + 2 * LOOK_S)


def test_futures_are_watched_over_again_after_a_time_without_any() -> None:
    broken, left = threading.Event(), threading.Event()
    watch = FutureWatch(left.is_set, broken.set)
    first: Any = torch.futures.Future()
    watch.add(first)
    first.set_result(None)
    time.sleep(3 * LOOK_S)
    left.set()
    watch.add(torch.futures.Future())
    assert broken.wait(DEADLINE_S)
