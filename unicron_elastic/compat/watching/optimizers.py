"""Tells of each step of an optimizer in this process, whichever it is.

torch goes through its hooks without a lock, and raises where one is added or removed meanwhile. So there is one of each
kind, which stays, however many are told.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from unicron_elastic.compat.watching.watchers import Watchers


class BeforeStepWatcher(Protocol):
    """It wants to know of each optimizer that is about to step."""

    def before_step(self, optimizer: Any) -> None:
        """Hears of it. What it raises, ``step`` raises."""


class AfterStepWatcher(Protocol):
    """It wants to know of each optimizer that has stepped."""

    def after_step(self, optimizer: Any) -> None:
        """Hears of it. What it raises, ``step`` raises."""


_before, _after = Watchers[BeforeStepWatcher](), Watchers[AfterStepWatcher]()
_hooks: list[Any] = []
_lock = threading.Lock()


def watch_before_steps(watcher: BeforeStepWatcher) -> None:
    """Tell ``watcher``, as long as it lives, before each step."""
    _before.add(watcher)
    _begin()


def watch_after_steps(watcher: AfterStepWatcher) -> None:
    """Tell ``watcher``, as long as it lives, behind each step."""
    _after.add(watcher)
    _begin()


def tells_of_steps(optimizer: Any) -> bool:
    """Return whether torch goes through its hooks at steps: not if a class of a script's own leaves out __init__."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def _begin() -> None:
    with _lock:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_tell_before))
            _hooks.append(register_optimizer_step_post_hook(_tell_after))


def _tell_before(optimizer: Any, *_: Any) -> None:
    for each in _before:
        each.before_step(optimizer)


def _tell_after(optimizer: Any, *_: Any) -> None:
    for each in _after:
        each.after_step(optimizer)
