"""Evidence on real processes: whatever they do, a report comes, once and in time."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unicron_elastic.detection.sample import GroupPosition
from unicron_elastic.launcher.agent.hangs.evidence import Evidence, EvidenceLimits, Subject, gather
from unicron_elastic.launcher.agent.hangs.stacks import StackReader
from unicron_elastic.recovery.policy import Policy
from unicron_elastic.worker.process.stacks import STACK_SIGNAL

DEADLINE_S = 30.0
REASON = "rank 1 hangs: no step for 3 s."
OFFER = "from unicron_elastic.worker.process.stacks import offer_stacks\nimport os, time\nfd = offer_stacks()\n"
SLEEP = OFFER + "def in_the_script():\n    print(fd, flush=True)\n    time.sleep(600)\nin_the_script()\n"


class Worker:
    """A process that has said the number of the file for its stacks."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        assert self.process.stdout is not None
        self.fd = int(self.process.stdout.readline())
        self.pid = self.process.pid

    def subject(self, rank: int = 0, *, is_silent: bool = False, groups: Sequence[GroupPosition] = ()) -> Subject:
        return Subject(
            rank=rank,
            local_rank=rank,
            pid=self.pid,
            doing="41 steps done",
            is_silent=is_silent,
            groups=tuple(groups),
            stack_fd=self.fd,
        )

    def wait_for_state(self, state: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] != state:
            assert time.monotonic() < end
            time.sleep(0.001)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
        self.process.communicate()


Start = Callable[..., Worker]


@pytest.fixture
def start() -> Iterator[Start]:
    made: list[Worker] = []

    def begin(code: str = SLEEP) -> Worker:
        made.append(Worker(code))
        return made[-1]

    yield begin
    for worker in made:
        worker.end()


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a py-spy of the test's own; without one there is none."""
    folder = tmp_path / "tools"
    folder.mkdir()
    (folder / "sleep").symlink_to(shutil.which("sleep") or "/bin/sleep")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def make_py_spy(tools: Path, script: str) -> None:
    (tools / "py-spy").write_text(f"#!/bin/sh\n{script}\n")
    (tools / "py-spy").chmod(0o755)


def find_on_path() -> str | None:
    return shutil.which("py-spy")  # and not one that is installed beside the interpreter


READER, LIMITS = StackReader(find=find_on_path), EvidenceLimits()


def gathered(*subjects: Subject, limits: EvidenceLimits = LIMITS, reader: StackReader = READER) -> Evidence:
    done: queue.SimpleQueue[Evidence] = queue.SimpleQueue()
    gather(subjects, REASON, done.put, limits=limits, reader=reader)
    found = done.get(timeout=DEADLINE_S)
    assert done.empty()
    return found


def test_the_report_says_what_was_asked_and_what_was_found(start: Start) -> None:
    first, second = start(), start()
    groups = (GroupPosition(name="0", begun=12, ended=11), GroupPosition(name="tp", begun=7, ended=None))
    found = gathered(first.subject(0, groups=groups), second.subject(1, is_silent=True))
    assert found.text.startswith(REASON + "\n")
    assert "load of the host: " in found.text
    assert "MemAvailable" in found.text
    _, about_first, about_second = found.text.split("== rank ")
    assert about_first.startswith(f"0, pid {first.pid}: 41 steps done\n")
    assert "process group 0: 12 collectives begun, 11 ended\n" in about_first
    assert "process group tp: 7 collectives begun\n" in about_first
    assert "1 thread in state S, waiting in " in about_first
    assert "does not answer" not in about_first
    assert "does not answer" in about_second
    for part in (about_first, about_second):
        assert "in in_the_script" in part
    assert [local_rank for local_rank, _ in found.stacks] == [0, 1]
    assert all("in in_the_script" in stack for _, stack in found.stacks)


def test_each_time_only_the_latest_stack_is_read(start: Start) -> None:
    worker = start()
    for _ in range(3):
        ((_, stack),) = gathered(worker.subject()).stacks
        assert stack.count("in in_the_script") == 1


def test_a_stopped_worker_is_left_as_it_is(start: Start) -> None:
    worker = start()
    os.kill(worker.pid, signal.SIGSTOP)
    worker.wait_for_state("T")
    found = gathered(worker.subject())
    assert "in state T" in found.text
    assert "No stack could be read." in found.text
    assert found.stacks == ()
    assert "00000000" in pending(worker.pid)


def pending(pid: int) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("ShdPnd:"))


def test_a_worker_that_has_ended_is_no_obstacle(start: Start) -> None:
    gone, there = start(), start()
    os.kill(gone.pid, signal.SIGKILL)
    gone.process.wait()
    found = gathered(gone.subject(0), there.subject(1))
    assert [local_rank for local_rank, _ in found.stacks] == [1]
    assert "No stack could be read." in found.text


