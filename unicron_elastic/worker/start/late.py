"""torch._dynamo, imported in the warm process, and yet imported again by whoever imports it first in a worker.

That import does one thing which depends on when it happens: ``torch.distributed.nn.functional`` takes the process group
of that moment as default argument, and so holds it for ever. In a plain start it happens when the script makes its
DistributedDataParallel or its optimizer, after ``init_process_group``. The last holder of the group would otherwise be
DDP's reducer, which ends gloo's threads without letting go of the interpreter. One of them may be waiting for it, and
then a script that trains in a function hangs after ``destroy_process_group`` (1 run in 5).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
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


# Modules beside the script that bear the name of one that was imported before the script began.
#
# Python looks in the script's folder first, so in a plain start they win; what is in ``sys.modules`` already hides
# them.


def script_folder(orig_argv: Sequence[str]) -> str | None:
    """The folder that Python is about to put in front of ``sys.path``; None if it puts none there."""
    if getattr(sys.flags, "safe_path", False):  # Python 3.11 and newer
        return None
    for argument in orig_argv[1:]:
        if argument in ("-m", "-"):
            return os.getcwd()
        if not argument.startswith("-"):
            return argument if os.path.isdir(argument) else os.path.dirname(os.path.realpath(argument))
    return None


def hidden_modules(folder: str, loaded_before: Iterable[str]) -> dict[str, str]:
    """{name: file} of modules in ``folder`` whose names were taken since ``loaded_before`` by others."""
    names = _tops(sys.modules) - _tops(loaded_before)
    try:
        names &= {entry.partition(".")[0] for entry in os.listdir(folder)}
    except OSError:
        return {}
    found = {}
    for name in sorted(names):
        own = PathFinder.find_spec(name, [folder])
        if own is not None and own.origin is not None and not _is_loaded_from(name, own.origin):
            found[name] = own.origin
    sys.path_importer_cache.pop(folder, None)  # made by the search; the script's own imports read the folder anew
    return found


def show_hidden(loaded_before: Iterable[str]) -> None:
    """Takes away the names of those of our imports that hide a module of the script's; we keep what we imported."""
    folder = script_folder(sys.orig_argv)
    for name in hidden_modules(folder, loaded_before) if folder is not None else ():
        for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
            del sys.modules[loaded]


def _tops(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def _is_loaded_from(name: str, origin: str) -> bool:
    """Whether the loaded module is that file, or one that comes before any folder (built in or frozen)."""
    spec = getattr(sys.modules[name], "__spec__", None)
    loaded = getattr(spec, "origin", None)
    return loaded in ("built-in", "frozen", origin) or (loaded is not None and _same_file(loaded, origin))


def _same_file(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
