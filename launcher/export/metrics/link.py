"""How the agent of a cluster hears the metrics of its child: over a socket pair, one message for each look.

The child never waits: what the agent has no room for is dropped, as the next look tells all of it again.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unicron_elastic.metrics.samples import MetricSample


VARIABLE = "UNICRON_METRICS_FD"  # of a process that an agent has started
MESSAGE_BYTES_MAX = 1 << 20
ENDED_S = 300.0  # so long the last words of a child are served

logger = logging.getLogger(__name__)


class Teller:
    """The child's end."""

    def __init__(self, fd: int) -> None:
        """Raises OSError if ``fd`` is no such socket."""
        os.set_inheritable(fd, False)
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)

    def tell(self, samples: Iterable[MetricSample]) -> None:
        """All that is known now."""
        from unicron_elastic.metrics.samples_text import samples_text

        try:
            self._socket.send(samples_text(samples))
        except (OSError, ValueError):
            pass  # the agent is gone, or has not read for long

    def close(self) -> None:
        """May come twice."""
        self._socket.close()


def take_teller() -> Teller | None:
    """The end that this process was started with, if it was; nobody that it starts has it."""
    told = os.environ.pop(VARIABLE, "")
    try:
        return Teller(int(told)) if told else None
    except (OSError, ValueError):
        return None


class ChildMetrics:
    """The agent's end, for one child after another."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._latest: tuple[MetricSample, ...] = ()
        self._ended_at: float | None = None
        self._turn = 0

    @property
    def has_ended(self) -> bool:
        """Whether the latest child says nothing any more."""
        return self._ended_at is not None

    def connect(self) -> socket.socket:
        """The end for a new child, to be closed once it has been started. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turn += 1
        self._latest, self._ended_at = (), None
        threading.Thread(target=self._read, args=(ours, self._turn), name="unicron-child-metrics", daemon=True).start()
        return theirs

    def samples(self) -> Iterable[MetricSample]:
        """What the child said last, until it has been gone for some time. From any thread."""
        ended_at = self._ended_at
        return () if ended_at is not None and self._now() - ended_at > ENDED_S else self._latest

    def _read(self, ours: socket.socket, turn: int) -> None:
        from unicron_elastic.metrics.samples_text import parse_samples

        with ours:
            while text := self._message(ours):
                try:
                    found = parse_samples(text)
                except ValueError as error:
                    logger.debug("The metrics of the job are not understood: %s", error)
                    continue
                if turn == self._turn:
                    self._latest, self._ended_at = found, None
        if turn == self._turn:
            self._ended_at = self._now()

    @staticmethod
    def _message(ours: socket.socket) -> bytes:
        try:
            return ours.recv(MESSAGE_BYTES_MAX)
        except OSError:
            return b""
