"""What a worker has imported since its start: its agent has the next start's workers find that imported."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

_WORDS = 624  # of a Mersenne Twister
_GENERATIONS_MAX = 20  # drawn between two imports; who draws more is taken for one who has seeded
INSTALLED = frozenset({"site-packages", "dist-packages"})
# Ours, or replaced by ours; the program itself; what stands in for another module.
_LEFT_OUT = ("unicron_elastic", "nvidia_resiliency_ext", "__main__", "__mp_main__", "sitecustomize", "usercustomize")


class ImportedModules:
    """`ImportedModules` knows what this process has imported since this was made.

    What is imported after the first process group may take hold of the group, the rank or the device of that moment;
    of torch's own modules that is left out.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._before = frozenset(sys.modules)
        self._environ = environ
        self._env = dict(environ)
        self._changed: dict[str, str | None] | None = None  # once it is known
        self._last: str | None = None  # the last module before the first process group
        self.after_group: str | None = None  # the first one after it that ``installed`` has
        self._watch = _SeedWatch()
        sys.meta_path.insert(0, self._watch)

    def note_group(self) -> None:
        """Note that there is a process group now, if it is the first."""
        if self._changed is None:
            self._watch.look("")
            self._changed = self._changes()
            self._last = next(reversed(sys.modules), None)
        if self._watch in sys.meta_path:
            sys.meta_path.remove(self._watch)

    def installed(self) -> dict[str, str]:
        """{name: file} of those that are installed, or Python's own, in the order in which their imports began.

        The file is "" where there is none.
        """
        self.note_group()
        found = {}
        is_late = False
        for name, module in list(sys.modules.items()):
            if not (name in self._before or name.startswith(_LEFT_OUT) or (is_late and name.startswith("torch."))):
                path = file_of(module)
                if not path or is_installed(path):
                    found[name] = path
                    if is_late and self.after_group is None:
                        self.after_group = name
            is_late = is_late or name == self._last
        return found

    @property
    def changed_variables(self) -> dict[str, str | None]:
        """The variables that had other values by the first group than at the start, and those; None: taken away."""
        return self._changes() if self._changed is None else self._changed

    @property
    def changed_since(self) -> tuple[str, ...]:
        """The variables that have changed since the first group."""
        now, then = self._changes(), self.changed_variables
        return tuple(sorted({name for name, _ in now.items() ^ then.items()}))

    @property
    def seeded_before(self) -> str | None:
        """The first module whose import began after the script had seeded ``random``; "": none; None: it has not."""
        return self._watch.seeded_before

    def _changes(self) -> dict[str, str | None]:
        before, now = self._env, dict(self._environ)
        return {name: now.get(name) for name in before.keys() | now.keys() if before.get(name) != now.get(name)}


class _SeedWatch(MetaPathFinder):
    """Looks, at each import, whether Python's random numbers still come from what they came from at the start.

    A module that draws some while it is imported does so once, and not in a worker that finds it imported.
    """

    def __init__(self) -> None:
        self.seeded_before: str | None = None
        self._key = _key()

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:  # noqa: ARG002
        """Finds nothing."""
        self.look(fullname)

    def look(self, name: str) -> None:
        """The import of ``name`` begins."""
        if self.seeded_before is None:
            key = _key()
            if key != self._key and self._key is not None and not _comes_after(self._key, key):
                self.seeded_before = name
            self._key = key


def _key() -> tuple[int, ...] | None:
    """What the numbers come from that Python's generator draws next; it is another one after each 624 words."""
    random: Any = sys.modules.get("random")
    inner = getattr(random, "getstate", None)
    return None if inner is None else inner()[1][:-1]


def _comes_after(earlier: tuple[int, ...], later: tuple[int, ...] | None) -> bool:
    """Whether drawing alone led there."""
    generator: Any = sys.modules["random"].Random()
    generator.setstate((3, (*earlier, _WORDS), None))  # of random.Random.VERSION
    for _ in range(_GENERATIONS_MAX):
        generator.getrandbits(32 * _WORDS)
        if generator.getstate()[1][:-1] == later:
            return True
    return False


def file_of(module: ModuleType) -> str:
    """The file that a module was read from; "" if there is none."""
    with contextlib.suppress(Exception):  # anything may stand in sys.modules
        spec = getattr(module, "__spec__", None)
        origin = getattr(spec, "origin", None) if getattr(spec, "has_location", False) else None
        path = origin or getattr(module, "__file__", None)
        return path if isinstance(path, str) else ""
    return ""


def is_installed(path: str) -> bool:
    """Whether a file lies where packages are installed, or in Python's own library: nobody edits it there."""
    # Not sys.prefix: that is /usr for a distribution's Python, and /usr/src/app may hold the script. Not sysconfig
    # either, which would have to be imported, also in a process that is ending; its "stdlib" is this folder.
    library = os.path.dirname(os.__file__) + os.sep
    return path.startswith((library, "<frozen")) or not INSTALLED.isdisjoint(path.split(os.sep))
