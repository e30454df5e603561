"""Waits, between the end of one generation of workers and the start of the next, until the GPUs' memory is free.

A worker that has ended may hold memory for a while: the driver frees it late, and a child that inherited its
descriptors keeps it. New workers would run out of memory, and the restart would be lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from unicron_elastic.health.gpu.state import MemoryHolder
from unicron_elastic.health.host.files import in_gib, read
from unicron_elastic.launcher.agent.process.activity import state
from unicron_elastic.launcher.common.loop import Loop

FREE_TIMEOUT_S = 5.0
LOOK_S = 0.05

# The number of the kernel's first pid namespace (include/linux/proc_ns.h, PROC_PID_INIT_INO).
FIRST_NAMESPACE = 0xEFFFFFFC


@dataclass(frozen=True, slots=True)
class Leftover:
    """Memory that was not given back, and whether its holder has ended or is a process that the workers left."""

    holder: MemoryHolder
    has_ended: bool


class MemoryWait:
    """One wait, begun by making it; for the loop's thread. The driver is asked in another, for it may not answer."""

    def __init__(
        self, loop: Loop, look: Callable[[], list[Leftover]], on_done: Callable[[str], None], timeout_s: float
    ) -> None:
        """``look`` says who still holds memory, and may take long.

        ``on_done`` is called once, in the loop's thread: with "" when nobody does, and after ``timeout_s`` with a
        sentence for people.
        """
        self._loop = loop
        self._look = look
        self._on_done = on_done
        self._timeout_s = timeout_s
        self._left: list[Leftover] | None = None  # as last seen; None: the driver has not answered yet
        self._is_over = threading.Event()
        loop.call_at(time.monotonic() + timeout_s, self._time_is_up)
        threading.Thread(target=self._work, name="unicron-gpu-memory", daemon=True).start()

    def cancel(self) -> None:
        """Nothing is called any more."""
        self._is_over.set()

    def _work(self) -> None:
        while not self._is_over.is_set():
            try:
                left = self._look()
            except Exception:  # what cannot be seen is not waited for
                left = []
            if not left:
                self._loop.call_soon(lambda: self._finish(""))
                return
            self._left = left
            self._is_over.wait(LOOK_S)

    def _time_is_up(self) -> None:
        self._finish(describe(self._left, self._timeout_s))

    def _finish(self, sentence: str) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            self._on_done(sentence)


def leftovers(holders: Sequence[MemoryHolder], pids: Collection[int], mark: str = "") -> list[Leftover]:
    """Return, of all who hold memory, those that the workers ``pids``, which have ended, are to answer for.

    These are the workers, processes with ``mark`` in their environment, which all that the workers start inherits, and
    whoever else has ended: a child of theirs. In a container the driver may tell the numbers of another pid namespace,
    in which a process that is not here need not have ended; then those are left out.
    """
    knows_who_ended = _is_first_namespace()
    found = []
    for holder in holders:
        if holder.pid in pids or (knows_who_ended and _has_ended(holder.pid)):
            found.append(Leftover(holder, has_ended=True))
        elif mark and mark in (read(f"/proc/{holder.pid}/environ") or ""):
            found.append(Leftover(holder, has_ended=False))
    return found


def describe(left: Sequence[Leftover] | None, waited_s: float) -> str:
    """What is told of memory that was not given back in time; None: the driver did not answer."""
    if left is None:
        return f"NVIDIA's driver did not say within {waited_s:g} s whether GPU memory is free. The restart goes on."
    parts = []
    for each in left:
        used = "memory" if each.holder.used_bytes is None else in_gib(each.holder.used_bytes)
        why = "which the workers left"
        if each.has_ended:
            why = "which has ended: the driver frees it late or a child holds it"
        parts.append(f"{each.holder.gpu.label}: {used} still held by pid {each.holder.pid}, {why}.")
    return " ".join([*parts, f"The restart goes on after {waited_s:g} s."])


def _is_first_namespace() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == FIRST_NAMESPACE
    except OSError:
        return False


def _has_ended(pid: int) -> bool:
    """Also if nobody has collected it yet. Other users' processes may not show in /proc, but a signal finds them."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return state(pid) in ("Z", "X")
