"""Which process an agent is: another agent on its host can be certain that it, and its workers, are no more.

Certain is what the kernel says of its own processes: the same boot, and the same namespaces of numbers and of time.
Copies of a virtual machine that was running share all of these, but as nodes of one job have addresses of their own. A
connection that is refused proves less: who has never been connected to an agent does not know who refuses on the way,
and a host of the same name may be another machine.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from unicron_elastic.worker.process.process_stat import ProcessStat, parse_stat

_WORKER = "TORCHELASTIC_RUN_ID"  # in the environment of each worker
_PAGE = "/memfd:unicron-pulse:"  # a warm worker shows its parent's environment, and has this name among its maps


class AgentProcess(NamedTuple):
    """`AgentProcess` names one process of one boot of a kernel. ``address`` is where other nodes find it."""

    boot: str
    namespaces: str  # of processes and of time
    address: str
    user: int
    pid: int
    started_at: int  # clock ticks after the boot

    def __str__(self) -> str:
        return " ".join(map(str, self._replace(address=quote(self.address))))


def own_process(address: str, proc: Path = Path("/proc")) -> AgentProcess | None:
    """Return what this process is; None if the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError):
        if os.readlink(proc / "self") == str(os.getpid()):  # else it is mounted from another namespace
            boot = (proc / "sys/kernel/random/boot_id").read_text().strip()
            spaces = ",".join(os.readlink(proc / "self/ns" / name) for name in ("pid", "time"))
            return AgentProcess(boot, spaces, address, os.getuid(), os.getpid(), _stat(proc / "self").started_at)
    return None


def parse_process(text: str) -> AgentProcess | None:
    """Return what an agent has told of itself; None for what tells nothing."""
    with contextlib.suppress(ValueError):
        boot, spaces, address, user, pid, started_at = text.split(" ")
        return AgentProcess(boot, spaces, unquote(address), int(user), int(pid), int(started_at))
    return None


def has_ended(told: AgentProcess, run_id: str, own: AgentProcess, proc: Path = Path("/proc")) -> bool:
    """Whether it is certain, as ``own`` sees it, that an agent is no more, nor any of its workers of run ``run_id``."""
    if told[:3] != own[:3] or own.user not in (0, told.user):
        return False
    folder = proc / str(told.pid)
    try:
        stat = _stat(folder)
        if stat.started_at == told.started_at and not (stat.has_ended and len(os.listdir(folder / "task")) <= 1):
            return False
    except (FileNotFoundError, ProcessLookupError):
        pass
    except (OSError, ValueError):
        return False
    try:
        pids = [name for name in os.listdir(proc) if name.isdecimal()]
    except OSError:
        return False
    return not any(_may_be_worker(proc / pid, run_id, told) for pid in pids)


def _stat(folder: Path) -> ProcessStat:
    """Raise OSError or ValueError for what cannot be read."""
    return parse_stat((folder / "stat").read_text(errors="replace"))


def _may_be_worker(folder: Path, run_id: str, of: AgentProcess) -> bool:
    """Whether a process is a worker of the run, or one of that user's of which this cannot be seen."""
    try:
        if of.user not in (0, *_users(folder)):  # root's workers may have become anybody
            return False
        stat = _stat(folder)
        if stat.has_ended or stat.started_at < of.started_at:
            return False
        environ = (folder / "environ").read_bytes().split(b"\0")
        if f"{_WORKER}={run_id}".encode() in environ:
            return True
        is_ours = any(each.startswith(b"UNICRON_RUN_TOKEN=") for each in environ)
        return is_ours and any(_is_page_of(line, run_id) for line in (folder / "maps").read_text().splitlines())
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError):
        return True


def _users(folder: Path) -> list[int]:
    """Return as whom a process runs. Its folder belongs to root if it hides itself."""
    lines = (folder / "status").read_text(errors="replace").splitlines()
    return [int(user) for line in lines if line.startswith("Uid:") for user in line.split()[1:]]


def _is_page_of(line: str, run_id: str) -> bool:
    _, found, name = line.partition(_PAGE)
    return bool(found) and quote(run_id, safe="").startswith(name.split(":")[-1].split(" ")[0])