def test_a_worker_that_ends_meanwhile_is_no_obstacle(start: Start) -> None:
    worker = start(OFFER + "import faulthandler\nprint(fd, flush=True)\ntime.sleep(600)")
    subject = worker.subject()
    killer = threading.Timer(0.005, os.kill, (worker.pid, signal.SIGKILL))
    killer.start()
    assert gathered(subject, start().subject(1)).stacks[-1][0] == 1
    killer.join()


@pytest.mark.parametrize(
    "closing",
    [
        "os.close(fd)",
        "os.dup2(os.open('/dev/null', os.O_RDONLY), fd)",
        "os.dup2(os.open(os.environ['PATH'] + '/unicron-stacks', os.O_RDWR | os.O_CREAT), fd)",
        f"import faulthandler; faulthandler.unregister({int(STACK_SIGNAL)})",
        f"import signal; signal.signal({int(STACK_SIGNAL)}, signal.SIG_DFL)",
        f"import signal; signal.signal({int(STACK_SIGNAL)}, signal.SIG_IGN)",
    ],
)
def test_a_script_that_takes_our_file_or_handler_away_is_not_signalled(start: Start, closing: str) -> None:
    worker = start(OFFER + closing + "\nprint(fd, flush=True)\ntime.sleep(600)")
    found = gathered(worker.subject())
    assert "No stack could be read." in found.text
    worker.wait_for_state("S")  # the signal would have been its end
    assert worker.process.poll() is None
    with contextlib.suppress(FileNotFoundError):  # it may have closed it
        assert os.stat(f"/proc/{worker.pid}/fd/{worker.fd}").st_size == 0  # nor anything written into its own file


def test_a_worker_that_became_another_program_is_not_signalled(start: Start) -> None:
    worker = start(OFFER + "print(fd, flush=True)\nos.execvp('sleep', ['sleep', '600'])")
    end = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{worker.pid}/comm").read_text().strip() != "sleep":
        assert time.monotonic() < end
        time.sleep(0.001)
    assert gathered(worker.subject()).stacks == ()
    assert worker.process.poll() is None


def test_a_worker_that_blocks_the_signal_costs_only_time(start: Start) -> None:
    code = f"import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [{int(STACK_SIGNAL)}])\n"
    worker = start(OFFER + code + "print(fd, flush=True)\ntime.sleep(600)")
    assert gathered(worker.subject(), reader=replace(READER, faulthandler_s=0.05)).stacks == ()


def test_a_busy_worker_is_read_completely(start: Start) -> None:
    code = "import threading as t\ndef spin():\n while True: pass\n"
    code += "threads = [t.Thread(target=spin) for _ in range(3)]\nfor each in threads: each.start()\n"
    worker = start(OFFER + code + "def in_the_script():\n print(fd, flush=True)\n spin()\nin_the_script()")
    ((_, stack),) = gathered(worker.subject()).stacks
    assert stack.count("in spin") >= 3
    assert "in in_the_script" in stack
    assert stack.splitlines()[-1].endswith("in <module>")  # the main thread comes last


def test_of_too_much_the_end_is_kept(start: Start) -> None:
    ((_, stack),) = gathered(start().subject(), reader=replace(READER, bytes_max=60)).stacks
    assert len(stack) <= 60
    assert stack.endswith("in <module>")


def test_without_a_file_for_stacks_there_is_none(start: Start) -> None:
    worker = start(OFFER + "print(99, flush=True)\ntime.sleep(600)")
    assert "No stack could be read." in gathered(worker.subject()).text
    worker.fd = None  # type: ignore[assignment]
    assert "No stack could be read." in gathered(worker.subject()).text


def test_py_spy_comes_first(start: Start, tools: Path) -> None:
    make_py_spy(tools, 'echo "$@"')
    worker = start()
    assert gathered(worker.subject()).stacks == ((0, f"dump --nonblocking --pid {worker.pid}"),)


def test_py_spy_reads_stopped_workers(start: Start, tools: Path) -> None:
    make_py_spy(tools, "echo stack")
    worker = start()
    os.kill(worker.pid, signal.SIGSTOP)
    worker.wait_for_state("T")
    assert gathered(worker.subject()).stacks == ((0, "stack"),)


@pytest.mark.parametrize("script", ["echo no; exit 1", "kill -9 $$", "true"])
def test_where_py_spy_fails_faulthandler_serves(start: Start, tools: Path, script: str) -> None:
    make_py_spy(tools, script)
    ((_, stack),) = gathered(start().subject()).stacks
    assert "in in_the_script" in stack


def test_a_py_spy_that_cannot_be_run_is_none(start: Start, tools: Path) -> None:
    (tools / "py-spy").write_text("#!/no/such/interpreter\n")
    (tools / "py-spy").chmod(0o755)
    assert "in in_the_script" in gathered(start().subject()).text


