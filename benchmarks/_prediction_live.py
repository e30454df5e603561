"""A live chaos run: four simulated hosts, two jobs, faults by a seed; what happened is kept in a folder.

Everything is real but the speed of the devices (examples/two_jobs). ``record.json`` has what was done and when; beside
it are the steps that the training processes wrote, and the incident ledgers of both jobs.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "two_jobs"
sys.path.insert(0, str(EXAMPLE))

from run import DEVICE_MS, HOSTS, MICRO_BATCH_FLOPS, MICRO_BATCHES, NODES, WEIGHTS, Cluster  # noqa: E402
from waf import Job  # noqa: E402

from unicron_elastic.base.ledger import FILE_NAME  # noqa: E402
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd  # noqa: E402
from unicron_elastic.testing.chaos_processes import LiveWorker, find_workers  # noqa: E402

KINDS = ("kill", "kill", "kill", "kill", "lose", "lose", "raise", "raise")  # in an order that the seed says
BEGINNING_S = 20.0  # undisturbed
SETTLE_S = (8.0, 11.0)  # undisturbed before each fault
AWAY_S = 10.0  # of a host, until its agent is started again
FRESH_S = 1.5  # a process that wrote a step so shortly ago trains
READY_S = 90.0
SCRIPT = Path(__file__).parent / "_prediction_job.py"


@dataclass(frozen=True)
class Struck:
    """A fault as it was made. Unix seconds; ``gone_s``: until the process had ended; ``back_s``: a lost host's, from
    the start of its agent until it was in the store, None if it was not lost.
    """

    at: float
    kind: str
    job: str
    host: str
    gone_s: float | None = None
    back_s: float | None = None


@dataclass(frozen=True)
class Record:
    """A run: ``began_at`` to ``ended_at`` in Unix seconds; ``seats``: the job of each host when it began."""

    seed: int
    began_at: float
    ended_at: float
    seats: dict[str, str]
    struck: list[Struck] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Record:
        """From a folder in which a run was kept. Raises ``OSError``."""
        data = json.loads((folder / "record.json").read_text())
        return cls(**{**data, "struck": [Struck(**each) for each in data["struck"]]})


def jobs_in(folder: Path) -> list[Job]:
    """The jobs of a kept run."""
    return [Job(name, WEIGHTS[name], MICRO_BATCH_FLOPS * MICRO_BATCHES[name], folder / name) for name in WEIGHTS]


class _Cluster(Cluster):
    """Whose jobs run a script that can be told to raise."""

    def submit(self, name: str, weight: float, nodes: str, micro_batches: int, steps: int) -> Job:
        log = self.folder / name
        log.mkdir()
        script = [str(SCRIPT), "--steps", str(steps), "--micro-batches", str(micro_batches)]
        script += ["--device-ms", str(DEVICE_MS), "--times", str(log)]
        options = ["--cluster", self.endpoint, "--detach", "--rdzv-id", name, "--weight", str(weight)]
        command = [str(Path(sys.executable).parent / "unicron-run"), *options, "--max-restarts", "100"]
        subprocess.run([*command, "--nnodes", nodes, *script], env=self.env, check=True, cwd=self.folder)
        return Job(name, weight, MICRO_BATCH_FLOPS * micro_batches, log)


class _Chaos:
    """One run."""

    def __init__(self, cluster: _Cluster, folder: Path, seed: int) -> None:
        self.cluster, self.folder, self.state = cluster, folder, folder / "state"
        self.chance = random.Random(seed)
        self.struck: list[Struck] = []
        cluster.env["XDG_STATE_HOME"] = str(self.state)
        self.seed = seed

    def run(self) -> Record:
        for host in HOSTS:
            self.cluster.start(host)
        for name in WEIGHTS:
            self.cluster.submit(name, WEIGHTS[name], NODES[name], MICRO_BATCHES[name], 10**6)
        self.wait_until_all_train()
        time.sleep(3.0)
        seats = {host: job for job, hosts in self.cluster.working().items() for host in hosts}
        began_at = time.time()
        time.sleep(BEGINNING_S)
        kinds = list(KINDS)
        self.chance.shuffle(kinds)
        for kind in kinds:
            self.strike(kind)
            self.wait_until_all_train()
            time.sleep(self.chance.uniform(*SETTLE_S))
        return Record(self.seed, began_at, time.time(), seats, self.struck)

    def strike(self, kind: str) -> None:
        job = self.chance.choice(list(WEIGHTS))
        worker = self.chance.choice(self.workers(job))
        host = _environment(worker.pid)["UNICRON_NODE_NAME"]
        print(f"{kind} {job} on {host}", file=sys.stderr, flush=True)
        at = time.time()
        if kind == "lose":
            self.cluster.lose(host)
            time.sleep(AWAY_S)
            started_at = time.time()
            self.cluster.start(host)
            self.wait(lambda: any(each.host == host for each in self.cluster.seen().nodes.values()), f"{host} is back")
            self.struck.append(Struck(at, kind, job, host, back_s=time.time() - started_at))
            return
        os.kill(worker.pid, signal.SIGKILL if kind == "kill" else signal.SIGUSR1)
        self.wait(lambda: not Path(f"/proc/{worker.pid}").exists(), f"process {worker.pid} ends", 0.02)
        self.struck.append(Struck(at, kind, job, host, gone_s=time.time() - at))

    def workers(self, job: str) -> list[LiveWorker]:
        """Of this run's job, by rank."""
        found = [worker for worker in find_workers() if worker.run_id == job]
        return [each for each in found if _environment(each.pid).get("XDG_STATE_HOME") == str(self.state)]

    def wait_until_all_train(self) -> None:
        """Until as many processes as there are hosts make steps."""
        self.wait(lambda: self.training() == len(HOSTS), "all hosts train")

    def training(self) -> int:
        now = time.time()
        files = [path for name in WEIGHTS for path in (self.folder / name).glob("*.steps")]
        return sum(now - path.stat().st_mtime < FRESH_S for path in files if path.stat().st_size)

    def wait(self, condition: Callable[[], bool], what: str, every_s: float = 0.1) -> None:
        end = time.time() + READY_S
        while not condition():
            if time.time() > end:
                raise TimeoutError(f"{what}: not within {READY_S:.0f} s; see {self.folder}")
            time.sleep(every_s)


def _environment(pid: int) -> dict[str, str]:
    """Of a process; empty if it has ended."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def live(folder: Path, seed: int) -> None:
    """A run of about three minutes, kept in ``folder``. Raises ``TimeoutError`` if a job does not recover."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        etcd = stack.enter_context(EmbeddedEtcd())
        cluster = _Cluster(etcd.endpoint, folder)
        stack.callback(cluster.close)
        record = _Chaos(cluster, folder, seed).run()
        for path in sorted((folder / "state" / "unicron").rglob(FILE_NAME)):
            target = folder / "ledgers" / path.parent.name
            target.mkdir(parents=True)
            shutil.copy(path, target)  # before the end of the run is in it
    (folder / "record.json").write_text(json.dumps(asdict(record), indent=1) + "\n")
