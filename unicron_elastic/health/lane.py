"""A thread that makes some checks, again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unicron_elastic.base.finding import Check, Finding, ProbeNotes

Tell = Callable[[str, list[Finding], float], None]


@dataclass(frozen=True, slots=True)
class _Doing:
    check: str
    since: float


class Lane:
    """Makes all of `checks` every `interval_s`, the first time at once, in a daemon thread of its own.

    What may keep its caller waiting gets a lane to itself, so that nothing else waits with it. A check that raises
    says so once, and counts as not made.
    """

    def __init__(
        self,
        name: str,
        interval_s: float,
        checks: Mapping[str, Check],
        tell: Tell,
        *,
        notes: ProbeNotes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._interval_s = interval_s
        self._checks = dict(checks)
        self._tell = tell
        self._notes = notes
        self._clock = clock
        self._doing: _Doing | None = None
        self._must_stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"unicron-health-{name}", daemon=True)

    def start(self) -> None:
        """Begins; returns at once."""
        self._thread.start()

    def check_soon(self) -> None:
        """Makes the next round now instead of after the interval; safe from any thread."""
        self._wake.set()

    def busy_s(self, now: float) -> float:
        """For how long the present check has lasted; 0 between checks."""
        doing = self._doing
        return 0.0 if doing is None else max(0.0, now - doing.since)

    def ask_to_stop(self) -> None:
        """No check begins after this."""
        self._must_stop.set()
        self._wake.set()

    def join(self, wait_s: float) -> bool:
        """Whether the thread has ended within `wait_s`."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(max(0.0, wait_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._must_stop.is_set():
            self._wake.clear()
            for source, check in self._checks.items():
                if self._must_stop.is_set():
                    return
                self._make(source, check)
            if not self._must_stop.is_set():
                self._wake.wait(self._interval_s)

    def _make(self, source: str, check: Check) -> None:
        now = self._clock()
        self._doing = _Doing(source, now)
        try:
            found = check(now)
        except Exception as error:  # a file of a shape that no kernel has had yet must not end all other checks
            self._notes.once(f"The check of {source} failed: {error!r}.")
            return
        finally:
            self._doing = None
        if not self._must_stop.is_set():
            self._tell(source, found, self._clock())
