"""Native stacks of real processes: whatever becomes of the reader, the process goes on."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unicron_elastic.launcher.agent.hangs import py_spy
from unicron_elastic.launcher.agent.hangs.evidence import Evidence, EvidenceLimits, Subject, gather
from unicron_elastic.launcher.agent.hangs.stacks import StackReader
from unicron_elastic.launcher.agent.process.activity import activity

DEADLINE_S = 30.0
REASON = "rank 0 hangs: no step for 3 s."
# It answers each line with a line, so that a process that runs can be told from one that is held.
PATH = os.environ["PATH"]
ECHO = "import sys\ndef in_the_script():\n    for line in sys.stdin: print(line, end='', flush=True)\nin_the_script()\n"
VFORKS = """
#include <stdio.h>
#include <unistd.h>
int main(void) {
    char byte;
    puts("begins");
    fflush(stdout);
    if (vfork() == 0) { read(0, &byte, 1); _exit(0); }
    puts("goes on");
    fflush(stdout);
    pause();
}
"""

REAL = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))


class Process:
    """A process that is spoken to over its standard streams."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self.pid = self.process.pid

    def answers(self) -> bool:
        assert self.process.stdin is not None
        self.process.stdin.write(b"hello\n")
        return self.line() == "hello"

    def line(self) -> str:
        assert self.process.stdout is not None
        killer = threading.Timer(DEADLINE_S, self.process.kill)  # a process that is stopped for ever says nothing
        killer.start()
        try:
            return self.process.stdout.readline().decode().rstrip()
        finally:
            killer.cancel()

    def states(self) -> str:
        folder = Path(f"/proc/{self.pid}/task")
        return "".join((task / "stat").read_text().rpartition(") ")[2][0] for task in folder.iterdir())

    def wait_for(self, condition: Callable[[str], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition(states := self.states()):
            assert time.monotonic() < end, states
            time.sleep(0.001)

    def subject(self, rank: int = 0, *, hangs: bool = True) -> Subject:
        return Subject(
            rank=rank, local_rank=rank, pid=self.pid, doing="", is_silent=False, groups=(), stack_fd=None, hangs=hangs
        )


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Process] = []

    def begin(*command: str) -> Process:
        process = Process(*(command or (sys.executable, "-S", "-c", ECHO)))
        made.append(process)
        if not command:
            assert process.answers()
        return process

    yield begin
    for each in made:
        if each.process.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
        each.process.communicate()


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a py-spy of the test's own."""
    folder, programs = tmp_path / "tools", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    for name in ("sh", "sleep", "cat", "head", "tr"):  # and not a py-spy that is installed there
        if (found := shutil.which(name)) is not None:
            (programs / name).symlink_to(found)
    monkeypatch.setenv("PATH", f"{folder}:{programs}")
    return folder


def make_py_spy(folder: Path, script: str) -> None:
    (folder / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "py-spy").chmod(0o755)


def find_on_path() -> str | None:
    return shutil.which("py-spy")  # and not one that is installed beside the interpreter


READER, LIMITS = StackReader(find=find_on_path), EvidenceLimits()
native_stack = READER.native


def gathered(*subjects: Subject, limits: EvidenceLimits = LIMITS) -> Evidence:
    done: queue.SimpleQueue[Evidence] = queue.SimpleQueue()
    gather(subjects, REASON, done.put, limits=limits, reader=READER)
    return done.get(timeout=DEADLINE_S)


# Native stacks of py-spy's say "--native" here, Python's do not.
BOTH = 'case "$2" in --native) echo "native of $4";; *) echo "python of $4";; esac'


def test_native_stacks_are_for_those_who_hang_and_come_beside_the_others(start: Start, tools: Path) -> None:
    make_py_spy(tools, BOTH)
    hangs, waits = start(), start()
    found = gathered(hangs.subject(0), waits.subject(1, hangs=False))
    assert found.stacks == ((0, f"python of {hangs.pid}"), (1, f"python of {waits.pid}"))
    _, about_hanging, about_waiting = found.text.split("== rank ")
    assert about_hanging.rstrip().endswith(
        f"python of {hangs.pid}\n\nWith the frames of C and C++:\nnative of {hangs.pid}"
    )
    assert "thread python" in about_hanging
    assert "C++" not in about_waiting
    assert "thread python" not in about_waiting


def test_without_py_spy_nothing_is_said_of_native_stacks(start: Start, tools: Path) -> None:
    assert not list(tools.iterdir())
    assert "C++" not in gathered(start().subject()).text


def test_py_spy_is_also_found_beside_the_interpreter(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_py_spy(tools, BOTH)
    monkeypatch.setenv("PATH", str(tools.parent / "programs"))
    assert py_spy.find_py_spy(beside=str(tools)) == str(tools / "py-spy")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Error: Permission Denied: try again' >&2; exit 1", "exit code 1: Error: Permission Denied: try again."),
        ("echo \"error: unexpected argument '--native'\" >&2; exit 2", "exit code 2: error: unexpected argument"),
        ("kill -9 $$", "exit code -9: it wrote nothing."),
        ("true", "exit code 0: it wrote nothing."),
    ],
)
def test_why_there_is_no_native_stack_is_said(start: Start, tools: Path, script: str, why: str) -> None:
    make_py_spy(tools, f'case "$2" in --native) {script};; *) echo "python of $4";; esac')
    worker = start()
    found = gathered(worker.subject())
    assert found.stacks == ((0, f"python of {worker.pid}"),)
    assert f"No native stack: py-spy failed with {why}" in found.text
    assert worker.answers()


