"""Workers that are there and do not run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from health_lab import Tree, only, wait_until

from unicron_elastic.base.fault import Severity, Status
from unicron_elastic.base.finding import Finding, Level
from unicron_elastic.health.host.processes import ProcessProbe


def stat(state: str, started: int = 777) -> str:
    return f"42 (py) T (x) {state} 1 42 42 0 -1 4194304 {' '.join('0' * 12)} {started} 0 0 0\n"


@pytest.fixture
def probe(tree: Tree) -> ProcessProbe:
    return ProcessProbe(lambda: {42: "rank 3"}, stopped_s=10.0, waiting_s=60.0, proc=tree.proc)


def run(
    tree: Tree, probe: ProcessProbe, state: str, at: float, *, switches: int = 5, started: int = 777
) -> list[Finding]:
    tree.set({"proc/42/stat": stat(state, started)})
    tree.set({"proc/42/status": f"Name:\tx\nvoluntary_ctxt_switches:\t{switches}\nnonvoluntary_ctxt_switches:\t9\n"})
    return probe.check(at)


@pytest.mark.parametrize("state", ["R", "S", "I", "X"])
def test_who_runs_or_sleeps_is_well(tree: Tree, probe: ProcessProbe, state: str) -> None:
    assert [run(tree, probe, state, at) for at in (0.0, 1000.0)] == [[], []]


@pytest.mark.parametrize(
    ("state", "expected", "words"),
    [
        ("T", (Level.CRITICAL, Status.TASK_HANG), "has been stopped for 11 s, as by SIGSTOP; SIGCONT lets it go on."),
        ("t", (Level.WARN, Status.TASK_HANG), "has been held by a debugger for 11 s."),
        ("Z", (Level.WARN, Status.EXITED_ABNORMALLY), "has ended, and nobody has collected it for 11 s."),
    ],
)
def test_a_state_that_lasts(
    tree: Tree, probe: ProcessProbe, state: str, expected: tuple[Level, Status], words: str
) -> None:
    assert [run(tree, probe, state, at) for at in (0.0, 9.0)] == [[], []]
    found = only(run(tree, probe, state, 11.0))
    assert (found.level, found.status) == expected
    assert found.severity is Severity.SEV2
    assert (found.subject, found.reason) == ("rank 3 (pid 42)", f"rank 3 (pid 42) {words}")
    assert run(tree, probe, "R", 12.0) == []
    assert run(tree, probe, state, 20.0) == []


def test_a_wait_in_the_kernel_without_end(tree: Tree, probe: ProcessProbe) -> None:
    tree.set({"proc/42/wchan": "nfs4_wait_bit"})
    assert [run(tree, probe, "D", at) for at in (0.0, 59.0)] == [[], []]
    found = only(run(tree, probe, "D", 60.0))
    assert (found.probe, found.level, found.status) == ("process.waiting", Level.WARN, Status.TASK_HANG)
    assert "has waited in the kernel (nfs4_wait_bit) for 60 s without a pause" in found.reason


def test_many_short_waits_are_work(tree: Tree, probe: ProcessProbe) -> None:
    assert [run(tree, probe, "D", at, switches=int(at)) for at in (0.0, 50.0, 100.0)] == [[], [], []]


def test_another_process_with_the_same_pid_starts_anew(tree: Tree, probe: ProcessProbe) -> None:
    assert run(tree, probe, "T", 0.0) == []
    assert run(tree, probe, "T", 11.0, started=888) == []


def test_an_end_that_threads_in_the_kernel_prevent(tree: Tree, probe: ProcessProbe) -> None:
    tree.set({"proc/42/task/42/stat": stat("Z"), "proc/42/task/43/stat": stat("D")})
    run(tree, probe, "Z", 0.0)
    found = only(run(tree, probe, "Z", 10.0))
    assert (found.level, found.status) == (Level.CRITICAL, Status.TASK_HANG)
    assert "has ended, but one of its threads waits in the kernel for 10 s" in found.reason


@pytest.mark.parametrize("text", ["", "42", "42 (x)", "42 (x) T", "42 (x) T 1 2 3"])
def test_files_of_another_shape_raise_nothing(tree: Tree, probe: ProcessProbe, text: str) -> None:
    tree.set({"proc/42/stat": text})
    assert [probe.check(at) for at in (0.0, 100.0)] == [[], []]


def test_nobody_to_watch(tmp_path: Path) -> None:
    assert ProcessProbe(dict, proc=str(tmp_path)).check(1.0) == []
    assert ProcessProbe(lambda: {1: "rank 0"}, proc=str(tmp_path)).check(1.0) == []


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]


def test_real_processes(child: subprocess.Popen[bytes]) -> None:
    probe = ProcessProbe(lambda: {os.getpid(): "rank 0", child.pid: "rank 1"}, stopped_s=1.0)
    assert probe.check(0.0) == []
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: _state(child.pid) == "T")
    assert probe.check(1.0) == []
    assert only(probe.check(2.0)).reason.startswith(f"rank 1 (pid {child.pid}) has been stopped for 1 s")
    child.kill()
    wait_until(lambda: _state(child.pid) == "Z")
    assert probe.check(3.0) == []
    assert only(probe.check(4.0)).probe == "process.dead"
    child.wait()
    assert probe.check(5.0) == []
