"""What a worker is doing beside training steps: ``with unicron_elastic.phase("evaluation"): ...``.

A phase takes its own time, which the agent learns and does not take for a hang or for slowness. Saving and loading of
checkpoints through torch names itself.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from types import ModuleType
from typing import Any

from unicron_elastic.worker.process.after_import import after_import
from unicron_elastic.worker.pulse import TRAIN, Pulse

# Who does what: {module: {function: phase}}. The names are those that users would choose.
_NAMED = {
    "torch.serialization": {"save": "checkpoint", "load": "restore"},
    "torch.distributed.checkpoint.state_dict_saver": {"save": "checkpoint", "async_save": "checkpoint"},
    "torch.distributed.checkpoint.state_dict_loader": {"load": "restore"},
    "safetensors.torch": {
        "save_file": "checkpoint",
        "save_model": "checkpoint",
        "load_file": "restore",
        "load_model": "restore",
    },
}
# Modules that have taken the functions' names over, if they were imported before us.
_TAKEN_OVER_BY = ("torch", "torch.distributed.checkpoint")


class _Announcer:
    """The phases of this process: the present one, and the page it is written to."""

    def __init__(self) -> None:
        self.pulse: Pulse | None = None  # None under another launcher, and in a process that the script forked
        self.present = TRAIN

    def enter(self, name: str) -> None:
        if self.pulse is not None:
            self.present = name
            self.pulse.enter(name)

    def done(self, name: str) -> None:
        """Book what tells whether a restart begins further on than the one before it."""
        if self.pulse is not None and name == "checkpoint":
            self.pulse.saved()
        elif self.pulse is not None and name == "restore":
            self.pulse.restored()

    def fall_silent(self) -> None:
        self.pulse = None


_announcer = _Announcer()


class phase(ContextDecorator):
    """Names what this worker does inside ``with phase("checkpoint"):``, or in a function decorated with it.

    Inner phases win while they last. Only the main thread's phases count, since the others' do not hold up its steps.
    Under another launcher it does nothing. Raises TypeError or ValueError for a name that is no text or empty.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise TypeError(f"the name of a phase must be text, got {type(name).__name__}")
        if not name.strip() or "\0" in name:
            raise ValueError(f'the name of a phase must say something, such as "evaluation", got {name!r}')
        self._name = name.strip()
        self._outer: list[str | None] = []

    def __enter__(self) -> phase:
        if threading.current_thread() is threading.main_thread():
            self._outer.append(_announcer.present)
            _announcer.enter(self._name)
        else:
            self._outer.append(None)
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        outer = self._outer.pop()
        if kind is None:
            _announcer.done(self._name)
        if outer is not None:
            _announcer.enter(outer)


def present_phase() -> str:
    """What the main thread is doing, as far as it was named."""
    return _announcer.present


def announce_phases(pulse: Pulse) -> None:
    """Write phases to ``pulse`` from now on; torch's checkpoints are phases of their own."""
    _announcer.pulse = pulse
    os.register_at_fork(after_in_child=_announcer.fall_silent)
    for module, names in _NAMED.items():
        after_import(module, functools.partial(_name_functions, names))


def _name_functions(names: dict[str, str], module: ModuleType) -> None:
    for function_name, phase_name in names.items():
        function = getattr(module, function_name, None)
        if function is None:
            continue
        named = _named(function, phase_name)
        for owner in (module, *(sys.modules.get(name) for name in _TAKEN_OVER_BY)):
            if owner is not None and vars(owner).get(function_name) is function:
                setattr(owner, function_name, named)


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def in_phase(*args: Any, **kwargs: Any) -> Any:
        if _announcer.present != TRAIN:  # the script has a better word for what it is doing
            found = function(*args, **kwargs)
            _announcer.done(name)
            return found
        with phase(name):
            return function(*args, **kwargs)

    return in_phase
