"""A process that works for the agent: the keeper, the warm process. A silent one costs seconds, not the job."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from unicron_elastic.launcher.agent.process.activity import is_at_work, state
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.worker.channel import Channel
from unicron_elastic.worker.helper_tasks import HelperTask


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperPatience:
    """How long a helper may owe an answer and say nothing."""

    woken_s: float = 1.0  # then it gets SIGCONT, which does nothing to a process that was not stopped
    stopped_s: float = 3.0  # a stopped one that SIGCONT did not wake: somebody traces it
    given_up_s: float = 3.0
    at_work_s: float = 30.0  # one that runs, or waits for a processor or a disk: the machine is busy with others, too


class Helper:
    """A helper owes answers: who waits for one wakes it when it is silent, and gives it up when it stays so."""

    def __init__(
        self, loop: Loop, pid: int, patience: HelperPatience, *, wake: Callable[[], None], give_up: Callable[[], None]
    ) -> None:
        self.patience = patience
        self.wake = wake
        self.give_up = give_up
        self._loop = loop
        self._pid = pid
        self._words = 0

    def heard(self) -> None:
        """Begins the count of its silence anew: it has said something."""
        self._words += 1

    def wait(self, is_answered: Callable[[], bool]) -> bool:
        """Runs the loop until ``is_answered()``; false if the helper is to be given up.

        Silence is counted in pieces that this process was awake for: what stops the whole machine is nobody's fault.
        """
        silent_s = 0.0
        while True:
            words = self._words
            until = time.monotonic() + self._piece_s
            if self._loop.run_until(lambda: is_answered() or self._words != words, until):  # noqa: B023
                if is_answered():
                    return True
                silent_s = 0.0
                continue
            silent_s += self._piece_s
            if self._is_to_be_given_up(silent_s):
                return False

    def send(self, channel: Channel, task: HelperTask) -> None:
        """Sends over ``channel``, in which no more may fit while the helper reads nothing.

        Raises ChannelClosed if it is gone, TimeoutError if it is to be given up.
        """
        channel.settimeout(self._piece_s)
        unread_s = 0.0
        while True:
            try:
                channel.send(task)
                return
            except TimeoutError:
                unread_s += self._piece_s
                if self._is_to_be_given_up(unread_s):
                    raise

    @property
    def _piece_s(self) -> float:
        return self.patience.woken_s / 2

    def _is_to_be_given_up(self, silent_s: float) -> bool:
        if silent_s >= self.patience.woken_s:
            self.wake()
        if silent_s >= self.patience.stopped_s and state(self._pid) in {"t", "T"}:
            return True
        if silent_s < self.patience.given_up_s:
            return False
        return silent_s >= self.patience.at_work_s or not is_at_work(self._pid)
