"""Who was killed for lack of memory, and how much of that is known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from health_lab import DEADLINE_S, Findings, Tree, only

from unicron_elastic.base.fault import Status
from unicron_elastic.base.finding import Level, ProbeNotes
from unicron_elastic.health.host.oom import OomWatch

JOB = "sys/fs/cgroup/slurm/job_1"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(tree: Tree, clock: Clock, findings: Findings | None = None) -> OomWatch:
    notes = None if findings is None else ProbeNotes(findings.say)
    return OomWatch(proc=tree.proc, cgroups=tree.cgroups, clock=clock, notes=notes)


def count(tree: Tree, machine: int, slurm: int, job: int) -> None:
    tree.set({"proc/vmstat": f"oom_kill_foo 9\noom_kill {machine}\n"})
    tree.set({"sys/fs/cgroup/slurm/memory.events": f"oom 9\noom_kill {slurm}\noom_group_kill 9\n"})
    tree.set({f"{JOB}/memory.events": f"oom 9\noom_kill {job}\noom_group_kill 9\n"})


def test_kills_from_before_do_not_count(tree: Tree, clock: Clock, findings: Findings) -> None:
    watch = make(tree, clock, findings)
    assert watch.kills_since_last() is None
    assert watch.kills_since(0.0) is None
    assert watch.check(clock.now) == []
    assert findings.said == []


def test_a_kill_in_the_own_cgroup(tree: Tree, clock: Clock) -> None:
    watch = make(tree, clock)
    count(tree, machine=5, slurm=4, job=2)
    kills = watch.kills_since_last()
    assert kills is not None
    assert (kills.count, kills.in_own_cgroup, kills.subject) == (1, True, "cgroup /slurm/job_1")
    assert kills.reason == "The kernel killed 1 process of cgroup /slurm/job_1 for lack of memory."
    assert watch.kills_since_last() is None


@pytest.mark.parametrize(
    ("machine", "slurm", "reason"),
    [
        (4, 3, "The kernel killed 1 process of cgroup /slurm for lack of memory, but not one of cgroup /slurm/job_1."),
        (5, 2, "killed 2 processes of this machine for lack of memory, none of them one of cgroup /slurm/job_1."),
    ],
)
def test_a_kill_elsewhere_is_not_ours(tree: Tree, clock: Clock, machine: int, slurm: int, reason: str) -> None:
    watch = make(tree, clock)
    count(tree, machine=machine, slurm=slurm, job=1)
    kills = watch.kills_since_last()
    assert kills is not None
    assert kills.in_own_cgroup is False
    assert kills.reason.endswith(reason)


def test_the_machine_alone_cannot_tell_whose_it_was(tree: Tree, clock: Clock, findings: Findings) -> None:
    tree.remove("sys/fs/cgroup")
    watch = make(tree, clock, findings)
    tree.set({"proc/vmstat": "oom_kill 4\n"})
    kills = watch.kills_since_last()
    assert kills is not None
    assert kills.in_own_cgroup is None
    assert kills.reason.endswith("; whether it was one of this job cannot be told from the count.")
    assert findings.said == ["No cgroup of this process counts OOM kills: they are seen for the whole machine only."]


def test_the_nearest_cgroup_that_counts_is_the_own(tree: Tree, clock: Clock) -> None:
    """The controller may not be given down to the leaf: then the processes there are charged to the one above."""
    tree.remove(f"{JOB}/memory.events")
    watch = make(tree, clock)
    tree.set({"sys/fs/cgroup/slurm/memory.events": "oom_kill 3\n"})
    kills = watch.kills_since_last()
    assert kills is not None
    assert (kills.in_own_cgroup, kills.subject) == (True, "cgroup /slurm")


def test_asking_for_a_time_uses_nothing_up_and_leaves_old_kills_out(tree: Tree, clock: Clock) -> None:
    watch = make(tree, clock)
    count(tree, machine=4, slurm=3, job=2)
    assert len(watch.check(clock.now)) == 1
    clock.now = 200.0
    assert watch.kills_since(199.0) is None
    count(tree, machine=6, slurm=5, job=4)
    for _ in range(2):  # two workers died
        kills = watch.kills_since(199.0)
        assert kills is not None
        assert kills.count == 2
    everything = watch.kills_since(0.0)
    assert everything is not None
    assert everything.count == 3


def test_a_kill_is_a_warning_for_a_minute(tree: Tree, clock: Clock) -> None:
    watch = make(tree, clock)
    count(tree, machine=4, slurm=3, job=2)
    found = only(watch.check(clock.now))
    assert (found.probe, found.level, found.status) == ("memory.oom-kill", Level.WARN, Status.OUT_OF_HOST_MEMORY)
    clock.now += 59.0
    assert len(watch.check(clock.now)) == 1
    clock.now += 2.0
    assert watch.check(clock.now) == []


def test_version_1_counts_the_cgroups_below_one_by_one(tree: Tree, clock: Clock) -> None:
    tree.remove("sys/fs/cgroup")
    folder = "sys/fs/cgroup/memory/job"
    tree.set({"proc/self/cgroup": "4:memory:/job\n", f"{folder}/memory.oom_control": "under_oom 0\noom_kill 7\n"})
    tree.set({f"{folder}/a/memory.oom_control": "oom_kill 1\n"})
    watch = make(tree, clock)
    tree.set({f"{folder}/a/memory.oom_control": "oom_kill 2\n", f"{folder}/b/c/memory.oom_control": "oom_kill 1\n"})
    kills = watch.kills_since_last()
    assert kills is not None
    assert (kills.count, kills.in_own_cgroup, kills.subject) == (2, True, "cgroup /job")
    tree.remove(f"{folder}/a")  # its workers are gone, and its count with it
    assert watch.kills_since_last() is None
    tree.set({"proc/vmstat": "oom_kill 99\n"})
    elsewhere = watch.kills_since_last()
    assert elsewhere is not None
    assert elsewhere.in_own_cgroup is False


def test_the_top_of_version_1_does_not_claim_to_know_what_is_below(tree: Tree, clock: Clock) -> None:
    tree.remove("sys/fs/cgroup")
    tree.set({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 0\n"})
    watch = make(tree, clock)
    tree.set({"proc/vmstat": "oom_kill 4\n"})
    kills = watch.kills_since_last()
    assert kills is not None
    assert kills.in_own_cgroup is None


def test_counters_that_vanish_and_come_back_are_no_kills(tree: Tree, clock: Clock) -> None:
    watch = make(tree, clock)
    tree.remove(f"{JOB}/memory.events")
    tree.remove("proc/vmstat")
    assert watch.kills_since_last() is None
    count(tree, machine=3, slurm=2, job=1)
    assert watch.kills_since_last() is None


def test_nothing_to_read_is_said_and_raises_nothing(tmp_path: Path, clock: Clock, findings: Findings) -> None:
    watch = make(Tree(tmp_path / "nothing"), clock, findings)
    assert watch.kills_since_last() is None
    assert findings.said == ["Neither /proc/vmstat nor a cgroup counts OOM kills here: they are not seen."]


def test_this_machine(findings: Findings) -> None:
    watch = OomWatch(notes=ProbeNotes(findings.say))
    assert watch.kills_since(0.0) is None or os.path.exists("/proc/vmstat")
    assert "Neither /proc/vmstat" not in "".join(findings.said)


def _limited_cgroup() -> tuple[Path, str] | None:
    """A new cgroup of 48 MiB with one below it, and the line of that in /proc/self/cgroup; None if not allowed."""
    name = f"unicron-test-{os.getpid()}"
    for base, limit, line in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "4:memory:"),
        (Path("/sys/fs/cgroup"), "memory.max", "0::"),
    ):
        if not any((base / proof).exists() for proof in ("cgroup.procs", "cgroup.controllers")):
            continue  # not a cgroup, but the folder in which version 1 is mounted
        folder = base / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if limit == "memory.max":
                (folder / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
            (folder / "workers").mkdir()
            (folder / limit).write_text(str(48 << 20), encoding="ascii")
        except OSError:
            _remove(folder)
            continue
        return folder, f"{line}/{name}/workers\n"
    return None


def _remove(folder: Path) -> None:
    for each in (folder / "workers", folder):
        if each.exists():
            each.rmdir()


@pytest.fixture
def limited() -> Iterator[tuple[Path, str]]:
    made = _limited_cgroup()
    if made is None:
        pytest.skip("cgroups cannot be made here")
    yield made
    _remove(made[0])


_HUNGRY = """
import sys
with open(sys.argv[1], "w") as file:
    file.write("0")
