"""What the processes of a simulated host use, by role: read from /proc, little at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unicron_elastic.worker.process.process_stat import parse_stat

__all__ = ["Process", "count_files", "look_at"]

TICKS = os.sysconf("SC_CLK_TCK")
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
LAUNCHER = "unicron_elastic.launcher.main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One of them at one moment. Memory in KiB; ``started``: ticks since the machine's start; ``cpu_s`` so far."""

    pid: int
    started: int
    host: str
    role: str
    rss_kib: int
    pss_kib: int
    descriptors: int
    threads: int
    cpu_s: float


def look_at(host: str, pids: Iterable[int]) -> list[Process]:
    """Those that are alive."""
    alive = list(pids)
    found = []
    for pid in sorted(alive):
        try:
            found.append(_read(host, Path(f"/proc/{pid}")))
        except (OSError, IndexError, ValueError):
            continue  # it has ended this moment
    return [each for each in found if each is not None]


def _read(host: str, folder: Path) -> Process | None:
    stat = parse_stat((folder / "stat").read_text(errors="replace"))
    if stat.has_ended:
        return Process(pid=int(folder.name), started=stat.started_at, host=host, role="zombie", rss_kib=0, pss_kib=0,
                       descriptors=0, threads=0, cpu_s=0.0)  # fmt: skip
    return Process(
        pid=int(folder.name),
        started=stat.started_at,
        host=host,
        role=role_of(folder),
        rss_kib=int((folder / "statm").read_text().split()[1]) * PAGE_KIB,
        pss_kib=_pss_kib(folder),
        descriptors=len(os.listdir(folder / "fd")),
        threads=stat.threads,
        cpu_s=stat.cpu_ticks / TICKS,
    )


def role_of(folder: Path) -> str:
    """By its command line, and of those that are forked from one another, by their thread's name or memory."""
    words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
    line = " ".join(words)
    name = (folder / "comm").read_text(errors="replace").strip()
    if words[0].endswith("/etcd"):
        return "etcd"
    if any(word.endswith("/unicron") for word in words[:2]):
        return next((word for word in words if word in ("agent", "coordinator")), "command")
    if LAUNCHER in words[:3]:
        return "launcher"
    if "memfd:unicron-pulse" in (folder / "maps").read_text(errors="replace") and "_soak_job.py" in line:
        return "worker"
    for part in ("keeper", "warm", "resource_tracker", "py-spy"):
        if part in line or part in name:
            return part
    return "worker" if "_soak_job.py" in line else name or "?"


def _pss_kib(folder: Path) -> int:
    with (folder / "smaps_rollup").open() as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def count_files(folder: Path) -> tuple[int, int]:
    """How many files there are below, and their bytes."""
    number = size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
            number += 1
    return number, size
