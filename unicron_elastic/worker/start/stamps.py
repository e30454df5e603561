"""Whether an import would still find the files that it found."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

from unicron_elastic.worker.process.imported_modules import is_installed

_Stamp = tuple[int, int, int]  # inode, size, time of the last change in nanoseconds


class Stamps:
    """`Stamps` remembers files and what is in folders, and says which has changed since this was made."""

    def __init__(self, folders: Iterable[str] = ()) -> None:
        """Remember what is in those of ``folders`` that hold installed packages: imports may find what is new."""
        self._began_ns = time.time_ns()
        self._files: dict[str, _Stamp | None] = {}
        self._folders = {path: _entries(path) for path in folders if is_installed(path + os.sep)}

    def add(self, paths: Iterable[str]) -> None:
        """Remembers these files."""
        for path in paths:
            self._files.setdefault(path, _stamp(path))

    def changed(self) -> str | None:
        """The first that is not as it was, or that was written to between the beginning and its stamp."""
        for path, entries in self._folders.items():
            if _entries(path) != entries:
                return path
        for path, stamp in self._files.items():
            now = _stamp(path)
            if now != stamp or (now is not None and now[2] >= self._began_ns):
                return path
        return None


def _stamp(path: str) -> _Stamp | None:
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None


def _entries(path: str) -> frozenset[str]:
    with contextlib.suppress(OSError):  # a path may be an archive
        return frozenset(os.listdir(path)) - {"__pycache__"}
    return frozenset()
