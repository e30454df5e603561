"""A job on hosts of its own, which are namespaces, so that one can lose its power without a word to the others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from _launchers import Launcher
from _rendezvous_jobs import NAMES, Job, Meeting, loss
from _scenarios import Run

sys.path.append(str(Path(__file__).parents[1] / "tests" / "cluster"))
import hosts

ETCD_PORT = 2379
ETCD_START_S = 20.0


def why_no_power_off() -> str:
    """Why this cannot be measured here, or ""."""
    return hosts.why_no_hosts()


def power_off(launcher: Launcher, repetition: int, deadline_s: float, *, of_coordinator: bool) -> Run:
    """One of three hosts loses its power: nobody hears an end of its connections. etcd has a host of its own."""
    run = Run(f"power-off{' of the coordinator' * of_coordinator}", launcher.name, len(NAMES), repetition)
    with tempfile.TemporaryDirectory(prefix="unicron-hosts-") as folder, hosts.Network(Path(folder)) as network:
        etcd, *nodes = network.add("etcd", *NAMES)
        host_of = {host.name: host for host in nodes}

        def spawn(name: str, argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
            return host_of[name].start(argv, env=environment, stdout=subprocess.PIPE)

        if launcher.program == "unicron-run":
            _start_etcd(etcd)
        meeting = Meeting(f"http://{etcd.address}:{ETCD_PORT}", host_of[NAMES[0]].address, is_tuned=True)
        addresses = {name: host.address for name, host in host_of.items()}
        take_away: Callable[[str], None] = lambda name: host_of[name].power_off()  # noqa: E731
        with Job(launcher, meeting, "2:3", deadline_s, spawn=spawn, take_away=take_away, addresses=addresses) as job:
            loss(job, run, of_coordinator=of_coordinator)
    return run


def _start_etcd(host: hosts.Host) -> None:
    """Raises TimeoutError if it does not serve."""
    program = Path(sys.executable).parent / "unicron"
    host.start([program, "etcd", "--host", host.address, "--port", str(ETCD_PORT)], env=dict(os.environ))
    end = time.monotonic() + ETCD_START_S
    while not host.within(lambda: _answers(host.address)):
        if time.monotonic() > end:
            raise TimeoutError(f"etcd on the host {host.name} does not serve within {ETCD_START_S:g} s")
        time.sleep(0.05)


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, ETCD_PORT), 1.0).close()
    except OSError:
        return False
    return True
