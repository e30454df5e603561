"""Counts the optimizer steps of an unmodified script, through torch's global optimizer hook, for the pulse page."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from unicron_elastic.compat.loaded import is_initialising
from unicron_elastic.worker.process.after_import import after_import

_before = [0]  # steps that this process has not made itself
_of_run = [0]  # the number of the step that a run is in, which counts them itself; 0: there is none


class Beating(Protocol):
    """What is told of each step: a ``Pulse``, most of the time."""

    def beat(self, step: int) -> None:
        """Optimizer step number ``step`` of this process has just ended."""


def count_steps(pulse: Beating, on_first_step: Callable[[int], None], on_made: Callable[[], object] = int) -> None:
    """Beat ``pulse`` at each ``optimizer.step()`` of this process from now on.

    A script with several optimizers (a GAN's two, one for each layer) makes one step when all have stepped once: the
    count advances when one of them steps again. So it goes on whichever of them the script makes anew or gives up. The
    steps of a run have numbers (``count_as_step``), and its optimizers may step in turn. What torch steps to have a
    state of the optimizer to save, or to load into, is no step.
    ``on_first_step`` is called once, ``on_made`` when there is an optimizer. torch itself is not imported here: the
    hook goes in when the script imports it, and at once in a warm worker.
    """
    hook = _step_hook(pulse, on_first_step)

    def hook_in(module: ModuleType) -> None:
        module.register_optimizer_step_post_hook(hook)
        _when_made(module.Optimizer, on_made)

    after_import("torch.optim.optimizer", hook_in)


def _when_made(optimizer: Any, then: Callable[[], object]) -> None:
    """Call ``then`` when the first optimizer of a class is made, at once where torch does not show it."""
    pid = os.getpid()
    prepare_class = getattr(optimizer, "profile_hook_step", None)
    if prepare_class is None:
        then()
        return

    @functools.wraps(prepare_class)
    def prepare(step: Any) -> Any:
        if os.getpid() == pid:  # a process that the script forks is not this worker
            then()
        return prepare_class(step)

    optimizer.profile_hook_step = staticmethod(prepare)


def made_before(steps: int) -> None:
    """The state that this process trains had so many optimizer steps behind it already, and the count goes on there."""
    _before[0] = steps


def count_as_step(number: int) -> None:
    """Count whatever optimizers step from now on as step ``number`` of a run; 0: the run has made its steps."""
    _of_run[0] = number


def _step_hook(pulse: Beating, on_first_step: Callable[[int], None]) -> Callable[..., None]:
    stepped: set[int] = set()  # who has in this step; an optimizer made anew under a reused id is one that steps again
    count = 0
    is_first = True
    beat: Callable[[int], None] = pulse.beat

    def counts_itself() -> bool:
        """Whether a run does, and no other has made more steps before it, whose count goes on."""
        return _of_run[0] >= max(count + _before[0], 1)

    def is_another(key: int) -> bool:
        """Whether this optimizer begins another step."""
        if counts_itself():
            stepped.clear()
            return _of_run[0] > count + _before[0]
        if key not in stepped:
            return not count
        if len(stepped) > 1:
            stepped.clear()
        return True

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        nonlocal count, is_first
        if is_initialising(optimizer):
            return
        key = id(optimizer)
        is_new = is_another(key)
        stepped.add(key)
        if not is_new:
            return
        count = _of_run[0] - _before[0] if counts_itself() else count + 1
        beat(count + _before[0])
        if is_first:
            is_first = False
            on_first_step(1)

    def fall_silent() -> None:
        nonlocal beat, on_first_step
        beat = on_first_step = lambda _steps: None

    os.register_at_fork(after_in_child=fall_silent)  # a process that the script forks is not this worker
    return after_step
