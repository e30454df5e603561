"""A real run with secrets in its environment: nothing that it writes, shows or hands on has one of them in it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unicron_elastic.rendezvous.records.cluster import SECRET
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

PASSWORD, LATER = "correct-horse-battery", "a-secret-of-a-later-version"
DEADLINE_S = 60.0

# Fails once with all that it knows, then has its state kept in memory and waits; it would tell what it finds.
SCRIPT = """
import os, sys, time
import torch
import unicron_elastic

sys.stdout.write(repr(dict(os.environ)) + "\\n")
torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
run = unicron_elastic.Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
run.restore(None)
run.snapshot(1, every=1)
run._snapshots.wait()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise RuntimeError(f"this one has {dict(os.environ)}")
os.write(1, b"WAITS\\n")
while not os.path.exists(os.path.join(os.environ["PROBE"], "stop")):
    time.sleep(0.02)
"""


def _etcdctl(server: EmbeddedEtcd, *arguments: str) -> None:
    program = Path(sys.executable).parent / "etcdctl"
    subprocess.run(
        [program, "--endpoints", server.endpoint, *arguments],
        env={**os.environ, "ETCDCTL_API": "3"}, check=True, capture_output=True, timeout=DEADLINE_S,
    )  # fmt: skip


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    """With users: ``node`` may use our keys, and has ``PASSWORD``."""
    with EmbeddedEtcd() as server:
        _etcdctl(server, "role", "add", "node")
        _etcdctl(server, "role", "grant-permission", "node", "--prefix=true", "readwrite", "/unicron/")
        for user, password in (("root", "root's"), ("node", PASSWORD)):
            _etcdctl(server, "user", "add", f"{user}:{password}")
        for user in ("root", "node"):
            _etcdctl(server, "user", "grant-role", user, user)
        _etcdctl(server, "auth", "enable")
        yield server


def _in_etcd(server: EmbeddedEtcd) -> tuple[str, bytes]:
    """The cluster's secret, and everything else that is in the store."""
    with EtcdStore(StoreAddress.parse(server.endpoint, user="node", password=PASSWORD)) as store:
        entries = {entry.key: entry.value for entry in store.read_prefix("").entries}
    secret = entries.pop(SECRET).decode()
    assert len(secret) == 64
    return secret, repr(entries).encode()


def _of_processes(run: Any) -> Iterator[tuple[str, bytes]]:
    """What other users may see of all its processes, and what a script may of those that it has to do with."""
    for pid, name in run.carriers().items():
        with contextlib.suppress(OSError):
            yield f"the command line of {name}", Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid != run.process.pid:  # who was given the secrets
                yield f"the environment of {name}", Path(f"/proc/{pid}/environ").read_bytes()
        yield from _memory_files(pid, name)


def _memory_files(pid: int, name: str) -> Iterator[tuple[str, bytes]]:
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            path = f"/proc/{pid}/fd/{fd}"
            if os.readlink(path).startswith("/memfd:"):
                yield f"{os.readlink(path)} of {name}", Path(path).read_bytes()


@pytest.mark.slow
def test_no_secret_is_in_what_a_run_writes_shows_or_hands_on(launcher: Any, etcd: EmbeddedEtcd) -> None:
    script = launcher.script("train.py", SCRIPT)
    run = launcher.start(
        "--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=unicron", f"--rdzv-endpoint={etcd.endpoint}",
        "--rdzv-id=job", "--rdzv-conf=last_call_timeout=0.5,lease_ttl=1", "--max-restarts=2", "--log-dir=logs",
        "--redirects=2", "--local-addr=127.0.0.1", script,
        env={
            "UNICRON_ETCD_USER": "node", "UNICRON_ETCD_PASSWORD": PASSWORD, "UNICRON_LATER_SECRET": LATER,
            "UNICRON_SPEC_ENV": "UNICRON_ETCD_PASSWORD", "LOGLEVEL": "DEBUG", "UNICRON_NODE_NAME": "a",
        },
    )  # fmt: skip
    run.until_line(r"^WAITS$", 2)
    secret, stored = _in_etcd(etcd)
    assert b"spec" in stored
    seen = dict(_of_processes(run))
    assert any("unicron-snapshot" in what for what in seen), "no snapshot was looked at"
    assert sum(what.startswith("the environment") for what in seen) >= 3, "no worker, warm process and keeper"
    (launcher.folder / "stop").touch()
    assert run.wait() == 0, run.err

    seen |= {str(path): path.read_bytes() for path in launcher.folder.rglob("*") if path.is_file()}
    assert any(path.endswith("incidents.jsonl") for path in seen), "no incident was recorded"
    assert "this one has" in run.out + run.err + repr(list(seen.values())), "the failure was not told"
    seen["etcd"] = stored
    for known in (PASSWORD, LATER, secret):
        assert [what for what, content in seen.items() if known.encode() in content] == []
    names = re.findall(rb"UNICRON_\w*(?:ETCD|SECRET)\w*", b"".join(seen.values()))
    assert set(names) <= {b"UNICRON_ETCD_PASSWORD"}, "of UNICRON_SPEC_ENV, which names it"
