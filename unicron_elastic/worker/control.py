"""The worker's end of the control channel. Its script may close every descriptor and reuse their numbers."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator, Sequence

from unicron_elastic.worker.channel import Channel, ChannelClosed
from unicron_elastic.worker.message import Kind, Message, Odd

SEND_TIMEOUT_S = 0.5  # the agent reads at once; a stopped agent must not hold up a script for longer
ANSWER_TIMEOUT_S = 1.0  # an answer takes milliseconds


class Control:
    """Speaks to the agent for as long as the descriptor is the socket that was inherited."""

    def __init__(self, fd: int) -> None:
        """Takes over ``fd``. Raises OSError if it is no such socket."""
        self._channel = Channel.from_fd(fd)
        self._channel.settimeout(SEND_TIMEOUT_S)
        self._identity = _identity(fd)
        self._answers = threading.Lock()

    def send(self, said: Message) -> None:
        """Says it, with copies of its descriptors.

        Raises ChannelClosed if nobody can hear it, TimeoutError if the agent does not listen.
        """
        if not self._is_ours():
            raise ChannelClosed("the script closed the control channel")
        self._channel.send(said)

    def wait(self, kinds: Sequence[type[Kind]]) -> Kind | Odd:
        """Returns the next thing the agent says, as ``Channel.hear``; sleeps until there is one."""
        fd = self._channel.fileno() if self._is_ours() else -1
        if fd < 0:
            raise ChannelClosed("the control channel is closed")
        watched = select.poll()
        watched.register(fd, select.POLLIN)
        watched.poll()
        if not self._is_ours():
            raise ChannelClosed("the script closed the control channel")
        return self._channel.hear(kinds)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Lets the interpreter not end meanwhile. Raises ChannelClosed if it is about to."""
        with self._answers:
            if not self._is_ours():
                raise ChannelClosed("the control channel is closed")
            yield

    def close(self) -> None:
        """Says no more; the number stays open if it is the script's by now."""
        if self._is_ours():
            self._channel.close()

    def say_goodbye(self, said: Message) -> None:
        """Says that the interpreter shuts down, and then no more; an answer that another thread gives ends first.

        Python ends a thread that comes back to it later where it is, which within torch is an abort of the process.
        """
        if not self._is_ours():
            return
        with contextlib.suppress(ChannelClosed, OSError):
            self.send(said)
        self.close()
        if self._answers.acquire(timeout=ANSWER_TIMEOUT_S):
            self._answers.release()

    def _is_ours(self) -> bool:
        """Looked up before each use: one ``fstat`` is cheap, and to write into a file of the script's is not."""
        fd = self._channel.fileno()
        if fd < 0:
            return False
        try:
            is_ours = _identity(fd) == self._identity
        except OSError:
            is_ours = False
        if not is_ours:
            self._channel.detach()
        return is_ours


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
