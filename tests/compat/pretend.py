"""Makes the installed torch look like another one to unicron_elastic, which torch itself does not notice.

``PRETEND`` has the paths of expectations that are not there, separated by commas. Run as a program, this is
``unicron-run``; a worker's script imports it.
"""

from __future__ import annotations

import builtins
import os
import sys
from typing import Any

if __name__ == "__main__":  # in a fork of a process that has imported unicron_elastic with the torch that is there
    for name in [name for name in sys.modules if name.partition(".")[0] == "unicron_elastic"]:
        del sys.modules[name]

from unicron_elastic import compat

HIDDEN = set(filter(None, os.environ.get("PRETEND", "").split(",")))
if newest := os.environ.get("PRETEND_KNOWN"):  # so that the installed one is newer
    compat.KNOWN = ("2.0", newest)

from unicron_elastic.compat import expectations, loaded  # noqa: E402

_at, _import = expectations._at, builtins.__import__


def at(path: str) -> Any:
    """As the table asks for what is at a path."""
    if path in HIDDEN:
        raise AttributeError(path)
    return _at(path)


def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # noqa: A002
    """As a module of compat imports a name."""
    if str((globals or {}).get("__name__", "")).startswith("unicron_elastic.compat."):
        for each in fromlist or ():
            if f"{name}:{each}" in HIDDEN:
                raise ImportError(f"cannot import name {each!r} from {name!r}")
    return _import(name, globals, locals, fromlist, level)


expectations._at = at
builtins.__import__ = import_
c10d = f"{loaded.C10D}:"
loaded._REGISTERING = tuple(name for name in loaded._REGISTERING if c10d + name not in HIDDEN)
loaded._RECORDERS = () if any("_dump_fr_trace" in path for path in HIDDEN) else loaded._RECORDERS


def break_what_is_not_in_the_table(what: str) -> None:
    """Break one thing of which the table says nothing."""

    def strange(*_args: Any, **_kwargs: Any) -> Any:
        raise TypeError("got an unexpected keyword argument 'gpu_index'")

    if what == "start":  # of a worker
        from unicron_elastic.launcher.agent.process import workers

        workers.bound_to_numa = strange  # type: ignore[assignment]
    elif what == "agent":
        import torch.distributed.elastic.agent.server.api as server

        del server.DEFAULT_ROLE
    elif what == "parser":
        from unicron_elastic.launcher.config import arguments

        arguments.torchrun_parser = strange  # type: ignore[assignment]


if __name__ == "__main__":
    from unicron_elastic.launcher.main import console_script

    break_what_is_not_in_the_table(os.environ.get("PRETEND_BROKEN", ""))
    console_script()
