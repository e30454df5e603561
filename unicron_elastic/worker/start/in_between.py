"""The processes between a warm process and the workers that are forked from it: their ends make the workers orphans.

Such a process needs milliseconds to end, as all that was preloaded is its memory, too. Nobody waits for that meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

from unicron_elastic.worker.channel import Channel

_LOOK_S = 0.002


class InBetween:
    """`InBetween` are those that have not been collected yet."""

    def __init__(self) -> None:
        self._pids: set[int] = set()

    def add(self, pid: int) -> None:
        """Collect that one once it has ended."""
        self._pids.add(pid)

    def wait_for_all(self) -> None:
        """Collect all, once they have ended: from now on no worker changes its parent any more."""
        for pid in self._pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._pids.clear()

    def wait_readable(self, channels: Sequence[Channel]) -> list[Channel]:
        """Return those of the ``channels`` on which something has come, and wait for that; collect meanwhile."""
        while True:
            self._pids = {pid for pid in self._pids if not _is_collected(pid)}
            readable = select.select(channels, [], [], _LOOK_S if self._pids else None)[0]
            if readable:
                return readable


def _is_collected(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:  # by who collects all
        return True
