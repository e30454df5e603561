"""What the script of this process is: the text of its own files, as they were when it began.

Who edits them while a job trains does not change what its processes run. A process that takes a lost one's place would
run the new text, beside others that run the old one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Mapping
from functools import cache
from stat import S_ISREG

from unicron_elastic.worker.process.imported_modules import is_installed

_LEFT_OUT = ("unicron_elastic", "__mp_main__")
_NAMES_MAX = 3
_DIGITS = 12


def script_text() -> dict[str, str]:
    """Return a digest for each module that is not installed, by its name; the script itself is "__main__"."""
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__dict__", {}).get("__file__")  # no more: some modules import what is asked for
        if not isinstance(path, str) or "/site-packages/" in path or is_installed(path):
            continue
        if name.partition(".")[0] in _LEFT_OUT:
            continue
        with contextlib.suppress(OSError):
            status = os.stat(path)
            if S_ISREG(status.st_mode):
                found[name] = _digest(path, status.st_mtime_ns, status.st_size)
    return found


@cache
def _digest(path: str, _changed_ns: int, _size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()[:_DIGITS]


def how_else(own: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return in which modules the script is another one than theirs, a clause; "" in none.

    Modules that only one of them has imported do not count: ranks import what they need.
    """
    names = sorted(name for name in own.keys() & theirs.keys() if own[name] != theirs[name])
    if not names:
        return ""
    files = [str(getattr(sys.modules.get(name), "__file__", name)) for name in names[:_NAMES_MAX]]
    more = ", ..." if len(names) > _NAMES_MAX else ""
    return f"the others began when there was another text in {', '.join(files)}{more}"
