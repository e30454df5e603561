"""Modules beside the script that bear the name of one that was imported before the script began.

Python looks in the script's folder first, so in a plain start they win; what is in ``sys.modules`` already hides
them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import PathFinder


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
