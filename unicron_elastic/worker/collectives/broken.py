"""Breaks this worker's collectives when the agent says so: a main thread that waits in one gets an exception.

With gloo what waits raises within milliseconds, and so does whatever is begun in a broken group later. With NCCL a
collective returns before its kernel ends: an abort ends the kernel, what waits for the GPU goes on *without an
exception and with an unfinished result*, and the next collective of the group raises.

The groups stay registered, unlike after ``torch.distributed._abort_process_group``: the script's own
``destroy_process_group`` works as after any other error.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from unicron_elastic.compat.loaded import C10D, all_groups, first_registering, has_other_than_gloo
from unicron_elastic.worker.collectives.gloo_connections import shut_gloo_connections
from unicron_elastic.worker.process.after_import import after_import

_made: list[int] = []  # the size of each group, 0: not known; appending is one step, whichever thread does it


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """`Broken` counts what was broken."""

    groups: tuple[str, ...] = ()  # all process groups there were, the whole job's first
    sockets: int = 0  # gloo's connections that were shut down, without those that a peer had shut down before
    aborts: int = 0  # groups whose back ends are being aborted


def groups_made() -> int:
    """How many process groups were made in this process, as far as they are watched."""
    return len(_made)


def has_met_others() -> bool:
    """Whether one of those had other ranks in it, also if it is destroyed by now."""
    return any(size > 1 for size in _made)


def watch_groups(on_first_group: Callable[[], object]) -> None:
    """Calls ``on_first_group`` once, when this process has made its first process group; not in a forked child.

    Nor in a torch that makes its groups otherwise: the launcher tells of that.
    """
    callback: list[Callable[[], object]] = [on_first_group]
    os.register_at_fork(after_in_child=callback.clear)
    after_import(C10D, lambda module: _watch_registration(module, callback))


def _watch_registration(module: ModuleType, callback: list[Callable[[], object]]) -> None:
    """Watched after the fact, so that no frame of ours is in the traceback of a group that could not be made."""
    name = first_registering(module)
    if name is None:
        return
    register = getattr(module, name)

    @functools.wraps(register)
    def registered(*args: Any, **kwargs: Any) -> Any:
        result = register(*args, **kwargs)
        _made.append(max(map(_size, (*args, *kwargs.values())), default=0))
        with contextlib.suppress(IndexError):
            _call(callback.pop())
        return result

    setattr(module, name, registered)


def _size(argument: Any) -> int:
    """How many ranks a group has; 0 for what is none."""
    try:
        return int(argument.size())
    except Exception:  # torch's function has other arguments, too
        return 0


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception as error:  # it runs inside the script's init_process_group
        _say(f"the first process group is not noticed: {type(error).__name__}: {error}")


def free_to_stop(reason: str) -> bool:
    """Break gloo's collectives in a worker that was sent SIGTERM, and return whether it has a handler in Python for it.

    The handler cannot run while the main thread waits in one, and would be waited for in vain. With NCCL the script
    would go on with unfinished results, and what the handler saves could be wrong.
    """
    if not callable(signal.getsignal(signal.SIGTERM)):
        return False
    break_collectives(reason, only_gloo=True)
    return True


def break_collectives(
    reason: str,
    *,
    only_gloo: bool = False,
    is_quiet: bool = False,
    shut_connections: Callable[[], int] = shut_gloo_connections,
) -> Broken:
    """Breaks all process groups of this worker and says why on stderr. Never raises, returns at once, from any thread.

    A group that is still being made is none yet. Gloo's receive from any rank (``recv`` without ``src``) does not end,
    as it does not when its peers die.
    """
    groups = _groups()
    if not groups:
        return Broken()
    aborts = 0 if only_gloo else sum(map(_begin_abort, groups))
    sockets = 0
    with contextlib.suppress(Exception):
        sockets = shut_connections()
    if only_gloo and not sockets:
        return Broken()
    broken = Broken(groups=tuple(_name(group) for group in groups), sockets=sockets, aborts=aborts)
    if not is_quiet:
        _say(f"the collectives of this worker are broken off: {reason}")
    return broken


def _groups() -> list[Any]:
    try:
        return all_groups()
    except Exception:  # it is not there, is being imported, or the main thread makes groups meanwhile
        return []


def _name(group: Any) -> str:
    try:
        return str(group.group_name)
    except Exception:
        return ""


def _begin_abort(group: Any) -> bool:
    """Whether the group has a back end to abort; gloo's ``abort`` does nothing (torch 2.13).

    NCCL's may wait for as long as the group's time-out. Each group has a thread of its own, since one abort may wait
    for the whole device and so for a collective of another group (NVIDIA/nccl#1013). No ``threading.Thread``: a script
    that counts its threads does not see it.
    """
    try:
        if not has_other_than_gloo(group):
            return False
        _thread.start_new_thread(_abort, (group,))
    except Exception:
        return False
    return True


def _abort(group: Any) -> None:
    try:
        group.abort()
    except Exception as error:
        _say(f"process group {_name(group)} could not be aborted: {type(error).__name__}: {error}")


def _say(what: str) -> None:
    with contextlib.suppress(Exception):  # the script may have closed or replaced its stderr
        sys.stderr.write(f"unicron: {what}\n")
