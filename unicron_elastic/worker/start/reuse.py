"""Whether a warm process that was held since its job ended may serve another launch."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from unicron_elastic.worker.helper_tasks import TakeUp, WarmUp
from unicron_elastic.worker.process.imported_modules import file_of, is_installed
from unicron_elastic.worker.process.show_command import show_command
from unicron_elastic.worker.process.standing import standing
from unicron_elastic.worker.start.hidden_modules import hidden_modules
from unicron_elastic.worker.start.likeness import arguments_at
from unicron_elastic.worker.start.stamps import Stamps
from unicron_elastic.worker.start.variables import ImportedVariables
from unicron_elastic.worker.start.why_another import why_another


class Reuse:
    """`Reuse` knows for what a warm process was begun, and all files that it has read since."""

    def __init__(self, asked: WarmUp, loaded_before: Iterable[str]) -> None:
        """Made before anything is preloaded."""
        self._began = asked.launch
        self._sets = frozenset(asked.sets)
        self._loaded_before = frozenset(loaded_before)
        self._stamps = Stamps(sys.path)

    def imported(self) -> None:
        """All is preloaded. The streams are let go, which may be a pipe whose reader waits for the end."""
        self._stamps.add(_files_read())
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)

    def why_not(self, asked: TakeUp, variables: ImportedVariables) -> str | None:
        """Say, as a clause, why this process may not serve this launch; None if it may."""
        arguments = arguments_at(sys.orig_argv)
        why = why_another(replace(self._began, standing=standing()), asked.launch, arguments)
        if why is not None:
            return why
        if not show_command(asked.launch.argv):
            return "it was held for other arguments, and this kernel cannot be told of these"
        if early := variables.read_of(asked.sets):
            return f"the script sets {early}, which is read when what is preloaded is imported"
        if (path := self._stamps.changed()) is not None:
            return f"{path} has changed"
        for folder in filter(_is_of_user, sys.path):
            for name in hidden_modules(folder, self._loaded_before):
                return f"{os.path.join(folder, name)} stands in for a module that was preloaded"
        return None

    def begin_anew(self, asked: TakeUp) -> None:
        """Remember what it serves from now on."""
        self._began, self._sets = asked.launch, frozenset(asked.sets)

    def sets_more(self, asked: TakeUp) -> bool:
        """Whether the script sets variables that it did not: what was learned was not asked about them."""
        return not self._sets.issuperset(asked.sets)


def _is_of_user(folder: str) -> bool:
    return os.path.isdir(folder) and not is_installed(folder + os.sep)


def _files_read() -> Iterator[str]:
    """The interpreter's own, those of modules, and libraries."""
    yield from filter(None, map(file_of, list(sys.modules.values())))
    yield sys.executable
    yield os.path.join(sys.prefix, "pyvenv.cfg")
    for folder in sys.path:
        yield from map(str, Path(folder).glob("*.pth"))
    with open("/proc/self/maps") as maps:
        for line in maps:
            words = line.rstrip("\n").split(maxsplit=5)
            if len(words) == 6 and "x" in words[1] and _is_file(words[5]):
                yield words[5]


def _is_file(path: str) -> bool:
    with contextlib.suppress(OSError):
        return path.startswith("/") and stat.S_ISREG(os.stat(path).st_mode)
    return False
