"""Function workers (``elastic_launch(config, function)``, ``--run-path``): torch starts them, we watch them.

They are children of torch's multiprocessing, not of the keeper, and hand their return value over before they end;
so torch's own context is asked, at each exit (pidfd) and, for return values, every monitor interval.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing import PContext, RunProcsResult
from unicron_elastic.launcher.loop import Loop

__all__ = ["FunctionWatch"]


class _Pidfd:
    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class FunctionWatch:
    """Calls ``on_result`` once, when torch's context says that the workers are done or one has failed."""

    def __init__(
        self, loop: Loop, context: PContext, interval_s: float, on_result: Callable[[RunProcsResult], None]
    ) -> None:
        self._loop = loop
        self._context = context
        self._interval_s = interval_s
        self._on_result = on_result
        self._is_done = False
        self._pidfds: list[_Pidfd] = []
        for pid in context.pids().values():
            try:
                pidfd = _Pidfd(pid)
            except OSError:
                continue  # ended already: the timer sees it
            self._pidfds.append(pidfd)
            loop.on_readable(pidfd, lambda pidfd=pidfd: self._ended(pidfd))  # type: ignore[misc]
        self._arm()

    def stop(self) -> None:
        """Ends the watch."""
        self._is_done = True
        for pidfd in self._pidfds:
            self._loop.forget(pidfd)
            pidfd.close()
        self._pidfds = []

    def _arm(self) -> None:
        self._loop.call_at(time.monotonic() + self._interval_s, self._tick)

    def _tick(self) -> None:
        self._ask()
        if not self._is_done:
            self._arm()

    def _ended(self, pidfd: _Pidfd) -> None:
        self._loop.forget(pidfd)
        pidfd.close()
        self._pidfds.remove(pidfd)
        self._ask()

    def _ask(self) -> None:
        if self._is_done:
            return
        result = self._context.wait(0)
        if result is not None:
            self.stop()
            self._on_result(result)
