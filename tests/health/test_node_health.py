"""The whole node: who is told, from which thread, and that nothing stays behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_nvml
import pytest
from fake_nvml import FakeNvml
from health_lab import DEADLINE_S, Findings, Tree, wait_until

from unicron_elastic.base.fault import Status
from unicron_elastic.base.finding import Finding, Level, ProbeNotes
from unicron_elastic.health.host import disk
from unicron_elastic.health.host.command import CommandProbe
from unicron_elastic.health.lane import Lane
from unicron_elastic.health.watch import Intervals, NodeHealth

FAST = Intervals(host_s=0.01, gpu_s=0.01, folder_s=0.01, command_s=0.01)
MakeHealth = Callable[..., NodeHealth]


def own_threads() -> list[str]:
    """The names of this room's threads; a test of another one may have left its etcd running for the next."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith(("unicron-health", "unicron-nvml"))]


def no_nvml() -> Any:
    raise ImportError("no pynvml here")


@pytest.fixture
def make_health(tree: Tree, findings: Findings) -> Iterator[MakeHealth]:
    made: list[NodeHealth] = []

    def make(on_finding: Callable[[Finding], None] = findings, **options: Any) -> NodeHealth:
        options = {"intervals": FAST, "roots": tree.roots(), "load_nvml": no_nvml, "say": findings.say} | options
        made.append(NodeHealth(on_finding, **options))
        return made[-1]

    yield make
    for health in made:
        assert health.stop(DEADLINE_S)
    assert own_threads() == []


def test_a_finding_its_worsening_and_its_end(tree: Tree, findings: Findings, make_health: MakeHealth) -> None:
    looks = []
    health = make_health(interfaces=["eth0"], workers=lambda: looks.append(1) or {})
    health.start()
    wait_until(lambda: looks != [])  # the link has been seen up
    tree.set({"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 10 kB\n"})
    found = findings.next()
    assert (found.probe, found.level) == ("memory.available", Level.WARN)
    assert health.findings() != []
    tree.interface("eth0", "down")
    assert findings.next().reason == "eth0 has lost its link."
    assert [each.level for each in health.findings()] == [Level.CRITICAL, Level.WARN]
    tree.interface("eth0", "up")
    over = findings.next()
    assert (over.level, over.subject) == (Level.OK, "eth0")
    tree.set({"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n"})
    assert (findings.next().level, health.findings()) == (Level.OK, [])
    assert findings.is_empty()


def test_a_healthy_node_says_once_what_cannot_be_seen(findings: Findings, make_health: MakeHealth) -> None:
    looks = []
    health = make_health(workers=lambda: looks.append(1) or {})
    health.start()
    assert findings.next_said() == "GPUs are not watched: pynvml cannot be imported (no pynvml here)."
    wait_until(lambda: len(looks) > 5)
    assert findings.is_empty()
    assert len(findings.said) == 1


def test_folders_commands_and_workers(tmp_path: Path, findings: Findings, make_health: MakeHealth) -> None:
    (tmp_path / "file").touch()
    health = make_health(
        folders=[str(tmp_path), str(tmp_path), str(tmp_path / "file/x")],
        commands=[CommandProbe("echo broken; exit 2", name="mine"), CommandProbe("exit 0")],
        workers=lambda: {os.getpid(): "rank 0"},
    )
    health.start()
    assert findings.next().reason == "The check mine says broken."
    wait_until(lambda: len(findings.said) == 2)
    assert f"{tmp_path}/file/x cannot be watched: Not a directory." in findings.said


def test_gpus_and_their_events(
    fake: FakeNvml, load_fake: Callable[[str], None], findings: Findings, make_health: MakeHealth
) -> None:
    load_fake("new")
    health = make_health(load_nvml=None)
    health.start()
    assert health.gpus.wait_until_listening(DEADLINE_S)
    for _ in range(3):
        fake.event(0, fake_nvml.XID, 79)
    found = findings.next()
    assert (found.probe, found.level) == ("gpu.xid", Level.CRITICAL)
    fake.set({"gpu0.rows_failed": 1})
    assert findings.next().probe == "gpu.row-remap"
    assert findings.is_empty()
    assert [each.probe for each in health.findings()] == ["gpu.row-remap"]


def test_oom_kills_are_told_and_can_be_asked_for(tree: Tree, findings: Findings, make_health: MakeHealth) -> None:
    health = make_health()
    health.start()
    tree.set({"sys/fs/cgroup/slurm/job_1/memory.events": "oom_kill 2\n"})
    assert findings.next().status is Status.OUT_OF_HOST_MEMORY
    kills = health.oom.kills_since(time.monotonic() - DEADLINE_S)
    assert kills is not None
    assert (kills.count, kills.in_own_cgroup) == (1, True)


