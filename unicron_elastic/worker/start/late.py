"""torch._dynamo, imported in the warm process, and yet imported again by whoever imports it first in a worker.

That import does one thing which depends on when it happens: ``torch.distributed.nn.functional`` takes the process group
of that moment as default argument, and so holds it for ever. In a plain start it happens when the script makes its
DistributedDataParallel or its optimizer, after ``init_process_group``. The last holder of the group would otherwise be
DDP's reducer, which ends gloo's threads without letting go of the interpreter. One of them may be waiting for it, and
then a script that trains in a function hangs after ``destroy_process_group`` (1 run in 5).
"""

from __future__ import annotations

import contextlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from unicron_elastic.compat.loaded import DYNAMO

_held_groups: list[object] = []


def hold_back() -> None:
    """Takes the module out of ``sys.modules``, as if it were not imported; its import then costs nothing."""
    parent, _, child = DYNAMO.rpartition(".")
    module = sys.modules.get(DYNAMO)
    is_whole = getattr(sys.modules.get(parent), child, None) is module
    if module is not None and is_whole:
        del sys.modules[DYNAMO]
        delattr(sys.modules[parent], child)
        sys.meta_path.insert(0, _HeldBack(module))


class _HeldBack(MetaPathFinder, Loader):
    """Gives the module to its first import, then takes itself out of ``sys.meta_path``."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        return ModuleSpec(fullname, self, origin=self._module.__file__, is_package=True) if fullname == DYNAMO else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        with contextlib.suppress(ValueError):  # the script may have put finders of its own in place of all
            sys.meta_path.remove(self)
        _hold_group()


def _hold_group() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        _held_groups.append(distributed.group.WORLD)
