"""What the modules that are preloaded read of the environment while they are imported, and what they change in it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType


class ImportedVariables:
    """Notices which variables are read and changed; a worker is to find the changes, and none of the reads is late."""

    def __init__(self, env: Mapping[str, str]) -> None:
        """``env`` is the environment in which the modules are imported."""
        self._env = env
        self._read: set[str] = set()
        self._changes: dict[str, str | None] = {}  # None: taken away

    @contextlib.contextmanager
    def watching(self, *, keeps_changes: bool) -> Iterator[None]:
        """Notices what Python code does meanwhile."""
        kind = type(os.environ)
        get = kind.__getitem__
        before = dict(os.environ)

        def noted(environ: os._Environ[str], name: str) -> str:
            if not _is_passed_by(name, sys._getframe(1).f_back):
                self._read.add(name)
            return get(environ, name)

        kind.__getitem__ = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            kind.__getitem__ = get  # type: ignore[method-assign]
        if keeps_changes:
            now = dict(os.environ)
            for name in before.keys() | now.keys():
                if before.get(name) != now.get(name):
                    self._changes[name] = now.get(name)

    def keep(self, changes: Mapping[str, str]) -> None:
        """Workers find these as well, which were noticed otherwise."""
        self._changes.update(changes)

    def read_of(self, names: Iterable[str]) -> str | None:
        """The first of ``names`` that was read."""
        return next((name for name in names if name in self._read), None)

    def applied_to(self, env: Mapping[str, str]) -> dict[str, str]:
        """``env`` with the changes, but for what it has other values of than there were before them."""
        changed = dict(env)
        for name, value in self._changes.items():
            if env.get(name) != self._env.get(name):
                continue
            if value is None:
                changed.pop(name, None)
            else:
                changed[name] = value
        return changed


def _is_passed_by(name: str, asker: FrameType | None) -> bool:
    """Return whether it is read on the way through all of them by tqdm, which torch imports: it wants its own alone."""
    of = None if asker is None else asker.f_globals.get("__name__")
    return of == "tqdm.utils" and not name.startswith("TQDM_")
