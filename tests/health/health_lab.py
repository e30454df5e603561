"""What the tests of health probes share: a deadline, a collector of findings, a tree like that of the kernel."""

from __future__ import annotations

import os
import queue
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from unicron_elastic.base.finding import Finding
from unicron_elastic.health.watch import Roots

DEADLINE_S = 20.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for what another process or the kernel does; fails the test if it does not come."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


class Tree:
    """Files as the kernel shows them. `set` puts a new text into one, `remove` takes a file or a folder away."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc, self.cgroups = str(root / "proc"), str(root / "sys/fs/cgroup")
        self.net, self.infiniband = str(root / "sys/class/net"), str(root / "sys/class/infiniband")

    def roots(self) -> Roots:
        return Roots(proc=self.proc, cgroups=self.cgroups, net=self.net, infiniband=self.infiniband)

    def set(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.new")
            new.write_text(text, encoding="ascii")
            os.replace(new, path)

    def remove(self, name: str) -> None:
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    def healthy(self) -> None:
        """A machine and a cgroup of version 2 that have memory enough, and one network interface that is up."""
        gib = 1 << 20
        stalls = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
        job = "sys/fs/cgroup/slurm/job_1"
        self.set(
            {
                "proc/meminfo": f"MemTotal:  {64 * gib} kB\nMemFree:  {gib} kB\nMemAvailable:  {32 * gib} kB\n",
                "proc/vmstat": "nr_free_pages 1\noom_kill 3\ndrop_pagecache 0\n",
                "proc/pressure/memory": stalls,
                "proc/self/cgroup": "0::/slurm/job_1\n",
                "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
                "sys/fs/cgroup/slurm/memory.max": "max\n",
                "sys/fs/cgroup/slurm/memory.current": f"{20 << 30}\n",
                "sys/fs/cgroup/slurm/memory.events": "low 0\nmax 0\noom 0\noom_kill 2\noom_group_kill 0\n",
                f"{job}/memory.max": f"{10 << 30}\n",
                f"{job}/memory.current": f"{5 << 30}\n",
                f"{job}/memory.stat": "anon 1\ninactive_file 0\nactive_file 0\n",
                f"{job}/memory.events": "low 0\nmax 0\noom 1\noom_kill 1\noom_group_kill 0\n",
                f"{job}/memory.pressure": stalls,
            }
        )
        self.interface("eth0")

    def interface(self, name: str, state: str = "up", changes: int = 2, flags: str = "0x1003") -> None:
        folder = f"sys/class/net/{name}"
        self.set({f"{folder}/operstate": f"{state}\n", f"{folder}/carrier_changes": f"{changes}\n"})
        self.set({f"{folder}/flags": f"{flags}\n", f"{folder}/device/vendor": "0x15b3\n"})


class Findings:
    """Collects what is reported, from whichever thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Finding] = queue.SimpleQueue()
        self._sentences: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.said: list[str] = []

    def __call__(self, found: Finding) -> None:
        self._queue.put(found)

    def next(self) -> Finding:
        """The next finding; fails the test if none comes."""
        return self._queue.get(timeout=DEADLINE_S)

    def say(self, sentence: str) -> None:
        self.said.append(sentence)
        self._sentences.put(sentence)

    def next_said(self) -> str:
        """The next sentence; fails the test if none comes."""
        return self._sentences.get(timeout=DEADLINE_S)

    def is_empty(self) -> bool:
        return self._queue.empty()