def test_a_py_spy_that_does_not_end_is_ended(start: Start, tools: Path, tmp_path: Path) -> None:
    make_py_spy(tools, f'echo $$ > "{tmp_path}/pid"\nexec sleep 600')
    assert "in in_the_script" in gathered(start().subject(), reader=replace(READER, py_spy_s=0.1)).text
    pid = (tmp_path / "pid").read_text().strip() if (tmp_path / "pid").exists() else ""
    assert not pid or not os.path.exists(f"/proc/{pid}")


def test_what_does_not_come_in_time_is_left_out(start: Start) -> None:
    ever = threading.Event()
    slow, quick = start(), start()

    class Slow(StackReader):
        def python(self, pid: int, stack_fd: int | None) -> str:
            if pid == slow.pid:
                ever.wait(DEADLINE_S)
            return StackReader.python(self, pid, stack_fd)

    found = gathered(
        slow.subject(0), quick.subject(1), limits=EvidenceLimits(stacks_s=1.0), reader=Slow(find=find_on_path)
    )
    ever.set()
    assert [local_rank for local_rank, _ in found.stacks] == [1]


def test_many_workers_are_read_a_few_at_a_time(start: Start) -> None:
    worker = start()
    running: list[int | None] = []
    most: list[int] = []

    class Counted(StackReader):
        def python(self, pid: int, stack_fd: int | None) -> str:  # noqa: ARG002
            running.append(stack_fd)
            most.append(len(running))
            time.sleep(0.002)
            running.remove(stack_fd)
            return f"stack of {stack_fd}"

    subjects = [replace(worker.subject(rank), stack_fd=rank) for rank in range(20)]
    found = gathered(*subjects, limits=EvidenceLimits(at_once=2), reader=Counted())
    assert found.stacks == tuple((rank, f"stack of {rank}") for rank in range(20))
    assert max(most) <= 2


def test_an_error_of_ours_is_a_report_too(start: Start) -> None:
    class Failing(StackReader):
        def python(self, pid: int, stack_fd: int | None) -> str:
            raise RuntimeError(f"of {pid} and {stack_fd}")

    no_group: Any = object()
    found = gathered(start().subject(groups=[no_group]))
    assert found.text.startswith(REASON)
    assert "has no attribute 'ended'" in found.text
    assert "No stack could be read." in gathered(start().subject(), reader=Failing()).text


def test_the_gpus_come_after_the_host(start: Start) -> None:
    done: queue.SimpleQueue[Evidence] = queue.SimpleQueue()
    gather([start().subject()], REASON, done.put, lambda: ["GPU 0", "GPU 1"], reader=READER)
    host, _, worker = done.get(timeout=DEADLINE_S).text.partition("\n\nGPU 0\nGPU 1\n\n== rank 0")
    assert "load of the host" in host
    assert "in in_the_script" in worker


def test_gpus_that_cannot_be_asked_are_no_obstacle(start: Start) -> None:
    ever = threading.Event()
    done: queue.SimpleQueue[Evidence] = queue.SimpleQueue()

    def wait() -> list[str]:
        ever.wait(DEADLINE_S)
        return []

    def fail() -> list[str]:
        raise RuntimeError

    for lines in (wait, fail):
        gather([start().subject()], REASON, done.put, lines, limits=EvidenceLimits(report_s=0.5), reader=READER)
        found = done.get(timeout=DEADLINE_S)
        assert "Nothing could be found out about the GPUs." in found.text
        assert len(found.stacks) == 1
    ever.set()


def test_of_nobody_there_is_a_report() -> None:
    assert gathered().text.startswith(REASON)


def test_it_is_there_before_nobody_waits_for_it_any_more() -> None:
    reader, limits = StackReader(), EvidenceLimits()
    assert reader.py_spy_s + reader.faulthandler_s < limits.stacks_s < limits.native_s < limits.report_s
    assert limits.report_s < Policy(max_restarts=0, stop_timeout_s=30.0).evidence_timeout_s


def test_the_end_of_the_process_does_not_wait_and_leaves_no_py_spy(tools: Path, tmp_path: Path, start: Start) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    make_py_spy(tools, f'echo $$ > "{fifo}"\nexec sleep 600')
    worker = start()
    code = (
        "from unicron_elastic.launcher.agent.hangs import evidence, stacks\n"
        "import sys\nreader = stacks.StackReader(py_spy_s=600.0)\n"
        f"subject = evidence.Subject(rank=0, local_rank=0, pid={worker.pid}, doing='', "
        "is_silent=False, groups=(), stack_fd=None)\n"
        f"evidence.gather([subject], 'why', print, reader=reader)\nsys.stdout.write(open({str(fifo)!r}).read())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    pid = int(ended.stdout)
    end = time.monotonic() + DEADLINE_S
    while is_running(pid):
        assert time.monotonic() < end
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether it has not ended; whoever inherited it may collect it later."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
