"""All agents of a job are lost at once, and others are started on the same hosts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

HOSTS = ("a", "b")
WORKER = """
import os, time
os.write(1, f"WORKS {os.environ['UNICRON_NODE_NAME']}\\n".encode())
while not os.path.exists(os.path.join(os.environ["PROBE"], "stop")):
    time.sleep(0.02)
"""


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    server = EmbeddedEtcd()
    server.start()
    yield server
    server.stop(timeout_s=0.0)


def test_who_comes_to_their_hosts_does_not_wait_for_them(launcher: Any, etcd: EmbeddedEtcd) -> None:
    launcher.script("work.py", WORKER)

    def begin() -> list[Any]:
        runs = []
        for host in HOSTS:
            options = (f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-backend=unicron", "--rdzv-id=lost")
            runs.append(launcher.start("--nnodes=2", *options, "work.py", env={"UNICRON_NODE_NAME": host}))
        for run in runs:
            run.until_line("^WORKS")
        return runs

    lost = begin()
    for run in lost:
        run.process.kill()
    for run in lost:
        run.process.wait()
    found = begin()  # within the deadline of tests, not after the ten minutes for which nodes may train cut off
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in found] == [0, 0]
