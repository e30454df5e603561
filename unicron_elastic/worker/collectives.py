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
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from unicron_elastic.compat.loaded import C10D, all_groups, first_registering, has_other_than_gloo
from unicron_elastic.worker.imports import after_import

# A last resort: a training loop that stays in a collective whose connections are gone ends its process.
#
# Gloo (torch 2.13) forgets a send that was under way when a connection ends, and nothing wakes who waits for it
# without a time-out; ``training.collective`` says how waits of our own avoid that. Waits of others, as within a
# model, cannot be reached. The rank is then lost as one that was killed: the others go on without it, and it is
# replaced.


STUCK_S = 5.0
LOOK_S = 0.5
_CPU_S = 0.001  # that a thread may use while it waits
# Where others are waited for. Not all of torch.distributed: who writes a checkpoint may wait for a slow disk.
_WAITING = (
    f"/{C10D.replace('.', '/')}.py",
    "/megatron/core/pipeline_parallel/",
    "/unicron_elastic/training/step/collective.py",
)


class Glance(NamedTuple):
    """Where the main thread is: in which call of a function, at which of its instructions, in which file."""

    frame: int
    instruction: int
    file: str
    cpu_s: float  # that it has used


def is_stuck(before: Glance, now: Glance) -> bool:
    """Whether it waits in the same place as before, and for other ranks."""
    place = now.file.replace("\\", "/")
    same = (before.frame, before.instruction) == (now.frame, now.instruction)
    return same and now.cpu_s - before.cpu_s < _CPU_S and any(part in place for part in _WAITING)


def end_if_stuck(has_gone_on: Callable[[], bool], why: str) -> None:
    """Watches the main thread from a thread of its own until it ``has_gone_on``; ``why`` it has to, as a sentence."""
    threading.Thread(target=_watch, args=(has_gone_on, why), name="unicron-stuck", daemon=True).start()


def _watch(has_gone_on: Callable[[], bool], why: str) -> None:
    first = _glance()
    since = time.monotonic()
    while not has_gone_on():
        time.sleep(LOOK_S)
        now = _glance()
        if first is None or now is None or not is_stuck(first, now):
            first, since = now, time.monotonic()
        elif time.monotonic() - since >= STUCK_S and not has_gone_on():
            sys.stderr.write(
                f"unicron: this rank waits in a collective that was broken off and does not end ({now.file}), "
                f"and begins again. {why}\n"
            )
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)


def _glance() -> Glance | None:
    main = threading.main_thread()
    frame: FrameType | None = None if main.ident is None else sys._current_frames().get(main.ident)
    if frame is None or main.ident is None:
        return None
    cpu_s = time.clock_gettime(time.pthread_getcpuclockid(main.ident))
    return Glance(id(frame), frame.f_lasti, frame.f_code.co_filename, cpu_s)


# Gloo's connections of this process, found among all its descriptors and shut down.
#
# Gloo has no abort: a collective that waits for a peer ends when a connection of its group does. What waits then
# raises within milliseconds, "Connection closed by peer". Descriptors are looked at when they are needed, so nothing
# is written down that could be out of date, and connections made late (TORCH_GLOO_LAZY_INIT, splits made in C++) are
# found as well.
#
# A connection is gloo's if it bears all the marks which gloo gives each (gloo/transport/tcp: helpers.h, listener.cc
# and pair.cc). The time-outs are the telling one. They mean nothing to a socket that never blocks, so others do not
# set them.


_TIMEVAL_BYTES = 16  # struct timeval on a 64-bit Linux


def shut_gloo_connections() -> int:
    """Shuts down gloo's connections; returns how many. Takes about 4 microseconds for each open descriptor.

    Listening sockets stay as they are: gloo ends the process if it cannot accept (listener.cc, GLOO_ENFORCE).
    """
    shut = 0
    for connection in _sockets():
        with connection:
            if not _is_gloos(connection):
                continue
            with contextlib.suppress(OSError):  # its peer has just gone
                connection.shutdown(socket.SHUT_RDWR)
                shut += 1
    return shut


def _sockets() -> Iterator[socket.socket]:
    """The non-blocking sockets of this process, as duplicates: a number may become another file's at any time."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            # A blocking one must not be given to Python: with a default time-out, that would make it non-blocking.
            found = None if os.get_blocking(duplicate) else socket.socket(fileno=duplicate)
        except OSError:
            found = None
        if found is None:
            os.close(duplicate)
        else:
            yield found


def _is_gloos(connection: socket.socket) -> bool:
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return False
        connection.getpeername()  # raises if it listens, or is not connected
        receive = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL_BYTES)
        send = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL_BYTES)
        return (
            any(receive)
            and receive == send  # both are the time-out of the group
            and bool(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            and bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))
        )
    except OSError:
        return False


_made: list[int] = []  # the size of each group, 0: not known; appending is one step, whichever thread does it


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """What was broken."""

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


def free_to_stop(reason: str) -> Broken:
    """Breaks gloo's collectives in a worker that was sent SIGTERM and has a handler for it in Python.

    The handler cannot run while the main thread waits in one, and would be waited for in vain. With NCCL the script
    would go on with unfinished results, and what the handler saves could be wrong.
    """
    if not callable(signal.getsignal(signal.SIGTERM)):
        return Broken()
    return break_collectives(reason, only_gloo=True)


def break_collectives(reason: str, *, only_gloo: bool = False, is_quiet: bool = False) -> Broken:
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
        sockets = shut_gloo_connections()
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
