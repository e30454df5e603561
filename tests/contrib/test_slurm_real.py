"""The batch scripts under a real Slurm of several nodes, and what becomes of drained, preempted and stopped nodes."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_lab import SlurmLab, find_slurm

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not find_slurm(), reason="needs slurmctld, slurmd and Slurm's commands"),
    pytest.mark.skipif(os.getuid() != 0, reason="needs root, as slurmd does"),
]
SCRIPTS = Path(__file__).parents[2] / "contrib" / "slurm"
DEADLINE_S = 90.0

# A worker that tells its generation and waits for the file "stop"; when it is asked to end it says so.
WORKER = """
import os, signal, sys, time
def asked(number, frame):
    os.write(1, b"ASKED TO END\\n")
    sys.exit(3)
signal.signal(signal.SIGTERM, asked)
environ = os.environ
count, size, rank = environ["TORCHELASTIC_RESTART_COUNT"], environ["WORLD_SIZE"], environ["RANK"]
node = environ["UNICRON_NODE_NAME"]
os.write(1, f"GENERATION {count} of {size} rank {rank} on {node} pid {os.getpid()}\\n".encode())
while not os.path.exists("stop"):
    time.sleep(0.05)
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[SlurmLab]:
    lab = SlurmLab(tmp_path, nodes=3)
    try:
        lab.begin()
        for name in ("unicron.sbatch", "unicron-node.sbatch", "slurm_events.py"):
            shutil.copy(SCRIPTS / name, tmp_path)
        (tmp_path / "worker.py").write_text(WORKER)
        yield lab
    finally:
        lab.end()


def _submit(slurm: SlurmLab, *words: str, **environ: str) -> str:
    given = {
        "PATH": f"{sysconfig.get_path('scripts')}:{slurm.environ['PATH']}",
        "XDG_STATE_HOME": str(slurm.folder / "state-of-user"),
        "UNICRON_WARM": "off",
        "OMP_NUM_THREADS": "1",
        "WORKERS_PER_NODE": "1",
        **environ,
    }
    done = slurm.run("sbatch", "--parsable", "--output=out-%A-%a", "--time=30", *words, "worker.py", env=given)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _told(slurm: SlurmLab) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(slurm.folder.glob("out-*")))


def _until(slurm: SlurmLab, pattern: str, count: int = 1) -> None:
    def is_there() -> bool:
        return len(re.findall(pattern, _told(slurm), re.MULTILINE)) >= count

    try:
        slurm.until(is_there, pattern, DEADLINE_S)
    except AssertionError as error:
        raise AssertionError(f"{_told(slurm)}\n{error}") from None


def _end(slurm: SlurmLab, *jobs: str) -> None:
    (slurm.folder / "stop").touch()
    for job in jobs:
        slurm.until(lambda job=job: slurm.job_state(job) == "COMPLETED", f"end of job {job}", DEADLINE_S)


def test_a_node_that_slurm_drains_leaves_is_given_back_and_the_others_go_on(slurm: SlurmLab) -> None:
    job = _submit(slurm, "--nodes=3", "unicron.sbatch")
    _until(slurm, r"GENERATION 0 of 3 ", 3)
    slurm.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=a loud fan")
    _until(slurm, r"GENERATION 0 of 2 ", 2)
    assert re.search(r"Slurm: a loud fan \[root@", _told(slurm)), _told(slurm)
    slurm.until(lambda: slurm.states()["n2"] == "IDLE+DRAIN", "the node given back")
    assert slurm.job_state(job) == "RUNNING"
    slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    _until(slurm, "node n2 is no longer in quarantine")
    _end(slurm, job)


def test_a_worker_and_a_launcher_are_killed_and_the_job_ends_well(slurm: SlurmLab) -> None:
    job = _submit(slurm, "--nodes=3", "unicron.sbatch", EVENTS="")
    _until(slurm, r"GENERATION 0 of 3 ", 3)
    (pid,) = re.findall(r"GENERATION 0 of 3 rank \d on n1 pid (\d+)", _told(slurm))
    os.kill(int(pid), 9)
    _until(slurm, r"GENERATION 1 of 3 ", 3)
    slurm.run("scancel", "--signal=KILL", f"{job}.2")  # one node, with all its processes
    _until(slurm, r"GENERATION 2 of 2 ", 2)
    _end(slurm, job)


def test_workers_are_asked_to_end_before_the_time_is_over(slurm: SlurmLab) -> None:
    job = _submit(slurm, "--nodes=2", "unicron.sbatch", EVENTS="", REQUEUE_AT_TIME_LIMIT="1")
    _until(slurm, r"GENERATION 0 of 2 ", 2)
    slurm.run("scancel", "--signal=TERM", "--batch", job)  # what --signal=B:TERM@120 comes to
    _until(slurm, r"ASKED TO END", 2)
    slurm.until(lambda: slurm.job_state(job) == "PENDING", "the job in the queue again")
    slurm.run("scancel", job)


def test_of_an_array_one_node_is_preempted_and_comes_back(slurm: SlurmLab) -> None:
    with EmbeddedEtcd() as etcd:
        where = etcd.endpoint.partition("//")[2]
        job = _submit(slurm, "--array=1-3", "unicron-node.sbatch", ETCD=where, MIN_NODES="3")
        _until(slurm, r"GENERATION 0 of 3 ", 3)
        # The job cannot spare it, so it waits for it.
        urgent = slurm.run("sbatch", "--parsable", "--partition=urgent", "--nodes=1", "--exclusive", "--wrap=sleep 1")
        _until(slurm, r"ASKED TO END", 1)
        slurm.until(lambda: slurm.job_state(urgent.stdout.strip()) == "COMPLETED", "the urgent job")
        for number in (1, 2, 3):  # Slurm lets who was queued again wait for two minutes
            if slurm.job_state(f"{job}_{number}") == "PENDING":
                slurm.run("scontrol", "update", f"JobId={job}_{number}", "StartTime=now")
        _until(slurm, r"GENERATION [1-9] of 3 ", 3)
        _end(slurm, *(f"{job}_{number}" for number in (1, 2, 3)))
