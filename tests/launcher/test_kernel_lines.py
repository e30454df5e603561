"""The kernel's word on threads, of real processes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from unicron_elastic.launcher.agent.process import kernel_lines as kernel_threads_kernel_lines
from unicron_elastic.launcher.agent.process.kernel_lines import is_in_io, kernel_lines, summary_lines

DEADLINE_S = 30.0
THREADS = "import threading as t\nfor _ in range(3): t.Thread(target=t.Event().wait, daemon=True).start()\n"
READ = "import os, sys\nprint(flush=True)\nos.read(0, 1)"
is_known_machine = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64"), reason="the names of this machine's system calls are not known"
)


@pytest.fixture
def start() -> Iterator[Callable[[str], int]]:
    made: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> int:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        made.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield begin
    for process in made:
        process.kill()
        process.communicate()


def until(find: Callable[[], list[str]], condition: Callable[[list[str]], bool]) -> list[str]:
    """The first lines for which it holds: a process may yet be on its way to where it waits."""
    end = time.monotonic() + DEADLINE_S
    while not condition(lines := find()):
        assert time.monotonic() < end, lines
        time.sleep(0.001)
    return lines


def can_read(path: str) -> bool:
    try:
        with open(path) as file:
            return bool(file.read())
    except OSError:
        return False


def test_threads_are_counted_by_where_they_wait(start: Callable[[str], int]) -> None:
    pid = start(THREADS + READ)
    # One that is about to sleep has the state of who sleeps, and waits nowhere yet.
    lines = until(
        lambda: sorted(summary_lines(pid)),
        lambda lines: len(lines) == 2 and all("state S, waiting in " in line for line in lines),
    )
    assert lines[0].startswith("1 thread in state S, waiting in ")
    assert lines[1].startswith("3 threads in state S, waiting in ")


@is_known_machine
def test_a_system_call_is_told_with_its_file(start: Callable[[str], int]) -> None:
    pid = start(THREADS + READ)
    if not can_read(f"/proc/{pid}/syscall"):
        pytest.skip("this kernel does not tell system calls")
    lines = until(
        lambda: kernel_lines(pid), lambda lines: "system call read " in lines[0] and "(3 threads)" in lines[1]
    )
    assert lines[0].startswith("thread python")
    assert "system call read of pipe:[" in lines[0]
    assert "system call futex" in lines[1]


def test_the_kernels_own_stack_is_told_to_whom_may_read_it(start: Callable[[str], int]) -> None:
    pid = start(READ)
    until(lambda: summary_lines(pid), lambda lines: "pipe_read" in "".join(lines))
    stacks = [line for line in kernel_lines(pid) if "in the kernel, latest first: " in line]
    assert len(stacks) == can_read(f"/proc/{pid}/task/{pid}/stack")
    assert all("+0x" not in line and "pipe_read" in line for line in stacks)


def test_of_too_many_kinds_some_are_told(start: Callable[[str], int]) -> None:
    assert kernel_lines(start(READ), lines_max=0)[0] == "1 more kinds of threads"


def test_nobody_is_no_obstacle() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert (summary_lines(gone.pid), kernel_lines(gone.pid), is_in_io(gone.pid)) == ([], [], False)
    assert not is_in_io(os.getpid())


@pytest.mark.parametrize(
    ("text", "name"),
    [("", ""), ("running\n", ""), ("-1 0x7ffc 0x7f\n", ""), ("99999 0x1 0x2\n", "99999"), ("1\n", ""), ("x y\n", "")],
)
def test_what_the_kernel_may_say_instead(text: str, name: str) -> None:
    assert kernel_threads_kernel_lines._call(os.getpid(), text) == name


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86-64")
@pytest.mark.parametrize("descriptor", ["0xffffff", "?"])
def test_a_file_that_is_not_there_is_left_out(descriptor: str) -> None:
    assert kernel_threads_kernel_lines._call(os.getpid(), f"16 {descriptor} 0x2") == "ioctl"


def test_of_other_machines_there_are_numbers() -> None:
    assert kernel_threads_kernel_lines._names("riscv64") == {}
    assert kernel_threads_kernel_lines._names("aarch64")[29] == "ioctl"
    assert kernel_threads_kernel_lines._names("x86_64")[16] == "ioctl"