def test_a_py_spy_that_cannot_be_run_is_no_obstacle(start: Start, tools: Path) -> None:
    (tools / "py-spy").write_text("#!/no/such/interpreter\n")
    (tools / "py-spy").chmod(0o755)
    assert "No native stack: py-spy cannot be run: No such file" in gathered(start().subject()).text


def test_the_report_does_not_wait_for_native_stacks_longer_than_it_may(start: Start, tools: Path) -> None:
    make_py_spy(tools, 'case "$2" in --native) exec sleep 600;; *) echo "python of $4";; esac')
    workers = [start() for _ in range(6)]
    began = time.monotonic()
    subjects = [worker.subject(rank) for rank, worker in enumerate(workers)]
    found = gathered(*subjects, limits=EvidenceLimits(native_s=0.6, report_s=0.7))
    assert time.monotonic() - began < DEADLINE_S / 2
    assert len(found.stacks) == 6
    assert found.text.count("No native stack") == 6
    assert "py-spy took longer than 0." in found.text
    assert all(worker.answers() for worker in workers)


def test_a_reader_that_is_ended_while_it_stops_a_process_does_not_leave_it_stopped(start: Start, tools: Path) -> None:
    make_py_spy(tools, 'kill -STOP "$4"\nexec sleep 600')
    worker = start()
    assert "took longer" in py_spy.dump_native(find_on_path(), worker.pid, 0.3).problem
    assert worker.answers()


def test_nor_does_one_that_fails_by_itself(start: Start, tools: Path) -> None:
    make_py_spy(tools, 'kill -STOP "$4"\nexit 101')
    worker = start()
    assert "exit code 101" in py_spy.dump_native(find_on_path(), worker.pid, DEADLINE_S).problem
    assert worker.answers()


@pytest.fixture
def vforks(tmp_path: Path) -> str:
    """A program that sleeps in the kernel, in state D, until it is spoken to."""
    compiler = shutil.which("cc", path=PATH)
    if compiler is None:
        pytest.skip("there is no C compiler")
    (tmp_path / "vforks.c").write_text(VFORKS)
    command = [compiler, "-w", "-o", str(tmp_path / "vforks"), str(tmp_path / "vforks.c")]
    subprocess.run(command, check=True, timeout=60, env={**os.environ, "PATH": PATH})
    return str(tmp_path / "vforks")


def test_a_stop_that_has_not_come_yet_is_taken_back(start: Start, tools: Path, vforks: str) -> None:
    make_py_spy(tools, 'kill -STOP "$4"\nexec sleep 600')
    worker = start(vforks)
    assert worker.line() == "begins"
    worker.wait_for(lambda states: states == "D")
    assert py_spy.dump_native(find_on_path(), worker.pid, 0.3).problem
    assert worker.states() == "D"
    assert worker.process.stdin is not None
    worker.process.stdin.write(b"\n")
    assert worker.line() == "goes on"


