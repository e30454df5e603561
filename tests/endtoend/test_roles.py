"""The roles that docs/security.md has for etcd, made as it says in a real one: who may do what with a cluster."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicron_elastic.rendezvous.records.cluster import LEADER, SECRET, RosterRecord, roster_key, roster_text
from unicron_elastic.rendezvous.records.plan_keys import CURRENT, order_key, status_key
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import StoreDeniedError
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

BIN = Path(sys.executable).parent
PAGE = Path(__file__).parent.parent.parent / "docs" / "security.md"
DEADLINE_S = 60.0
ROLES_OF = {"node": ("node",), "look": ("look",), "submit": ("look", "submit"), "operate": ("look", "operate")}


def _run(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], env={**os.environ, **(env or {})}, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    """With the page's roles, a user for each, and their names as passwords."""
    with EmbeddedEtcd() as server:
        lines = re.findall(r"^etcdctl (role .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(lines) > 10
        lines += ["user add root:root", "user grant-role root root"]
        for user, roles in ROLES_OF.items():
            lines += [f"user add {user}:{user}", *(f"user grant-role {user} {role}" for role in roles)]
        for line in (*lines, "auth enable"):
            done = _run(BIN / "etcdctl", "--endpoints", server.endpoint, *line.split(), env={"ETCDCTL_API": "3"})
            assert done.returncode == 0, (line, done.stderr)
        yield server


class Cluster:
    """One agent, and people with different roles."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.endpoint, self.folder = endpoint, folder
        (folder / "job.py").write_text("print('the job has run', flush=True)\n")

    def environment(self, user: str) -> dict[str, str]:
        return {
            "UNICRON_ETCD_ENDPOINT": self.endpoint, "UNICRON_ETCD_USER": user, "UNICRON_ETCD_PASSWORD": user,
            "XDG_STATE_HOME": str(self.folder / "state"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def store(self, user: str) -> EtcdStore:
        return EtcdStore(StoreAddress.parse(self.endpoint, user=user, password=user))

    def ask(self, user: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """``unicron`` as this user."""
        return _run(BIN / "unicron", *arguments, env=self.environment(user))

    def submit(self, user: str, name: str, *more: str) -> subprocess.CompletedProcess[str]:
        own = ("--nproc-per-node=1", f"--rdzv-id={name}", "--unicron-preload=json", *more)
        script = self.folder / "job.py"
        return _run(
            BIN / "unicron-run", f"--cluster={self.endpoint}", "--nnodes=1", *own, script, env=self.environment(user)
        )

    def until(self, condition: object, what: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < end, what
            time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(etcd.endpoint, tmp_path_factory.mktemp("roles"))
    log = (made.folder / "agent.log").open("wb")
    command = [BIN / "unicron", "agent", "--address", "127.0.0.1"]
    environ = {**os.environ, **made.environment("node"), "UNICRON_NODE_NAME": "h1"}
    with log, subprocess.Popen(command, env=environ, cwd=made.folder, stdout=log, stderr=log) as agent:
        try:
            with made.store("node") as store:
                made.until(lambda: store.read(LEADER).entry, "nobody coordinates")
            yield made
        finally:
            agent.terminate()
            agent.wait(DEADLINE_S)


pytestmark = pytest.mark.slow


def _is_denied(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode != 0 and "does not allow this user" in done.stderr + done.stdout


@pytest.mark.parametrize("user", ["look", "submit", "operate"])
def test_all_may_look(cluster: Cluster, user: str) -> None:
    for what in ("nodes", "jobs", "plan", "status"):
        done = cluster.ask(user, what)
        assert done.returncode in (0, 1), done.stderr  # 1: of status, which judges
        assert "allow" not in done.stderr + done.stdout, done.stderr
    assert "h1" in cluster.ask(user, "nodes").stdout


def test_who_submits_has_a_job_run_and_gets_its_output(cluster: Cluster) -> None:
    done = cluster.submit("submit", "one")
    assert (done.returncode, done.stdout) == (0, "the job has run\n"), done.stderr
    assert _is_denied(cluster.ask("submit", "drain", "h1", "--reason", "no"))


def test_who_operates_keeps_nodes_out_lets_them_in_and_ends_jobs(cluster: Cluster) -> None:
    assert cluster.ask("operate", "drain", "h1", "--reason", "a new disk").returncode == 0
    try:
        assert cluster.submit("submit", "two", "--detach").returncode == 0
        assert cluster.ask("operate", "jobs", "set", "two", "--weight", "2").returncode == 0
        assert cluster.ask("operate", "cancel", "two").returncode == 0
        assert cluster.submit("submit", "three", "--detach").returncode == 0
        assert cluster.ask("submit", "cancel", "three").returncode == 0
    finally:
        done = cluster.ask("operate", "undrain", "h1")
    assert done.returncode == 0, done.stderr


def test_who_operates_forgets_a_lost_node(cluster: Cluster) -> None:
    with cluster.store("node") as store:
        store.put(roster_key("h2"), roster_text(RosterRecord(host="h2", node_id="h2/1")))
    for user in ("look", "submit"):
        assert _is_denied(cluster.ask(user, "nodes", "forget", "h2"))
    assert cluster.ask("operate", "nodes", "forget", "h2").stdout == "node h2 is forgotten.\n"


def test_who_looks_changes_nothing_and_does_not_know_the_secret(cluster: Cluster) -> None:
    assert _is_denied(cluster.submit("look", "four", "--detach"))
    assert _is_denied(cluster.ask("look", "drain", "h1", "--reason", "no"))
    with cluster.store("look") as store, pytest.raises(StoreDeniedError):
        store.read(SECRET)


@pytest.mark.parametrize("user", ["look", "submit", "operate"])
def test_nobody_but_a_node_speaks_as_one_leads_or_plans(cluster: Cluster, user: str) -> None:
    for key in (LEADER, SECRET, CURRENT, order_key("h1/agent"), status_key("h1/agent"), "nodes/h1"):
        with cluster.store(user) as store, pytest.raises(StoreDeniedError):
            store.put(key, b"{}")


def test_a_node_may_use_our_keys_and_no_others(cluster: Cluster) -> None:
    with contextlib.closing(cluster.store("node")) as store:
        assert store.read(SECRET).entry is not None
    other = EtcdStore(StoreAddress.parse(cluster.endpoint, user="node", password="node"), "/other")
    with other, pytest.raises(StoreDeniedError):
        other.read("a")