print("in", flush=True)
sys.stdin.read()
held = bytearray(256 << 20)
"""


def test_a_real_kill_is_seen_as_soon_as_its_victim_is_dead(limited: tuple[Path, str], tree: Tree) -> None:
    folder, line = limited
    tree.set({"proc/self/cgroup": line})
    tree.remove("proc/vmstat")
    os.symlink("/proc/vmstat", tree.root / "proc/vmstat")
    watch = OomWatch(proc=tree.proc)
    victim = subprocess.Popen(
        [sys.executable, "-c", _HUNGRY, str(folder / "workers/cgroup.procs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with victim:
        assert victim.stdout is not None
        if victim.stdout.readline() != b"in\n":
            pytest.skip("processes cannot be moved into cgroups here")
        assert watch.kills_since_last() is None
        victim.communicate(timeout=DEADLINE_S)
    assert victim.returncode == -signal.SIGKILL
    kills = watch.kills_since_last()
    assert kills is not None
    assert (kills.count, kills.in_own_cgroup) == (1, True)
    assert kills.reason == f"The kernel killed 1 process of cgroup /{folder.name}/workers for lack of memory."


def test_a_plain_sigkill_is_no_lack_of_memory() -> None:
    watch = OomWatch()
    with subprocess.Popen(["sleep", "60"]) as victim:
        victim.kill()
    kills = watch.kills_since_last()
    assert kills is None or not kills.in_own_cgroup  # somebody else on this machine may run out of memory
