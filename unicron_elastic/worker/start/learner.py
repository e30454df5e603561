"""The process that learns for the warm process, and then forks the workers that find more imported."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from unicron_elastic.worker.channel import Channel, ChannelClosed, close_all
from unicron_elastic.worker.helper_tasks import Forgotten, ForkWorker, Learned, ProcessStarted
from unicron_elastic.worker.message import Odd
from unicron_elastic.worker.process.prctl import REPARENT_DEADLINE_S, be_no_subreaper, become_subreaper
from unicron_elastic.worker.start.in_between import InBetween

_LOOK_S = 0.0005
_HAS_ENDED = "the process that has learned it has ended"
_ANSWERS: tuple[type[ProcessStarted | Forgotten], ...] = (ProcessStarted, Forgotten)


class Learner:
    """`Learner` is that process, as the warm process sees it. It is another one after each few imports."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self._group = 0  # of processes
        self._is_ready = False

    def begin(self, between: InBetween) -> Channel | None:
        """Forks it; returns its end of the channel in there, and None here.

        All who are ``between`` this process and a worker end first, or the worker would not become the keeper's.
        """
        former = 0 if self.channel is None else self._group
        self.stop()
        self._wait_until_gone(former)
        between.wait_for_all()
        ours, theirs = Channel.pair()
        become_subreaper()  # the one that goes on is to be this process's child
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            ours.close()
            return theirs
        with contextlib.suppress(OSError):  # it has done so, or has ended
            os.setpgid(child, child)
        theirs.close()
        self.channel, self._group, self._is_ready = ours, child, False
        return None

    def hear(self) -> Learned | Forgotten:
        """Return what it says, or that it has ended."""
        assert self.channel is not None
        with contextlib.suppress(ChannelClosed):
            said = self.channel.hear([Learned, Forgotten])
            if isinstance(said, Learned):
                be_no_subreaper()  # the workers that it forks become the keeper's
                self._is_ready = True
                self.collect()
                return said
            if isinstance(said, Forgotten):
                self.stop()
                return said
        self.stop()
        return Forgotten(why=_HAS_ENDED)

    def fork(self, task: ForkWorker) -> ProcessStarted | Forgotten | None:
        """Have it fork a worker. What is None or `Forgotten` was not done, and another is to do it.

        Raises ChannelClosed if it ended meanwhile: then nobody knows.
        """
        if self.channel is None or not self._is_ready:
            self.stop()
            return None
        try:
            self.channel.send(task)
        except ChannelClosed:
            self.stop()
            return Forgotten(why=_HAS_ENDED)
        answer = self.channel.hear(_ANSWERS)
        if isinstance(answer, Odd):
            raise ChannelClosed(answer.why)
        if isinstance(answer, Forgotten):
            self.stop()
        return answer

    def stop(self) -> None:
        """Ends it, whatever it does."""
        if self.channel is None:
            return
        self.channel.close()
        self.channel = None
        with contextlib.suppress(OSError):
            os.killpg(self._group, signal.SIGKILL)
        be_no_subreaper()
        self.collect()

    def _wait_until_gone(self, group: int) -> None:
        """Wait for processes that were killed: one of them may be between the learner and a worker."""
        deadline = time.monotonic() + REPARENT_DEADLINE_S
        with contextlib.suppress(ProcessLookupError):
            while group and time.monotonic() < deadline:
                os.killpg(group, 0)
                time.sleep(_LOOK_S)
                self.collect()

    def forget(self) -> None:
        """Leave it alone, in a worker."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def collect(self) -> None:
        """Collects those of its processes that have ended."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def serve(
    channel: Channel,
    between: InBetween,
    why_forgotten: Callable[[], str | None],
    fork: Callable[[ForkWorker], bool],
) -> ForkWorker:
    """Forks workers until the warm process is gone, or something has changed; returns in each worker what it is."""
    here = os.getpid()
    try:
        while True:
            between.wait_readable([channel])
            task = channel.hear([ForkWorker])
            if isinstance(task, Odd):
                raise ValueError(task.why)
            if (why := why_forgotten()) is not None:
                channel.send(Forgotten(why=why))
                os._exit(0)
            if fork(task):
                return task
            close_all(task.fds)
    except BaseException:  # ChannelClosed at the end
        _end(here)


def _end(here: int) -> NoReturn:
    os._exit(0 if os.getpid() == here else 1)
