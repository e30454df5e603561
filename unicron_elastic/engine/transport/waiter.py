"""Waits for collectives that may have been broken off, without waiting for ever.

Gloo (torch 2.13) forgets one kind of waiting when a connection ends: a send that was under way. The collective then
neither ends nor fails before the group's time-out, and whoever destroys the group waits for it. So the wait here looks
up now and then; once the collectives of a group are known to be broken they get a moment to say so themselves, all the
same one, and then they are abandoned: group and collectives stay in memory, untouched, until the process ends.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

from torch.distributed import DistNetworkError, Work

from unicron_elastic.engine.transport.landing import Mark
from unicron_elastic.engine.transport.of_script import is_of_script

LOOK_S = 0.05  # between two looks at whether it is broken
MARK_LOOK_S = 0.001  # at most, between two at whether a device has passed a mark
LAST_LOOK_S = 0.001  # at one for which there is no patience left
PATIENCE_S = 0.1  # for the broken ones to fail: most do within milliseconds
_ABANDONED = "a collective was broken off and does not end"
_IN_VAIN = "a collective timed out, as a rank that is not known to be at work did not come to it"


class Patience(Protocol):
    """How long this rank waits for others in a collective."""

    def begin(self) -> None:
        """Note that it begins to wait."""

    def is_over(self) -> bool:
        """Whether it has waited long enough."""


class AbandonedError(RuntimeError):
    """A collective was broken off, or waited in vain, and does not end."""


class Waiter:
    """Waits for the collectives of one process. ``is_broken``: they have been broken off, and will not succeed.

    ``looks_up``: whether the back end needs it. NCCL's collectives are ended by an abort, and mind a time-out.
    ``patience``: with ranks that do not come; None: the back end's time-out is.
    """

    def __init__(
        self, is_broken: Callable[[], bool], *, looks_up: bool = True, patience: Patience | None = None
    ) -> None:
        self._is_broken = is_broken
        self._patience = patience
        self._looks_up = looks_up
        self._broken_at: float | None = None
        self.on_look: Callable[[], None] = lambda: None  # at each look; what it raises ends the waiting

    def begin(self) -> None:
        """Begin anew, for the collectives of a new group."""
        self._broken_at = None

    def wait(self, work: Work) -> None:
        """Raises what the collective raises, or AbandonedError; then nobody knows when it last uses its tensors."""
        if not self._looks_up:
            work.wait()
            return
        self._begin()
        while True:
            is_last = self._is_over()
            try:
                work.wait(timedelta(seconds=LAST_LOOK_S if is_last else LOOK_S))
                return
            except RuntimeError as error:
                if is_of_script(error):
                    raise
                if work.is_completed():
                    work.wait()  # raises what it ended with, if not well: it may have ended right after the time-out
                    return
            if is_last or self._is_in_vain():
                self._abandon(work)
            try:
                self.on_look()
            except RuntimeError:
                keep_for_ever(work)
                raise

    def wait_one_to_one(self, work: Work) -> None:
        """Do what ``wait`` does, for a send or a receive: gloo ends the connection when its time-out is over."""
        try:
            self.call(work.wait)
        except AbandonedError:
            keep_for_ever(work)
            raise

    def land(self, work: Work, marks: Sequence[Mark]) -> None:
        """Wait until a device has passed the marks behind ``work``, and has done it in a whole world.

        Raises AbandonedError if it does not; DistNetworkError if the collectives are broken when it has, as an abort
        lets a device pass them, too; and what the back end knows of a failure.
        """
        if not marks:
            return
        try:
            self._await(partial(_are_passed, marks), self.on_look)
        except RuntimeError:
            keep_for_ever(work)
            raise
        if self._is_broken():
            raise DistNetworkError("Connection closed by peer: it was broken off before the device had finished it")
        if (error := work.exception()) is not None:  # NCCL's watchdog notes it, and has ended what was under way
            raise RuntimeError(str(error))

    def has_landed(self, marks: Sequence[Mark]) -> bool:
        """Wait until a device has passed the marks of a broken collective; false if it had to be abandoned."""
        try:
            self._await(partial(_are_passed, marks))
        except AbandonedError:
            return False
        return True

    def call(self, waits: Callable[[], Any]) -> None:
        """Call in a thread what waits without time-out, as ``wait`` does. Raises what it raises, or AbandonedError."""
        if not self._looks_up:
            waits()
            return
        self._await(InThread(waits).wait)

    def _await(self, has_come: Callable[[float], bool], on_look: Callable[[], None] = lambda: None) -> None:
        """Wait for what comes within the seconds that it is given, or does not. Raises AbandonedError."""
        self._begin()
        while not has_come(LAST_LOOK_S if (is_last := self._is_over()) else LOOK_S):
            if is_last or self._is_in_vain():
                raise AbandonedError(_ABANDONED if is_last else _IN_VAIN)
            on_look()

    def _abandon(self, work: Work) -> NoReturn:
        keep_for_ever(work)
        raise AbandonedError(_ABANDONED if self._is_broken() else _IN_VAIN)

    def _begin(self) -> None:
        if self._patience is not None:
            self._patience.begin()

    def _is_in_vain(self) -> bool:
        return self._patience is not None and not self._is_broken() and self._patience.is_over()

    def _is_over(self) -> bool:
        """Whether the collectives are broken and had their time to fail."""
        if not self._is_broken():
            return False
        now = time.monotonic()
        self._broken_at = self._broken_at or now
        return now - self._broken_at > PATIENCE_S

    def has_ended(self, work: Work, *, minds_time_out: bool = True) -> bool:
        """Waits for the end of a broken collective, good or bad; false if it had to be abandoned.

        ``minds_time_out``: gloo's reduce-scatter (torch 2.13) does not, and is not completed when it has ended.
        """
        try:
            if minds_time_out:
                self.wait(work)
            else:
                self.wait_one_to_one(work)
        except AbandonedError:
            return False
        except RuntimeError as error:
            if is_of_script(error):
                raise
        return True


def _are_passed(marks: Sequence[Mark], seconds: float) -> bool:
    """Wait so long, without being busy, for a device to pass all marks; return whether it has."""
    end, pause_s = time.monotonic() + seconds, MARK_LOOK_S / 16
    while not all(mark.query() for mark in marks):
        if time.monotonic() > end:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MARK_LOOK_S)
    return True


class InThread:
    """An `InThread` is a call in another thread, which is left to itself if it does not end; else that takes others."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        try:
            calls = _idle.pop()
        except IndexError:
            calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(calls,), name="unicron-wait", daemon=True).start()

        def run() -> None:
            try:
                call()
            except BaseException as error:
                self._error = error
            _idle.append(calls)
            self._has_ended.set()

        calls.put(run)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended. Raises what it raised."""
        has_ended = self._has_ended.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return has_ended


def _serve(calls: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        calls.get()()


_idle: list[queue.SimpleQueue[Callable[[], None]]] = []  # of threads that wait for a call
os.register_at_fork(after_in_child=_idle.clear)


def keep_for_ever(thing: Any) -> None:
    """Keep it from ever being destroyed, also when the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
