"""What the kernel says of a worker that makes no step: does it run, does it wait for a disk, was it stopped?"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from unicron_elastic.health.host.files import read
from unicron_elastic.worker.answer_questions import THREAD_NAME
from unicron_elastic.worker.process.process_stat import ProcessStat, read_stat

# Descendants looked at: a data loader has some, a worker that forks without end must not hold us up.
_PROCESSES_MAX = 64
# Threads that wake many times a second and only look: ours that answers, gloo's that waits for its peers' messages, and
# those with which torch watches NCCL. Timers end together, so that who looks at one often finds it awake.
_ONLY_LOOK = (THREAD_NAME, "gloo_tcp_loop", "pt_nccl_watchdg", "pt_nccl_heartbt")
_AGAIN_S = 0.001  # such a thread sleeps again by then: before torch 2.13, gloo's had no name of its own
_PF_EXITING = 0x4  # Linux's include/linux/sched.h; set before the kernel closes the process's files


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The states of a worker's threads and of those of its descendants (proc(5), "state")."""

    stopped: bool  # T: the worker itself was stopped by a signal
    runnable: bool  # R, twice: some thread runs or waits for a CPU; t: a debugger holds it, and will let it go
    in_io: bool  # D: some thread waits for a disk, a network file system or a driver
    answering: bool = False  # R, twice: our thread that answers runs or waits for a CPU, not for the interpreter


def cpu_time_s(pid: int) -> float | None:
    """Processor time of all threads of a process so far; None if it is gone. Costs about a microsecond."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) returns
    except OSError:
        return None


def activity(pid: int) -> Activity | None:
    """What the worker's threads do at this moment; None if it is gone."""
    stats = _stats(pid)
    if not stats:
        return None
    states = own = _states(stats)
    for descendant in _descendants(pid):
        states = states | _states(_stats(descendant))
    awake = [thread for thread, letter in states.items() if letter == "R"]
    about_to_answer = [thread for thread, stat in stats.items() if stat.name == THREAD_NAME and stat.state == "R"]
    if awake or about_to_answer:
        time.sleep(_AGAIN_S)
    runs = "t" in states.values() or _any_still_runs(awake)
    answering = _any_still_runs(about_to_answer)
    is_stopped = set(own.values()) == {"T"}
    return Activity(stopped=is_stopped, runnable=runs, in_io="D" in states.values(), answering=answering)


def is_at_work(pid: int) -> bool:
    """Whether the process, or one that it has started, runs or waits for a processor or a disk."""
    found = activity(pid)
    return found is not None and (found.runnable or found.in_io)


def is_ending(pid: int) -> bool:
    """Whether the process has begun to exit, or was killed, or is gone.

    With all of its threads: a main thread may leave the others to go on.
    """
    return all(_is_exiting(_stat(f"{pid}/task/{thread}")) for thread in threads(pid))


def maps_file(pid: int, name: str) -> bool | None:
    """Whether the process has a file whose path begins so in its memory; None if it has none at all, as it is gone."""
    is_there = None
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:  # some have millions of bytes
            for line in file:
                if is_there := f" {name}".encode() in line:
                    break
    except OSError:
        return None
    return is_there


def exit_code(pid: int) -> int | None:
    """The exit code of a process that has ended and was not collected, negative for a signal; None of any other.

    Only of our own: the kernel says 0 of everybody to who may not look.
    """
    stat = _stat(str(pid))
    if stat is None or stat.state != "Z" or stat.exit_status is None:
        return None
    with contextlib.suppress(OSError):
        if os.geteuid() in {0, os.stat(f"/proc/{pid}").st_uid}:
            return os.waitstatus_to_exitcode(stat.exit_status)
    return None


def _is_exiting(stat: ProcessStat | None) -> bool:
    """Tell whether a thread is exiting; one that is gone has done so."""
    return stat is None or stat.has_ended or bool(stat.flags & _PF_EXITING)


def state(pid: int, thread: str | None = None) -> str:
    """The letter of a process's state, or of a thread's; "" if it is gone."""
    return _letter(_stat(str(pid) if thread is None else f"{pid}/task/{thread}"))


def _letter(stat: ProcessStat | None) -> str:
    return "" if stat is None else stat.state


def _stat(of: str) -> ProcessStat | None:
    return read_stat(f"/proc/{of}/stat")


def _stats(pid: int) -> dict[str, ProcessStat]:
    """Return what the kernel says of each thread of a process, by its folder below /proc."""
    found = ((f"{pid}/task/{thread}", _stat(f"{pid}/task/{thread}")) for thread in threads(pid))
    return {thread: stat for thread, stat in found if stat is not None}


def _any_still_runs(threads: Iterable[str]) -> bool:
    """Tell whether one of these threads, by their folders below /proc, runs or waits for a CPU."""
    return any(_letter(_stat(thread)) == "R" for thread in threads)


def _states(stats: Mapping[str, ProcessStat]) -> dict[str, str]:
    """Return the states of threads, without those that only look."""
    return {thread: stat.state for thread, stat in stats.items() if stat.name not in _ONLY_LOOK}


def _descendants(pid: int, most: int = _PROCESSES_MAX) -> Iterator[int]:
    """Yield the nearest first, ``most`` at the most."""
    found = [pid]
    for parent in found:
        if parent != pid:
            yield parent
        for thread in threads(parent):
            children = (read(f"/proc/{parent}/task/{thread}/children") or "").split()
            found += map(int, children[: most + 1 - len(found)])


def threads(pid: int) -> list[str]:
    """The ids of the threads of a process; none if it is gone."""
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