def test_a_process_that_cannot_be_held_is_not_attached_to(start: Start, tools: Path, vforks: str) -> None:
    make_py_spy(tools, f'echo "$@" >> "{tools}/asked"')
    worker = start(vforks)
    assert worker.line() == "begins"
    worker.wait_for(lambda states: states == "D")
    assert "cannot be held" in native_stack(worker.pid, time.monotonic() + DEADLINE_S)
    assert not (tools / "asked").exists()


def test_a_stopped_process_stays_stopped(start: Start, tools: Path) -> None:
    make_py_spy(tools, BOTH)
    worker = start()
    os.kill(worker.pid, signal.SIGSTOP)
    worker.wait_for(lambda states: set(states) == {"T"})
    assert "the process is stopped" in gathered(worker.subject()).text
    assert set(worker.states()) == {"T"}


def test_a_process_that_has_ended_has_none(start: Start, tools: Path) -> None:
    make_py_spy(tools, BOTH)
    worker = start()
    worker.process.kill()
    worker.process.wait()
    assert "has ended" in native_stack(worker.pid, time.monotonic() + DEADLINE_S)
    assert "has ended" in py_spy.dump_native(find_on_path(), worker.pid, DEADLINE_S).problem


def test_without_time_none_is_begun(start: Start, tools: Path) -> None:
    make_py_spy(tools, BOTH)
    assert "no time" in native_stack(start().pid, time.monotonic())


def test_endless_names_are_cut(start: Start, tools: Path) -> None:
    make_py_spy(tools, 'head -c 5000 /dev/zero | tr "\\0" x; echo " (lib.so)"; echo last')
    long, last = native_stack(start().pid, time.monotonic() + DEADLINE_S).splitlines()
    assert (len(long), last) == (243, "last")
    assert long.startswith("xxx")
    assert long.endswith("xxx (lib.so)")


@pytest.fixture
def real() -> None:
    command = [REAL or "", "dump", "--native", "--pid", str(os.getpid())]
    if REAL is None or subprocess.run([REAL, "--version"], capture_output=True, check=False).returncode:
        pytest.skip(f"{command[0] or 'py-spy'} is not installed")
    # A process may always be traced by who started it, unless tracing is forbidden altogether.
    probe = subprocess.Popen([sys.executable, "-S", "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    command[-1] = str(probe.pid)
    try:
        if subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False).returncode:
            pytest.skip("py-spy may not look at other processes here")
    finally:
        probe.communicate()


@pytest.mark.usefixtures("real")
def test_a_real_py_spy_shows_frames_of_c(start: Start) -> None:
    worker = start()
    found = native_stack(worker.pid, time.monotonic() + DEADLINE_S)
    assert "in_the_script" in found
    assert "libc" in found
    assert worker.answers()


@pytest.mark.usefixtures("real")
def test_a_process_that_is_held_does_not_look_stopped(start: Start) -> None:
    worker = start()
    seen: set[bool] = set()
    for _ in range(5):
        reading = threading.Thread(target=native_stack, args=(worker.pid, time.monotonic() + DEADLINE_S))
        reading.start()
        while reading.is_alive():
            doing = activity(worker.pid)
            assert doing is not None
            seen.add(doing.stopped)
    assert seen == {False}


@pytest.mark.usefixtures("real")
def test_a_real_py_spy_that_is_killed_while_it_holds_a_process_lets_it_go(start: Start) -> None:
    assert REAL is not None
    code = "import threading as t\nfor _ in range(20): t.Thread(target=t.Event().wait, daemon=True).start()\n" + ECHO
    worker = start(sys.executable, "-S", "-c", code)
    assert worker.answers()
    was_held = 0
    for pause_ms in range(20):
        reader = subprocess.Popen(
            [REAL, "dump", "--native", "--pid", str(worker.pid)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + DEADLINE_S
        while not (is_held := not set("tT").isdisjoint(worker.states())) and reader.poll() is None:
            assert time.monotonic() < end
        was_held += is_held
        time.sleep(pause_ms / 10_000)
        reader.kill()
        reader.wait()
        os.kill(worker.pid, signal.SIGCONT)  # as dump_native does
        assert worker.answers()
    assert was_held
