"""What can be known of workers that hang, gathered before anything is done: stacks, collectives, threads, GPUs, host.

Everything here only looks. It runs in threads of its own, because a sick host may let any of it wait; whoever asked
goes on without it when the time is up. What comes first is what disturbs least: the kernel's word, then Python's
stacks, then for those who hang the native ones, for which a process is held for a moment.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from unicron_elastic.detection.sample import GroupPosition
from unicron_elastic.launcher.agent.hangs.host_lines import host_lines
from unicron_elastic.launcher.agent.hangs.stacks import STACK_READER, StackReader
from unicron_elastic.launcher.agent.process.kernel_lines import kernel_lines, summary_lines

_Found = TypeVar("_Found")
_Pair = tuple[int, _Found | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceLimits:
    """`EvidenceLimits` bound the gathering, in seconds since it began, and how many workers are read at a time.

    All are less than recovery's Policy.evidence_timeout_s, after which nobody waits for a report.
    """

    stacks_s: float = 2.6
    native_s: float = 2.7  # then readers are ended
    report_s: float = 2.8
    at_once: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """One worker, and what the agent knew of it when it asked for evidence."""

    rank: int
    local_rank: int
    pid: int
    doing: str  # its step and phase, in words
    is_silent: bool  # owes an answer
    groups: tuple[GroupPosition, ...]  # its latest answer
    stack_fd: int | None  # the number, in the worker, of the file that its faulthandler writes to
    hangs: bool = False  # rather than waits for one that does


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The report, and the Python stacks alone by local rank."""

    text: str
    stacks: tuple[tuple[int, str], ...]


def gather(
    subjects: Sequence[Subject],
    reason: str,
    on_done: Callable[[Evidence], None],
    gpu_lines: Callable[[], Sequence[str]] = list,
    *,
    limits: EvidenceLimits = EvidenceLimits(),
    reader: StackReader = STACK_READER,
) -> None:
    """Gathers in the background and calls ``on_done`` once, from another thread.

    ``gpu_lines`` says how the GPUs are, in lines for the report; it is called in a thread of its own and may wait.
    """

    def work() -> None:
        try:
            found = _Gathering(limits, reader).report(subjects, reason, gpu_lines)
        except Exception as error:
            found = Evidence(text=f"{reason}\n\nThere is no more: {error!r}\n", stacks=())
        on_done(found)

    _in_background(work)


def _in_background(work: Callable[[], None]) -> None:
    """A thread that holds up neither who began it nor the end of this process, as those of an executor would."""
    threading.Thread(target=work, name="unicron-evidence", daemon=True).start()


class _Gathering:
    """`_Gathering` is one report in the making, which began when this was made."""

    def __init__(self, limits: EvidenceLimits, reader: StackReader) -> None:
        self._limits = limits
        self._reader = reader
        self._began = time.monotonic()

    def report(self, subjects: Sequence[Subject], reason: str, gpu_lines: Callable[[], Sequence[str]]) -> Evidence:
        """Return what can be known of these workers in the time that there is."""
        gpus = _begin([0], lambda _: list(gpu_lines()), 1)
        about = {subject.local_rank: _of_worker(subject) for subject in subjects}
        stacks = self._stacks(subjects)
        native = self._native([subject for subject in subjects if subject.hangs])
        parts = [reason, "", *host_lines()]
        if told := self._by(gpus, 1, self._limits.report_s).get(0, ["Nothing could be found out about the GPUs."]):
            parts += ["", *told]
        for subject in subjects:
            rank = subject.local_rank
            parts += ["", *about[rank], "", stacks.get(rank) or "No stack could be read."]
            if rank in native:
                parts += ["", "With the frames of C and C++:", native[rank]]
        found = tuple((local_rank, stack) for local_rank, stack in sorted(stacks.items()) if stack)
        return Evidence(text="\n".join(parts) + "\n", stacks=found)

    def _stacks(self, subjects: Sequence[Subject]) -> dict[int, str]:
        """Return Python's stacks by local rank."""
        of = {subject.local_rank: subject for subject in subjects}
        reading = _begin(of, lambda rank: self._reader.python(of[rank].pid, of[rank].stack_fd), self._limits.at_once)
        return self._by(reading, len(of), self._limits.stacks_s)

    def _native(self, hanging: Sequence[Subject]) -> dict[int, str]:
        """Return the native stacks, or why there are none, of those who hang. Each takes half a second of a CPU."""
        if not hanging or self._reader.find() is None:
            return {}
        pids = {subject.local_rank: subject.pid for subject in hanging}
        deadline = self._began + self._limits.native_s
        at_once = min(self._limits.at_once, len(os.sched_getaffinity(0)))
        reading = _begin(pids, lambda local_rank: self._reader.native(pids[local_rank], deadline), at_once)
        late = dict.fromkeys(pids, "No native stack came in time.")
        return late | self._by(reading, len(pids), self._limits.report_s)

    def _by(self, done: queue.SimpleQueue[_Pair[_Found]], count: int, limit_s: float) -> dict[int, _Found]:
        """Return what has come of ``count`` questions within ``limit_s`` of the beginning."""
        found: dict[int, _Found] = {}
        with contextlib.suppress(queue.Empty):
            for _ in range(count):
                key, each = done.get(timeout=max(0.0, self._began + limit_s - time.monotonic()))
                if each is not None:
                    found[key] = each
        return found


def _begin(keys: Collection[int], find_out: Callable[[int], _Found], at_once: int) -> queue.SimpleQueue[_Pair[_Found]]:
    """Call ``find_out`` for each key, for some at once; what comes of it goes into the queue, None for errors."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[_Pair[_Found]] = queue.SimpleQueue()
    for key in keys:
        waiting.put(key)

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                key = waiting.get_nowait()
                found = None
                with contextlib.suppress(Exception):  # the process may have ended
                    found = find_out(key)
                done.put((key, found))

    for _ in range(min(len(keys), at_once)):
        _in_background(work)
    return done


def _of_worker(subject: Subject) -> list[str]:
    lines = [f"== rank {subject.rank}, pid {subject.pid}: {subject.doing}"]
    if subject.is_silent:
        lines.append("It does not answer the question which collectives it has begun: its interpreter does not run.")
    for group in subject.groups:
        ended = "" if group.ended is None else f", {group.ended} ended"
        lines.append(f"process group {group.name}: {group.begun} collectives begun{ended}")
    return [*lines, *summary_lines(subject.pid), *(kernel_lines(subject.pid) if subject.hangs else [])]
