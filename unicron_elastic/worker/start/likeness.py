"""Whether the warm process is the program that the agent asked for; a fork of another one is no worker.

A debugger, a coverage tool or a wrapper around Python may change the commands of the processes that are started beneath
it, or watch them. Each worker is to be started by it then, as in a plain start.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Collection, Mapping, Sequence

_SHOWN_MAX = 200  # characters of a command


def how_different(argv: Sequence[str], env: Mapping[str, str], own: Collection[str]) -> str | None:
    """Say how this process differs from the command ``argv`` with the variables ``env``; None if it does not.

    ``own`` are variables that it was given values of its own for.
    """
    for found in (_of_kernel(), sys.orig_argv):
        if list(found) != list(argv):
            return f"on the way its command became {_shown(found, argv)}"
    if sys.argv[1:] != list(argv[arguments_at(argv) :]):
        return "something has changed its arguments"
    names = (os.environ.keys() | env.keys()) - set(own)
    if changed := sorted(name for name in names if os.environ.get(name) != env.get(name)):
        return f"its environment was changed on the way: {', '.join(changed)[:_SHOWN_MAX]}"
    return _watched()


def arguments_at(argv: Sequence[str]) -> int:
    """Where in ``argv``, this interpreter's own command, the arguments of its script begin."""
    return len(argv) - len(sys.argv) + 1


def _shown(found: Sequence[str], argv: Sequence[str]) -> str:
    """The command up to the word that was not asked for; a debugger has its password further behind."""
    same = next((at for at, (one, other) in enumerate(zip(found, argv, strict=False)) if one != other), len(argv))
    return shlex.join(found[: same + 1])[:_SHOWN_MAX] + (" ..." if len(found) > same + 1 else "")


def _of_kernel() -> list[str]:
    with open("/proc/self/cmdline", "rb") as file:
        return [os.fsdecode(word) for word in file.read().removesuffix(b"\0").split(b"\0")]


def _watched() -> str | None:
    with open("/proc/self/status") as file:
        tracers = [line.split()[1] for line in file if line.startswith("TracerPid:")]
    if tracers and tracers[0] != "0":
        return f"a debugger or tracer, process {tracers[0]}, watches it"
    if any((sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile())) or _is_monitored():
        return "a debugger, profiler or coverage tool is at work in it"
    return None


def _is_monitored() -> bool:
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12 and newer
    return monitoring is not None and any(monitoring.get_tool(number) for number in range(6))
