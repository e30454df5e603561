"""Counts the optimizer steps of an unmodified script, through torch's global optimizer hook, for the pulse page."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from unicron_elastic.worker.pulse import Pulse

__all__ = ["count_steps"]

_OPTIMIZER_MODULE = "torch.optim.optimizer"


def count_steps(pulse: Pulse, on_first_step: Callable[[int], None]) -> None:
    """From now on each ``optimizer.step()`` of this process beats ``pulse``.

    A script with several optimizers (a GAN's two, one for each layer) makes one step when all have stepped once: the
    count advances when one of them steps again. So it goes on whichever of them the script makes anew or gives up.
    ``on_first_step`` is called once. torch itself is not imported here: the hook goes in when the script imports it,
    and at once in a warm worker.
    """
    hook = _step_hook(pulse, on_first_step)
    module = sys.modules.get(_OPTIMIZER_MODULE)
    if module is not None:
        module.register_optimizer_step_post_hook(hook)
    else:
        sys.meta_path.insert(0, _AfterImport(lambda loaded: loaded.register_optimizer_step_post_hook(hook)))


def _step_hook(pulse: Pulse, on_first_step: Callable[[int], None]) -> Callable[..., None]:
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
        beat(count)
        if count == 1:
            on_first_step(count)

    def fall_silent() -> None:
        nonlocal beat, on_first_step
        beat = on_first_step = lambda _steps: None

    os.register_at_fork(after_in_child=fall_silent)  # a process that the script forks is not this worker
    return after_step


class _AfterImport(MetaPathFinder, Loader):
    """Calls back when torch's optimizer module has been imported, then takes itself out of ``sys.meta_path``."""

    def __init__(self, callback: Callable[[ModuleType], object]) -> None:
        self._callback = callback
        self._loader: Loader | None = None

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _OPTIMIZER_MODULE:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None and spec.loader is not None:
                self._loader = spec.loader
                spec.loader = self
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        spec = module.__spec__
        if spec is not None:
            spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            self._callback(module)
        except Exception as error:
            sys.stderr.write(f"unicron: optimizer steps are not counted: {type(error).__name__}: {error}\n")
