"""Finds what workers left behind and ends it: among the keeper's descendants, and by the mark in the environment.

The keeper is the subreaper of all that workers start, so whoever lost its parent is a child of the keeper. Numbers of
processes are used again: nobody is killed who was not found to belong there while its number could be nobody else's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

from unicron_elastic.worker.process.mark import MARK, token_of
from unicron_elastic.worker.process.process_stat import read_stat

START_GRACE_S = 0.1  # a process that is just replacing its program has no command line by which it is known
SWEEP_DEADLINE_S = 5.0  # a process in uninterruptible sleep cannot be waited for longer than this
PAUSE_S = 0.001
# These give shared memory and semaphores back and end by themselves; torch's, seconds after its last client.
_TRACKER, _SHM_MANAGER = b"multiprocessing.resource_tracker", b"torch_shm_manager"


class Sweep:
    """Kills whom ``find`` finds, and again until nobody is left, because a process may start another while it dies.

    Who is in uninterruptible sleep is given up after SWEEP_DEADLINE_S. Trackers of shared memory end by themselves;
    with ``awaits_trackers`` that is waited for, though not for torch's.
    """

    def __init__(self, find: Callable[[], set[int]], *, awaits_trackers: bool = False) -> None:
        self._find = find
        self._awaits_trackers = awaits_trackers
        self._begun = time.monotonic()

    def step(self) -> bool:
        """Looks once and kills whom it finds; whether it is over."""
        found = {pid for pid in self._find() if not _runs(pid, _SHM_MANAGER)}
        elapsed_s = time.monotonic() - self._begun
        is_late = elapsed_s > SWEEP_DEADLINE_S
        spared = set() if is_late else {pid for pid in found if _runs(pid, _TRACKER)}
        nameless = set() if elapsed_s > START_GRACE_S else {pid for pid in found if _is_nameless(pid)}
        victims = found - spared - nameless
        self._kill(victims)
        return is_late or not (found if self._awaits_trackers else victims | nameless)

    def run(self, collect: Callable[[], object] = lambda: None) -> None:
        """Takes all steps; ``collect`` is called between them, for those who end as children of this process."""
        while not self.step():
            time.sleep(PAUSE_S)
            collect()

    def _kill(self, victims: set[int]) -> None:
        held: dict[int, int | None] = {}
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                held[pid] = _pidfd(pid)
        still_found = self._find() if held else set()
        for pid, pidfd in held.items():
            if pid in still_found:
                with contextlib.suppress(OSError):
                    _kill(pid, pidfd)
            if pidfd is not None:
                os.close(pidfd)


def _pidfd(pid: int) -> int | None:
    """A descriptor of the process; None if there is none to be had (an old kernel, too many files)."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def _kill(pid: int, pidfd: int | None) -> None:
    if pidfd is None:
        os.kill(pid, signal.SIGKILL)
    else:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def descendants(keep: frozenset[int]) -> set[int]:
    """All descendants of this process outside of the trees of ``keep``."""
    found: set[int] = set()
    frontier = _children(os.getpid())
    while frontier:
        pid = frontier.pop()
        if pid not in keep and pid not in found:
            found.add(pid)
            frontier.extend(_children(pid))
    return found


def left_by(worker: int, mark: str) -> set[int]:
    """Those descendants of this process that a worker started, which had this pid and mark and has ended.

    They carry its mark, or are in its session and carry no other of the run, or descend from such a one. Not found is
    who has taken both away and whose parents have ended.
    """
    session = None if _session(worker) == worker else worker  # else the number is that of another session by now
    found: set[int] = set()
    frontier = [(pid, False) for pid in _children(os.getpid())]
    while frontier:
        pid, is_below = frontier.pop()
        is_below = is_below or _is_of(pid, session, mark)
        if is_below:
            found.add(pid)
        frontier.extend((child, is_below) for child in _children(pid))
    return found


def _is_of(pid: int, session: int | None, mark: str) -> bool:
    marks = _marks(pid, token_of(mark))
    return mark.encode() in marks or (not marks and session is not None and _session(pid) == session)


def _marks(pid: int, token: str) -> set[bytes]:
    """The marks of the run ``token`` that a process was started with; none if that cannot be read."""
    start = f"{MARK}=".encode()
    with contextlib.suppress(OSError):
        entries = _read(f"/proc/{pid}/environ").split(b"\0")
        return {entry[len(start) :] for entry in entries if entry.startswith(start + token.encode())}
    return set()


def _session(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return None


def _children(pid: int) -> list[int]:
    """The children of ``pid``, of whichever of its threads (see proc_pid_task(5)); none if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found.extend(map(int, file.read().split()))
    return found


def kill_carriers(token: str) -> None:
    """Kills whoever was started with ``token`` in its environment, wherever it now hangs in the process tree.

    For what is no descendant of the keeper: function workers, and everything once the keeper itself is gone.
    """
    Sweep(lambda: _carriers(token.encode())).run()


def _carriers(token: bytes) -> set[int]:
    """Everybody else of this machine with ``token`` in the environment, but for trackers of shared memory."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if token in _read(f"/proc/{name}/environ") and not _runs(int(name), _TRACKER, _SHM_MANAGER):
                    found.add(int(name))
    return found


def _is_nameless(pid: int) -> bool:
    """Whether a process has no command line although it lives: it is in the middle of execve(2), or took it away."""
    with contextlib.suppress(OSError):
        if not _read(f"/proc/{pid}/cmdline"):
            stat = read_stat(f"/proc/{pid}/stat")
            return stat is not None and not stat.has_ended
    return False


def _runs(pid: int, *programs: bytes) -> bool:
    with contextlib.suppress(OSError):
        command = _read(f"/proc/{pid}/cmdline")
        return any(program in command for program in programs)
    return False


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
