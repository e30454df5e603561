"""Counts the optimizer steps of an unmodified script, through torch's global optimizer hook, for the pulse page."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

from unicron_elastic.worker.imports import after_import

_before = [0]  # steps that this process has not made itself


class Beating(Protocol):
    """What is told of each step: a ``Pulse``, most of the time."""

    def beat(self, step: int) -> None:
        """Optimizer step number ``step`` of this process has just ended."""


def count_steps(pulse: Beating, on_first_step: Callable[[int], None]) -> None:
    """From now on each ``optimizer.step()`` of this process beats ``pulse``.

    A script with several optimizers (a GAN's two, one for each layer) makes one step when all have stepped once: the
    count advances when one of them steps again. So it goes on whichever of them the script makes anew or gives up.
    ``on_first_step`` is called once. torch itself is not imported here: the hook goes in when the script imports it,
    and at once in a warm worker.
    """
    hook = _step_hook(pulse, on_first_step)
    after_import("torch.optim.optimizer", lambda module: module.register_optimizer_step_post_hook(hook))


def made_before(steps: int) -> None:
    """The state that this process trains had so many optimizer steps behind it already, and the count goes on there."""
    _before[0] = steps


def _step_hook(pulse: Beating, on_first_step: Callable[[int], None]) -> Callable[..., None]:
    stepped: set[int] = set()  # who has in this step; an optimizer made anew under a reused id is one that steps again
    count = 0
    beat: Callable[[int], None] = pulse.beat

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        nonlocal count
        key = id(optimizer)
        if key not in stepped:
            stepped.add(key)
            if count:
                return
        elif len(stepped) > 1:
            stepped.clear()
            stepped.add(key)
        count += 1
        beat(count + _before[0])
        if count == 1:
            on_first_step(count)

    def fall_silent() -> None:
        nonlocal beat, on_first_step
        beat = on_first_step = lambda _steps: None

    os.register_at_fork(after_in_child=fall_silent)  # a process that the script forks is not this worker
    return after_step
