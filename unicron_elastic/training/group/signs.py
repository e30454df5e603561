"""Signs that a rank is at work, by which those who wait for it know that they do not wait in vain.

A rank that works for long beside the others, as on an evaluation that it alone makes, gives signs in the store of its
world, from a thread of its own. Who waits counts the time-out from the last of them. While no rank is waited for longer
than a quarter of the time-out nothing is written or read.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from torch.distributed import Store

from unicron_elastic.worker.answer_questions import is_at_prompt
from unicron_elastic.worker.phases import present_phase
from unicron_elastic.worker.process.process_stat import read_stat
from unicron_elastic.worker.pulse import MEET, SPARE, TRAIN

PHASE_S = 600.0  # that a phase may take in which nothing is seen to be done, as the agent has it
BUSY_CPU_SHARE = 0.1  # of a core: more than the threads of an idle worker take
LOOK_S_MAX = 15.0
_PARTS, _QUIET_PARTS = 8, 2  # of the time-out: between two looks, and before the first
_END_S = 1.0  # for a look that is under way when the process ends
_KEY = "at-work"


class Effort:
    """`Effort` tells what this process has done since it was looked at last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at, self._used_s = clock(), time.process_time()
        self._phase, self._phase_since = TRAIN, self._at

    def look(self) -> bool:
        """Whether it was at work: in a phase that has not lasted too long, on a CPU or a disk, or with a person."""
        now, used_s = self._clock(), time.process_time()
        share = (used_s - self._used_s) / max(now - self._at, 1e-9)
        self._at, self._used_s = now, used_s
        if (phase := present_phase()) != self._phase:
            self._phase, self._phase_since = phase, now
        is_in_phase = phase not in (TRAIN, MEET, SPARE) and now - self._phase_since < PHASE_S
        return is_in_phase or share >= BUSY_CPU_SHARE or _runs() or is_at_prompt()


class Signs:
    """`Signs` are given and read by one rank of each world in turn, whose ranks wait ``timeout_s`` for an idle one."""

    def __init__(
        self, timeout_s: float, effort: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._look_s = min(timeout_s / _PARTS, LOOK_S_MAX)
        self._quiet_s = timeout_s * _QUIET_PARTS / _PARTS
        self._is_at_work = effort
        self._clock = clock
        self._store: Store | None = None
        self._stop: threading.Event | None = None
        self._waits = False
        self._back_at = clock()  # from the others
        self._since = self._back_at  # of the present wait, or of a sign in it
        self._next_look = 0.0
        self._seen: int | None = None  # how many signs all have given in this world

    def watch(self, store: Store) -> None:
        """Give and read signs in the ``store`` of a new world."""
        self._store, self._seen = store, None
        if self._stop is None:
            self._stop = threading.Event()
            thread = threading.Thread(target=_run, args=(weakref.ref(self), self._stop, self._look_s), daemon=True)
            thread.name = "unicron-signs"
            thread.start()
            end = functools.partial(_end, self._stop, thread)
            atexit.register(end)
            weakref.finalize(self, _end_unasked, self._stop, end).atexit = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Lets this rank give no signs, as it waits for others."""
        self._waits = True
        try:
            yield
        finally:
            self._waits, self._back_at = False, self._clock()

    def begin(self) -> None:
        """Note that this rank begins to wait for something."""
        self._since, self._seen = self._clock(), None

    def is_over(self) -> bool:
        """Whether it has waited in vain for ``timeout_s``, since it began to or another gave a sign.

        Without a world the back end's time-out is all there is.
        """
        if self._store is None:
            return False
        now = self._clock()
        if now >= max(self._since + self._quiet_s, self._next_look):
            self._next_look = now + self._look_s
            seen = _count(self._store)
            if None is not self._seen != seen is not None:
                self._since = now
            self._seen = seen
        return now - self._since > self._timeout_s

    def give(self) -> None:
        """Gives a sign if this rank is at work and has not come to the others for long."""
        is_at_work = self._is_at_work()  # asked each time, as it tells of the time since it was asked last
        is_quiet = self._waits or self._clock() - self._back_at < self._quiet_s
        if is_at_work and not is_quiet and self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store is lost, and with it this world
                self._store.add(_KEY, 1)


def _run(signs: weakref.ref[Signs], stop: threading.Event, look_s: float) -> None:
    while not stop.wait(look_s):
        there = signs()
        if there is None:
            return
        there.give()
        del there


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    """Ends the thread before the interpreter does, which must not find it in C++."""
    stop.set()
    thread.join(_END_S)


def _end_unasked(stop: threading.Event, end: Callable[[], None]) -> None:
    """Ends the thread of signs that are gone. Nobody waits for it, as this may be done within it."""
    stop.set()
    atexit.unregister(end)


def _count(store: Store) -> int | None:
    """Return how many signs there are; None if the store does not say."""
    try:
        return int(store.get(_KEY)) if store.check([_KEY]) else 0
    except RuntimeError:
        return None


def _runs() -> bool:
    """Tell whether the main thread has a CPU, or waits for one, for a disk or for a driver."""
    stat = read_stat("/proc/self/stat")
    return stat is not None and stat.state in ("R", "D")
