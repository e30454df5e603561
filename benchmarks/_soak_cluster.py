"""The cluster of a soak: etcd and a coordinator on one simulated host, agents on four others, two jobs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _soak_processes import count_files, look_at

sys.path.append(str(Path(__file__).parents[1] / "tests" / "cluster"))
import hosts

from unicron_elastic.planning.coordinate.node_status import NodeState
from unicron_elastic.rendezvous.plan.mirror import PlanMirror
from unicron_elastic.rendezvous.records.cluster import LEADER, parse_leader
from unicron_elastic.rendezvous.records.plan_keys import PLAN
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.open import open_store
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd
from unicron_elastic.testing.chaos_processes import LiveWorker, find_workers

__all__ = ["COORDINATOR", "HOSTS", "JOBS", "SPARED", "Cluster", "Spec", "kill"]

HOSTS = ("a", "b", "c", "d")
SPARED = "d"  # nothing strikes this host, so that what runs there grows as old as it can
COORDINATOR = "coordinator"
CENTRE = "e"  # the host of etcd and the coordinator
ETCD_PORT = 2379
WRITES_BEFORE = 7_000  # etcd keeps 5,000 in its memory, and up to the 1,000 of --snapshot-count more
FILLER, FILLER_BYTES = "soak/filler", 500  # about what the cluster writes
SCRIPT = Path(__file__).parent / "_soak_job.py"
METRICS = {
    "database": "etcd_mvcc_db_total_size_in_bytes",
    "in_use": "etcd_mvcc_db_total_size_in_use_in_bytes",
    "leases_granted": "etcd_debugging_lease_granted_total",
    "leases_expired": "etcd_server_lease_expired_total",
    "leases_revoked": "etcd_debugging_lease_revoked_total",
    "watchers": "etcd_debugging_mvcc_watcher_total",
    "watch_streams": "etcd_debugging_mvcc_watch_stream_total",
}


@dataclass(frozen=True)
class Spec:
    """A job: weight, bounds, micro-batches of a step."""

    name: str
    weight: float
    nodes: str
    micro_batches: int


JOBS = (Spec("chat", 2.0, "1:2", 8), Spec("code", 1.0, "1:4", 12))


class Cluster:
    """As a context manager it leaves nothing running. This process goes into the network of etcd's host."""

    def __init__(self, folder: Path, device_ms: float) -> None:
        self.folder, self.device_ms = folder, device_ms
        self._stack = ExitStack()
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.others: dict[str, subprocess.Popen[bytes]] = {}  # the coordinator, and the undisturbed runs

    def __enter__(self) -> Cluster:
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _open(self) -> None:
        hosts.remove_leftovers()
        self.network = self._stack.enter_context(hosts.Network(self.folder))
        self.centre, *rest = self.network.add(CENTRE, *HOSTS)
        self.hosts = {host.name: host for host in rest}
        hosts._enter_network(self.centre.namespace)
        self.etcd = self._stack.enter_context(EmbeddedEtcd(host=self.centre.address, port=ETCD_PORT))
        self.store = self._stack.enter_context(open_store(StoreAddress.parse(self.etcd.endpoint)))
        self._fill_etcds_log()
        self.start_coordinator()
        for host in HOSTS:
            self.start_agent(host)

    def _fill_etcds_log(self) -> None:
        """As in a cluster of some hours: etcd keeps its latest writes, and until it has so many its memory grows."""
        for number in range(WRITES_BEFORE):
            self.store.put(FILLER, b"%0*d" % (FILLER_BYTES, number))
        self.store.delete(FILLER)

    # -- what runs -----------------------------------------------------------------------------------------------------

    def environment(self, host: str) -> dict[str, str]:
        """Each host has its own folders for state and for temporary files."""
        own = self.folder / "hosts" / host
        for name in ("state", "tmp"):
            (own / name).mkdir(parents=True, exist_ok=True)
        told = {"UNICRON_ETCD_ENDPOINT": self.etcd.endpoint, "UNICRON_NODE_NAME": host, "OMP_NUM_THREADS": "1"}
        return {**os.environ, **told, "XDG_STATE_HOME": str(own / "state"), "TMPDIR": str(own / "tmp")}

    def start_coordinator(self) -> None:
        """A dedicated one."""
        words = [program("unicron"), "coordinator", "--address", self.centre.address]
        env = self.environment(COORDINATOR)
        self.others[COORDINATOR] = self.centre.start(words, env=env, out=self.folder / "coordinator.log")

    def start_agent(self, host: str) -> None:
        """On a host that has power."""
        words = [program("unicron"), "agent", "--address", self.hosts[host].address]
        out = self.folder / f"{host}.log"
        self.agents[host] = self.hosts[host].start(words, env=self.environment(host), out=out)

    def power_off(self, host: str) -> None:
        """And forget what was in its memory, temporary files included."""
        self.hosts[host].power_off()
        self.agents.pop(host).wait()
        for path in sorted((self.folder / "hosts" / host / "tmp").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def submit(self, spec: Spec) -> None:
        """Submit a job, and begin the undisturbed run of it."""
        log, alone = self.folder / spec.name, self.folder / f"{spec.name}-undisturbed"
        log.mkdir()
        alone.mkdir()
        script = [str(SCRIPT), "--micro-batches", str(spec.micro_batches)]
        options = ["--cluster", self.etcd.endpoint, "--detach", "--rdzv-id", spec.name, "--weight", str(spec.weight)]
        options += ["--max-restarts", "100000", "--nnodes", spec.nodes, "--unicron-isolate-after", "0"]
        options += ["--unicron-hang-patience", "2"]
        words = [program("unicron-run"), *options, *script, "--folder", str(log), "--device-ms", str(self.device_ms)]
        done = self.centre.run(words, 60.0, env=self.environment(COORDINATOR), cwd=self.folder)
        if done.returncode != 0:
            raise RuntimeError(f"{spec.name} cannot be submitted: {done.stderr}")
        follow = [sys.executable, *script, "--folder", str(alone), "--follow", str(log)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{spec.name}-undisturbed.log").open("ab") as out:
            self.others[alone.name] = subprocess.Popen(["nice", "-n", "19", *follow], env=env, stdout=out, stderr=out)
        self._stack.callback(self._end, self.others[alone.name])

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()

    def command(self, *words: str) -> str:
        """What ``unicron WORDS`` prints."""
        done = self.centre.run([program("unicron"), *words], 60.0, env=self.environment(COORDINATOR))
        return done.stdout + done.stderr

    # -- what can be seen ----------------------------------------------------------------------------------------------

    def workers(self, job: str = "") -> list[tuple[str, LiveWorker]]:
        """Host and worker of a job, or of all: as ``unicron chaos list`` finds them, those of this cluster alone."""
        top = str(self.folder / "hosts")
        found = [(each, environment_of(each.pid)) for each in find_workers() if job in ("", each.run_id)]
        return [
            (env["UNICRON_NODE_NAME"], each) for each, env in found if env.get("XDG_STATE_HOME", "").startswith(top)
        ]

    def leader(self) -> str:
        """The host that coordinates, or COORDINATOR, or ""."""
        entry = self.store.read(LEADER).entry
        if entry is None:
            return ""
        record = parse_leader(entry)
        return COORDINATOR if record.is_dedicated else record.host

    def plan(self) -> PlanMirror:
        """Everything that is planned by."""
        return PlanMirror(self.store.read_prefix(PLAN))

    def sample(self) -> dict[str, Any]:
        """What all of it uses at this moment."""
        mirror = self.plan()
        processes = [each for host in HOSTS for each in look_at(host, self.hosts[host].pids())]
        not_ours = {each.pid for name, each in self.others.items() if name != COORDINATOR}
        processes += look_at(CENTRE, hosts.pids_in(self.centre.namespace) - not_ours - {self._first(CENTRE)})
        keys = Counter(_kind(entry.key) for entry in self.store.read_prefix("").entries)
        working = {node.host: node.job for node in mirror.nodes.values() if node.state is NodeState.WORKING}
        return {
            "at": time.time(),
            "processes": [[getattr(each, name) for name in type(each).__slots__] for each in processes],
            "etcd": {**self._etcd_metrics(), "keys": dict(keys)},
            "shared_memory": {host: count_files(Path(f"/proc/{self._first(host)}/root/dev/shm")) for host in HOSTS},
            "temporary": {host: count_files(self.folder / "hosts" / host / "tmp") for host in HOSTS},
            "working": working,
            "phases": {job.spec.name: job.phase.phase.value for job in mirror.jobs().values()},
            "leader": self.leader(),
            "undisturbed_cpu_s": sum(each.cpu_s for each in look_at("", not_ours)),
        }

    def _first(self, name: str) -> int:
        """The process that holds a host's names and mounts, 0 if it has no power."""
        first = self.network.hosts[name]._first
        return 0 if first is None else first.pid

    def _etcd_metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.etcd.endpoint}/metrics", timeout=5.0) as answer:
            text = answer.read().decode()
        found = {name: re.search(rf"^{metric} (\S+)$", text, re.MULTILINE) for name, metric in METRICS.items()}
        return {name: float(match[1]) for name, match in found.items() if match is not None}


def _kind(key: str) -> str:
    """A key without what names one node, round or job."""
    return "/".join(re.sub(r"^.*[0-9].*$", "N", part) for part in key.split("/"))


def program(name: str) -> str:
    """Of the Python that runs this."""
    return str(Path(sys.executable).parent / name)


def environment_of(pid: int) -> dict[str, str]:
    """Of a process; empty if it has ended."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def kill(process: subprocess.Popen[bytes]) -> None:
    """At once."""
    process.send_signal(signal.SIGKILL)
    process.wait()
