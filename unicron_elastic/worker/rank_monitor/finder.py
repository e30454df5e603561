"""Lets a script's ``nvidia_resiliency_ext.fault_tolerance`` be ours, under ``unicron-run``.

NVIDIA's own client needs ``ft_launcher``'s monitor, and waits for nothing under any other. The rest of an installed
package stays as it is. If none is installed, all else of that name is missing as it would be: a script that merely asks
whether there is one hears no.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

from unicron_elastic.worker.control import Control
from unicron_elastic.worker.link import AGENT
from unicron_elastic.worker.step_count import Beating

PACKAGE = "nvidia_resiliency_ext"
FACADE = f"{PACKAGE}.fault_tolerance"
CLIENT = f"{FACADE}.rank_monitor_client"
# Without an installed package, these hold ours too.
_PARTS = (f"{FACADE}.config", f"{FACADE}.data")
# What only an installed package has: {name: module}. It is imported when somebody asks for it.
_SERVER_SIDE = {
    "RankMonitorServer": "rank_monitor_server",
    "InvalidStateTransitionException": "rank_monitor_state_machine",
    "RankMonitorState": "rank_monitor_state_machine",
    "RankMonitorStateMachine": "rank_monitor_state_machine",
}
# Megatron-Core compares the version with the least it needs, and takes this one if there is no package.
_NO_VERSION = "0.0.0"


def offer_rank_monitor(
    control: Control | None, pulse: Beating | None, on_first_step: Callable[[int], object] | None = None
) -> None:
    """Give ours to a script that imports NVIDIA's client; it speaks through ``control`` and ``pulse``.

    Nothing is imported for that before the script does. ``on_first_step`` is as in ``connect``.
    """
    AGENT.connect(control, pulse, on_first_step)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if not _is_within(fullname, PACKAGE):
            return None
        if fullname not in (PACKAGE, FACADE, CLIENT, *_PARTS):
            return None
        installed = self._installed(fullname, path, target)
        if fullname == PACKAGE:
            if installed is not None or not _is_facade_wanted(sys._getframe(1)):
                return None
        elif installed is not None and fullname in _PARTS:
            return None
        spec = ModuleSpec(fullname, self, origin="unicron_elastic", is_package=fullname in (PACKAGE, FACADE))
        if fullname == FACADE and installed is not None:
            spec.submodule_search_locations = list(installed.submodule_search_locations or ())
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:  # noqa: ARG002
        return None  # an ordinary one

    def exec_module(self, module: ModuleType) -> None:
        names = vars(module)
        if module.__name__ == PACKAGE:
            names["__version__"] = _NO_VERSION
            return
        from unicron_elastic.worker.rank_monitor import surface

        names.update({name: getattr(surface, name) for name in surface.__all__}, __doc__=surface.__doc__)
        if module.__name__ == FACADE:
            names["__getattr__"] = _server_side

    def _installed(self, fullname: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        """What Python would find without us."""
        for finder in sys.meta_path:
            find: Callable[..., ModuleSpec | None] | None = getattr(finder, "find_spec", None)
            if finder is not self and find is not None:
                spec = find(fullname, path, target)
                if spec is not None:
                    return spec
        return None


def _server_side(name: str) -> Any:
    """The installed package's own. Raises AttributeError for other names, and without such a package."""
    try:
        return getattr(importlib.import_module(f"{FACADE}.{_SERVER_SIDE[name]}"), name)
    except (KeyError, ImportError) as error:
        raise AttributeError(f"module {FACADE!r} has no attribute {name!r}") from error


def _is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def _is_facade_wanted(frame: FrameType | None) -> bool:
    """Whether the package is being imported for the sake of ours in it, or by itself.

    The import of a module begins with its package's, inside Python's import machinery, where its name is to be seen.
    ``from package import module`` does not say there what it wants, but its code has the name.
    """
    while frame is not None and _is_machinery(frame):
        for variable in ("name", "fullname"):
            wanted = frame.f_locals.get(variable)
            if isinstance(wanted, str) and _is_within(wanted, FACADE):
                return True
        frame = frame.f_back
    leaf = FACADE.rpartition(".")[2]
    return frame is not None and any(name == leaf or _is_within(name, FACADE) for name in frame.f_code.co_names)


def _is_machinery(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("importlib", "_frozen_importlib")
