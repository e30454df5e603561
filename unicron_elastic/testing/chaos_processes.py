"""Finds the workers of the jobs that unicron-run has running on this machine, from outside.

A worker's rank stands in its environment, or, as the kernel keeps showing the first environment of a process that is
forked on, in the name of the pulse page that it has mapped.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import unquote

from unicron_elastic.worker.process.mark import MARK, token_of
from unicron_elastic.worker.process.process_stat import parse_stat

_RANK, _LOCAL_RANK, _RUN_ID = "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"
_PAGE = re.compile(r"/memfd:unicron-pulse:(\d+):(\d+):(\S*)")  # as worker.pulse.page_name has it


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWorker:
    """One running worker."""

    run_id: str
    rank: int
    local_rank: int
    pid: int
    state: str  # in words
    command: str
    token: str  # of its unicron-run
    started_at: int  # clock ticks after the machine's start

    def to_json(self) -> dict[str, object]:
        """What concerns a reader."""
        data = asdict(self)
        del data["token"], data["started_at"]
        return data


_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device",
    "T": "stopped",
    "t": "traced",
    "I": "idle",
}


def find_workers(proc: Path = Path("/proc")) -> list[LiveWorker]:
    """The workers of all runs that this user may look into, by run and rank.

    What a worker starts inherits its marks. Of all that carry those of one rank, the worker is the oldest.
    """
    oldest: dict[tuple[str, str, int], LiveWorker] = {}
    for found in _carriers(proc):
        key = (found.token, found.run_id, found.rank)
        other = oldest.get(key)
        if other is None or (found.started_at, found.pid) < (other.started_at, other.pid):
            oldest[key] = found
    return sorted(oldest.values(), key=lambda each: (each.run_id, each.rank, each.token))


def send(worker: LiveWorker, number: signal.Signals) -> None:
    """Signals this worker alone. Raises ProcessLookupError if it has ended, whoever has its number now."""
    pidfd = os.pidfd_open(worker.pid)
    try:
        found = _look_at(Path("/proc"), worker.pid)
        if found is None or (found.token, found.started_at) != (worker.token, worker.started_at):
            raise ProcessLookupError(worker.pid)
        signal.pidfd_send_signal(pidfd, number)
    finally:
        os.close(pidfd)


def _carriers(proc: Path) -> Iterator[LiveWorker]:
    for name in os.listdir(proc):
        if name.isdecimal():
            found = _look_at(proc, int(name))
            if found is not None:
                yield found


def _look_at(proc: Path, pid: int) -> LiveWorker | None:
    folder = proc / str(pid)
    with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
        environ = _environment(folder)
        if MARK not in environ:
            return None
        identity = _identity(environ) or _identity_from_page(folder)
        if identity is None:
            return None  # the warm process, say
        rank, local_rank, run_id = identity
        stat = parse_stat((folder / "stat").read_text(errors="replace"))
        if stat.has_ended:
            return None
        return LiveWorker(
            run_id=run_id,
            rank=rank,
            local_rank=local_rank,
            pid=pid,
            state=_STATES.get(stat.state, stat.state),
            command=(folder / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace"),
            token=token_of(environ[MARK]),
            started_at=stat.started_at,
        )
    return None


def _environment(folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in (folder / "environ").read_bytes().split(b"\0"):
        name, equals, value = entry.decode(errors="surrogateescape").partition("=")
        if equals:
            found.setdefault(name, value)
    return found


def _identity(environ: dict[str, str]) -> tuple[int, int, str] | None:
    numbers = environ.get(_RANK, ""), environ.get(_LOCAL_RANK, "")
    if _RUN_ID not in environ or not all(number.isascii() and number.isdecimal() for number in numbers):
        return None
    return int(numbers[0]), int(numbers[1]), environ[_RUN_ID]


def _identity_from_page(folder: Path) -> tuple[int, int, str] | None:
    found = _PAGE.search((folder / "maps").read_text(errors="replace"))
    return (int(found[1]), int(found[2]), unquote(found[3])) if found is not None else None
