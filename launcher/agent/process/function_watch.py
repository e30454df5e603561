"""Function workers (``elastic_launch(config, function)``, ``--run-path``): torch starts them, we watch them.

They are children of torch's multiprocessing, not of the keeper, and hand their return value over before they end;
so torch is asked, at each exit (pidfd) and, for return values, every monitor interval.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import partial

from unicron_elastic.compat.agent import RunResult, WorkerState
from unicron_elastic.launcher.common.loop import Loop


class _Pidfd:
    def __init__(self, pid: int) -> None:
        self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class FunctionWatch:
    """Calls ``on_result`` once, when torch says that the workers are done or that one has failed."""

    def __init__(
        self,
        loop: Loop,
        pids: Iterable[int],
        interval_s: float,
        ask: Callable[[], RunResult],
        on_result: Callable[[RunResult], None],
    ) -> None:
        """``ask`` is torch's ``_monitor_workers``, which a subclass of the agent may have overridden."""
        self._loop = loop
        self._interval_s = interval_s
        self._ask_torch = ask
        self._on_result = on_result
        self._is_done = False
        self._pidfds: list[_Pidfd] = []
        for pid in pids:
            try:
                pidfd = _Pidfd(pid)
            except OSError:
                continue  # ended already: the timer sees it
            self._pidfds.append(pidfd)
            loop.on_readable(pidfd, partial(self._ended, pidfd))
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
        result = self._ask_torch()
        if result.state is not WorkerState.HEALTHY:
            self.stop()
            self._on_result(result)
