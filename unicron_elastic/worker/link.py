"""What the client tells the agent: heartbeats on the pulse page, the rest on the control channel.

Under another launcher, and in a process that the script forked, it tells nobody.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from unicron_elastic.worker.channel import ChannelClosed
from unicron_elastic.worker.control import Control
from unicron_elastic.worker.notices import FirstStep, Notice
from unicron_elastic.worker.phases import phase
from unicron_elastic.worker.process.after_import import after_import
from unicron_elastic.worker.pulse import TRAIN
from unicron_elastic.worker.step_count import Beating

# Scripts send their first before an optimizer has stepped: NVIDIA's own example in its loop, Lightning in its trial
# evaluation. NVIDIA too leaves so many iterations out of account (``num_warmup_iterations``).
HEARTBEATS_WAITED_FOR = 5


class Heartbeats:
    """A heartbeat says that the worker goes on. Only the main thread's count: others beat through any hang.

    Where torch's optimizers step, their steps are counted already: a heartbeat then gives what the worker is doing
    now its whole time anew, as an evaluation wants it. Where none does, each heartbeat is a step. If one begins to step
    after all, the number on the page falls to its first, which is how the agent knows that a worker begins anew.
    """

    def __init__(self, pulse: Beating, on_first_step: Callable[[int], object]) -> None:
        self._pulse = pulse
        self._on_first_step = on_first_step
        self._beaten = 0
        self._are_steps_counted = False
        with contextlib.suppress(AttributeError):  # a torch without such hooks: nobody counts its steps
            after_import("torch.optim.optimizer", self._watch)

    def beat(self) -> None:
        """The script sent one."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._are_steps_counted:
            with phase(TRAIN):  # whatever the worker was doing, that begins anew when this one ends
                return
        self._beaten += 1
        step = self._beaten - HEARTBEATS_WAITED_FOR
        if step > 0:
            self._pulse.beat(step)
        if step == 1:
            self._on_first_step(step)

    def _watch(self, module: Any) -> None:
        module.register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, *_: object) -> None:
        self._are_steps_counted = True


class _Agent:
    """Whoever hears this worker, if anybody does."""

    def __init__(self) -> None:
        self._control: Control | None = None
        self._pulse: Beating | None = None
        self._heartbeats: Heartbeats | None = None
        self._on_first_step: Callable[[int], object] = lambda _step: None

    def connect(
        self,
        control: Control | None,
        pulse: Beating | None,
        on_first_step: Callable[[int], object] | None = None,
    ) -> None:
        """Make this process a worker that ``control`` and ``pulse`` speak for.

        ``on_first_step`` tells of the first heartbeat that counts as a step, if nothing else counts steps.
        """
        self._control, self._pulse, self._heartbeats = control, pulse, None
        self._on_first_step = on_first_step or (lambda step: self.say(FirstStep(step=step)))
        os.register_at_fork(after_in_child=self._fall_silent)  # a process that the script forks is not this worker

    def beat(self) -> None:
        """Passes a heartbeat on."""
        if self._pulse is None:
            return
        if self._heartbeats is None:
            self._heartbeats = Heartbeats(self._pulse, self._on_first_step)
        self._heartbeats.beat()

    def say(self, said: Notice) -> bool:
        """Tells the agent; returns whether it could be said."""
        if self._control is None:
            return False
        try:
            self._control.send(said)
        except (OSError, ChannelClosed, ValueError, TypeError):
            return False  # the agent is gone or stopped, or the script put into the message what does not fit
        return True

    def _fall_silent(self) -> None:
        self._control = self._pulse = self._heartbeats = None


AGENT = _Agent()