def test_a_folder_that_does_not_answer_holds_up_nothing_else(
    tree: Tree, tmp_path: Path, findings: Findings, make_health: MakeHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()
    real = os.statvfs

    def statvfs(folder: str) -> os.statvfs_result:
        asked.set()
        answers.wait(DEADLINE_S)
        return real(folder)

    monkeypatch.setattr(disk.os, "statvfs", statvfs)
    ahead = [0.0]
    health = make_health(folders=[str(tmp_path)], clock=lambda: time.monotonic() + ahead[0])
    health.start()
    tree.set({"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 10 kB\n"})
    assert findings.next().probe == "memory.available"
    assert asked.wait(DEADLINE_S)
    ahead[0] = 31.0
    found = findings.next()
    assert (found.probe, found.level, found.subject) == ("disk.hang", Level.CRITICAL, str(tmp_path))
    assert found.reason.startswith(f"{tmp_path} has not answered for 3")
    answers.set()
    assert findings.next().level is Level.OK


def test_a_listener_that_fails_hears_the_next(tree: Tree, findings: Findings, make_health: MakeHealth) -> None:
    def listen(found: Finding) -> None:
        findings(found)
        raise ValueError("not now")

    health = make_health(listen)
    health.start()
    tree.set({"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 10 kB\n"})
    findings.next()
    tree.set({"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 900000 kB\n"})
    assert findings.next().level is Level.OK
    assert "A finding could not be handed on: ValueError('not now')." in findings.said


def test_a_failing_check_ends_no_other_and_nothing_it_found(findings: Findings, make_health: MakeHealth) -> None:
    def workers() -> dict[int, str]:
        raise RuntimeError("nobody knows")

    health = make_health(workers=workers, commands=[CommandProbe("exit 2", name="mine")])
    health.start()
    assert findings.next().subject == "mine"
    wait_until(lambda: "The check of workers failed: RuntimeError('nobody knows')." in findings.said)


def test_a_listener_may_ask_and_stop(tree: Tree, findings: Findings, make_health: MakeHealth) -> None:
    def listen(found: Finding) -> None:
        assert [each.probe for each in health.findings()] == [found.probe]
        health.stop(0.0)
        findings(found)

    health = make_health(listen)
    tree.set({"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 10 kB\n"})
    health.start()
    assert findings.next().probe == "memory.available"


def test_stopping_kills_a_command_and_can_be_repeated(
    tmp_path: Path, findings: Findings, make_health: MakeHealth
) -> None:
    mark = tmp_path / "mark"
    health = make_health(commands=[CommandProbe(f"touch {mark}; sleep 60; exit 2", timeout_s=60.0)])
    health.start()
    health.start()
    wait_until(mark.exists)
    assert health.stop(DEADLINE_S)
    assert health.stop()
    health.start()
    assert findings.is_empty()


def test_stopping_before_the_start(make_health: MakeHealth) -> None:
    health = make_health()
    assert health.stop(1.0)
    health.start()
    assert own_threads() == []


def test_looking_before_the_interval_is_over(tree: Tree, findings: Findings, make_health: MakeHealth) -> None:
    looks = []
    slow = Intervals(host_s=600.0, gpu_s=600.0)
    health = make_health(workers=lambda: looks.append(1) or {}, intervals=slow)
    health.start()
    wait_until(lambda: len(looks) == 1)
    tree.set({"proc/meminfo": "MemTotal: 1000000 kB\nMemAvailable: 10 kB\n"})
    health.check_soon()
    assert findings.next().probe == "memory.available"


def test_this_machine(findings: Findings, tmp_path: Path) -> None:
    looks: list[int] = []
    health = NodeHealth(
        findings,
        say=findings.say,
        folders=[str(tmp_path)],
        workers=lambda: looks.append(1) or {os.getpid(): "rank 0"},
        intervals=FAST,
    )
    health.start()
    wait_until(lambda: len(looks) > 3)
    assert health.stop(DEADLINE_S)
    assert not [said for said in findings.said if "failed" in said]


def test_a_lane_tells_how_long_it_has_been_at_it() -> None:
    goes_on = threading.Event()
    has_begun = threading.Event()

    def check(_: float) -> list[Finding]:
        has_begun.set()
        goes_on.wait(DEADLINE_S)
        return []

    lane = Lane("test", 600.0, {"it": check}, lambda *_: None, notes=ProbeNotes(), clock=lambda: 10.0)
    assert lane.busy_s(99.0) == 0.0
    lane.start()
    assert has_begun.wait(DEADLINE_S)
    assert lane.busy_s(25.0) == 15.0
    lane.ask_to_stop()
    assert not lane.join(0.0)
    goes_on.set()
    assert lane.join(DEADLINE_S)
    assert lane.busy_s(99.0) == 0.0
