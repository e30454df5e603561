"""How much memory is left: of the machine, and of cgroups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from health_lab import Findings, Tree, only

from unicron_elastic.base.fault import Severity, Status
from unicron_elastic.base.finding import Level, ProbeNotes
from unicron_elastic.health.host.memory import MemoryProbe
from unicron_elastic.health.host.memory_cgroup import find_memory_cgroup

JOB = "sys/fs/cgroup/slurm/job_1"


def make(tree: Tree, findings: Findings | None = None) -> MemoryProbe:
    notes = None if findings is None else ProbeNotes(findings.say)
    return MemoryProbe(proc=tree.proc, cgroups=tree.cgroups, notes=notes)


def test_enough_memory_is_nothing_to_tell(tree: Tree, findings: Findings) -> None:
    assert make(tree, findings).check(1.0) == []
    assert findings.said == []


def test_little_left_on_the_machine(tree: Tree) -> None:
    tree.set({"proc/meminfo": "MemTotal:       67108864 kB\nMemAvailable:    1048576 kB\n"})
    found = only(make(tree).check(7.0))
    assert (found.probe, found.level, found.status) == ("memory.available", Level.WARN, Status.OUT_OF_HOST_MEMORY)
    assert (found.severity, found.at) == (Severity.SEV2, 7.0)
    assert found.reason == "Only 1.0 GiB of this machine's 64.0 GiB of memory are left."


def test_a_cgroup_near_its_limit(tree: Tree) -> None:
    probe = make(tree)
    tree.set({f"{JOB}/memory.current": f"{int(9.8 * (1 << 30))}\n"})
    found = only(probe.check(1.0))
    assert (found.probe, found.subject) == ("memory.limit", "cgroup /slurm/job_1")
    assert found.reason == "9.8 GiB of the 10.0 GiB of memory that cgroup /slurm/job_1 may have are used."


def test_cached_files_do_not_count_as_used(tree: Tree) -> None:
    tree.set({f"{JOB}/memory.current": f"{10 << 30}\n"})
    tree.set({f"{JOB}/memory.stat": f"inactive_file {1 << 30}\nactive_file {1 << 30}\nanon {8 << 30}\n"})
    assert make(tree).check(1.0) == []


def test_the_limit_of_a_cgroup_above_counts_too(tree: Tree) -> None:
    tree.set({"sys/fs/cgroup/slurm/memory.max": f"{20 << 30}\n"})
    assert only(make(tree).check(1.0)).subject == "cgroup /slurm"


@pytest.mark.parametrize(
    ("path", "subject"), [("proc/pressure/memory", "this machine"), (f"{JOB}/memory.pressure", "cgroup /slurm/job_1")]
)
def test_everything_waits_for_memory(tree: Tree, path: str, subject: str) -> None:
    tree.set({path: "some avg10=90.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=12.34 avg60=1.0 avg300=0.0 total=1\n"})
    found = only(make(tree).check(1.0))
    assert (found.probe, found.level, found.subject) == ("memory.pressure", Level.WARN, subject)
    assert found.reason == f"For 12% of the last ten seconds everything in {subject} waited for memory."


def test_version_1(tree: Tree) -> None:
    tree.remove("sys/fs/cgroup")
    folder = "sys/fs/cgroup/memory/docker/abc"
    tree.set({"proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n"})
    tree.set({f"{folder}/memory.limit_in_bytes": f"{1 << 30}\n", f"{folder}/memory.usage_in_bytes": f"{1 << 30}\n"})
    tree.set({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    tree.set({"sys/fs/cgroup/memory/memory.usage_in_bytes": "5000000000\n"})
    assert only(make(tree).check(1.0)).subject == "cgroup /docker/abc"
    tree.set({f"{folder}/memory.stat": f"cache 1\ntotal_inactive_file {1 << 29}\n"})
    assert make(tree).check(1.0) == []


def test_a_container_sees_its_own_cgroup_as_the_top(tree: Tree) -> None:
    """Without a cgroup namespace the path is the host's, and does not exist below the mount."""
    tree.set({"proc/self/cgroup": "0::/system.slice/docker-abc.scope\n", "sys/fs/cgroup/memory.max": f"{1 << 30}\n"})
    tree.set({"sys/fs/cgroup/memory.current": f"{1 << 30}\n"})
    assert only(make(tree).check(1.0)).subject == "cgroup /"


@pytest.mark.parametrize("text", ["0::/../other\n", "", "nonsense\n"])
def test_a_cgroup_that_cannot_be_seen_is_said_once(tree: Tree, findings: Findings, text: str) -> None:
    tree.set({"proc/self/cgroup": text})
    probe = make(tree, findings)
    assert [probe.check(at) for at in (1.0, 2.0)] == [[], []]
    assert findings.said == ["No memory cgroup can be seen: only the machine's memory is watched."]


def test_nothing_to_read_is_said_and_raises_nothing(tmp_path: Path, findings: Findings) -> None:
    probe = make(Tree(tmp_path / "nothing"), findings)
    assert [probe.check(at) for at in (1.0, 2.0)] == [[], []]
    assert len(findings.said) == 3


@pytest.mark.parametrize("text", ["", "full avg10=\n", "full avg10=x\n", "MemTotal\nMemAvailable:\n", "\x00\x01 \n"])
def test_files_of_another_shape_raise_nothing(tree: Tree, findings: Findings, text: str) -> None:
    tree.set(dict.fromkeys(("proc/meminfo", "proc/pressure/memory", f"{JOB}/memory.max", f"{JOB}/memory.stat"), text))
    assert make(tree, findings).check(1.0) == []


def test_this_machine() -> None:
    assert [found for found in MemoryProbe().check(1.0) if found.level > Level.WARN] == []
    with_nothing_left = MemoryProbe(least_available=1.0)
    assert "memory.available" in [found.probe for found in with_nothing_left.check(1.0)]


def test_the_cgroup_of_this_process_is_found() -> None:
    cgroup = find_memory_cgroup()
    if cgroup is None:
        pytest.skip("no memory cgroup can be seen here")
    assert cgroup.folders[-1] == cgroup.root
    assert all(Path(folder).is_dir() for folder in cgroup.folders)
