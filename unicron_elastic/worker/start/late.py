"""torch._dynamo, imported in the warm process, and yet imported again by whoever imports it first in a worker.

That import does one thing which depends on when it happens: ``torch.distributed.nn.functional`` takes the process group
of that moment as default argument, and so holds it for ever. In a plain start it happens when the script makes its
DistributedDataParallel or its optimizer, after ``init_process_group``. The last holder of the group would otherwise be
DDP's reducer, which ends gloo's threads without letting go of the interpreter. One of them may be waiting for it, and
then a script that trains in a function hangs after ``destroy_process_group`` (1 run in 5).

A script may avoid both by importing ``torch.distributed.nn`` itself before it makes a group, so that nobody holds it.
If we held it, gloo's threads would be there when the interpreter ends, and one that then lets go of a tensor aborts the
process (torch 2.14, 1 of 77 runs of two ranks). So ``torch.distributed.nn`` is held back, too, and whoever imports it
first decides.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from unicron_elastic.compat.loaded import DISTRIBUTED_NN, DYNAMO

_held_groups: list[object] = []


def hold_back() -> None:
    """Takes the modules out of ``sys.modules``, as if they were not imported; their import then costs nothing."""
    held: dict[str, ModuleType] = {}
    for name in (DYNAMO, DISTRIBUTED_NN):
        parent, _, child = name.rpartition(".")
        module = sys.modules.get(name)
        is_whole = getattr(sys.modules.get(parent), child, None) is module
        if module is not None and is_whole:
            del sys.modules[name]
            delattr(sys.modules[parent], child)
            held[name] = module
    is_within = DISTRIBUTED_NN in held  # whoever imports one of its modules first imports the package
    within = [name for name in sys.modules if is_within and name.startswith(f"{DISTRIBUTED_NN}.")]
    if held:
        sys.meta_path.insert(0, _HeldBack(held, {name: sys.modules.pop(name) for name in within}))


class _HeldBack(MetaPathFinder, Loader):
    """Gives each module to its first import; behind the last one it takes itself out of ``sys.meta_path``."""

    def __init__(self, modules: dict[str, ModuleType], within: dict[str, ModuleType]) -> None:
        """``within``: those of the package ``torch.distributed.nn``."""
        self._modules = modules
        self._within = within
        self._specs = {name: module.__spec__ for name, module in modules.items()}

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        module = self._modules.get(fullname)
        return None if module is None else ModuleSpec(fullname, self, origin=module.__file__, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules.pop(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]
        if module.__name__ == DISTRIBUTED_NN:
            sys.modules.update(self._within)
            _hold_group()
        elif DISTRIBUTED_NN in self._modules:
            importlib.import_module(DISTRIBUTED_NN)
        if not self._modules:
            with contextlib.suppress(ValueError):  # the script may have put finders of its own in place of all
                sys.meta_path.remove(self)


def _hold_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        _held_groups.append(distributed.group.WORLD)
