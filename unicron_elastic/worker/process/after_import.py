"""Calls back once a module has been imported, by whomever and whenever; nothing is imported for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(name: str, callback: Callable[[ModuleType], object]) -> None:
    """Calls ``callback`` with the module: now, if it is imported already, else right after its import.

    Later it must not fail the script: what it raises then becomes a warning. Now it raises.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, callback))


class _AfterImport(MetaPathFinder, Loader):
    """Stands in for the module's loader once, then takes itself out of ``sys.meta_path``."""

    def __init__(self, name: str, callback: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._callback = callback
        self._loader: Loader | None = None

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        with contextlib.suppress(ValueError):  # the script may have put finders of its own in place of all
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
            sys.stderr.write(f"unicron: {self._name} is not watched in this worker: {type(error).__name__}: {error}\n")
