"""What /proc says of real processes that run, wait, are stopped or have ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from unicron_elastic.launcher.agent.process import activity as module
from unicron_elastic.launcher.agent.process.activity import Activity, activity, cpu_time_s, is_ending, threads
from unicron_elastic.worker.answer_questions import THREAD_NAME

DEADLINE_S = 30.0
SLEEP = "import time; print(flush=True); time.sleep(600)"
SPIN_IN_A_THREAD = "import threading as t\ndef spin():\n while True: pass\nt.Thread(target=spin).start()\n"
SPIN = "print(flush=True)\nwhile True: pass"

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python that has said something."""
    made: list[subprocess.Popen[bytes]] = []

    def begin(code: str, *options: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, *(options or ("-S", "-c")), code],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        made.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield begin
    for process in made:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def until(pid: int, condition: Callable[[Activity], bool]) -> Activity:
    """The first activity for which it holds: a process may yet be on its way to where it waits."""
    end = time.monotonic() + DEADLINE_S
    while True:
        found = activity(pid)
        assert found is not None
        if condition(found):
            return found
        assert time.monotonic() < end, found
        time.sleep(0.001)


def test_who_sleeps_does_nothing(start: Start) -> None:
    found = until(start(SLEEP).pid, lambda doing: not doing.runnable)
    assert found == Activity(stopped=False, runnable=False, in_io=False)


def test_who_computes_is_runnable(start: Start) -> None:
    assert until(start(SPIN).pid, lambda doing: doing.runnable) == Activity(stopped=False, runnable=True, in_io=False)


def test_any_thread_counts(start: Start) -> None:
    assert until(start(SPIN_IN_A_THREAD + SLEEP).pid, lambda doing: doing.runnable).runnable


def test_who_has_exited_and_was_not_collected_is_ending(start: Start) -> None:
    process = start(SLEEP)
    assert not is_ending(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_ending(process.pid)
    process.wait()
    assert is_ending(process.pid)


def test_the_thread_that_answers_us_does_not(start: Start) -> None:
    # It asks for the interpreter's lock all the time while another thread does not give it back.
    code = (
        "from unicron_elastic.worker.answer_questions import answer_questions\n"
        "class Asked:\n def wait(self, kinds):\n  print(flush=True)\n  while True: pass\n"
        "answer_questions(Asked())\nimport time; time.sleep(600)"
    )
    process = start(code, "-c")
    found = until(process.pid, lambda doing: doing.answering and not doing.runnable)
    assert found == Activity(stopped=False, runnable=False, in_io=False, answering=True)
    assert len(threads(process.pid)) == len(list(module._states(module._stats(process.pid)))) + 1
    process.send_signal(signal.SIGSTOP)
    assert until(process.pid, lambda doing: doing.stopped).stopped


@pytest.mark.parametrize("name", ["python", THREAD_NAME])
@pytest.mark.parametrize(("again", "runs"), [("S", False), ("R", True)])
def test_a_thread_that_sleeps_again_at_once_has_only_looked(
    start: Start, monkeypatch: pytest.MonkeyPatch, again: str, runs: bool, name: str
) -> None:
    """Gloo's wakes a hundred times a second, and ours as often where it waits for the interpreter."""
    process = start(SLEEP)
    until(process.pid, lambda doing: not doing.runnable)
    stat, looks = module._stat(str(process.pid)), iter(["R", again])
    assert stat is not None
    monkeypatch.setattr(module, "_stat", lambda _of: stat._replace(name=name, state=next(looks)))
    found = activity(process.pid)
    answers = name == THREAD_NAME
    assert found == Activity(stopped=False, runnable=runs and not answers, in_io=False, answering=runs and answers)


def test_neither_does_the_thread_with_which_gloo_waits_for_messages(start: Start) -> None:
    # It looks a hundred times a second, and its timer ends together with that of who looks at it.
    code = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "print(flush=True)\nimport time; time.sleep(600)"
    )
    process = start(code, "-c")
    stats = [module._stat(f"{process.pid}/task/{thread}") for thread in threads(process.pid)]
    names = [stat.name for stat in stats if stat is not None]
    if "gloo_tcp_loop" not in names:
        pytest.skip(f"this torch does not name that thread: {names}")
    assert len(list(module._states(module._stats(process.pid)))) == len(names) - names.count("gloo_tcp_loop")


def test_a_stopped_worker_is_stopped_although_its_children_run(start: Start) -> None:
    process = start(f"import os\nif os.fork() == 0:\n while True: pass\n{SLEEP}")
    process.send_signal(signal.SIGSTOP)
    found = until(process.pid, lambda doing: doing.stopped)
    assert found.runnable
    process.send_signal(signal.SIGCONT)
    assert not until(process.pid, lambda doing: not doing.stopped).stopped


def test_a_worker_whose_child_is_stopped_is_not(start: Start) -> None:
    process = start(f"import os, signal\nif os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)\n{SLEEP}")
    (child,) = children(process.pid)
    assert until(child, lambda doing: doing.stopped).stopped
    assert not until(process.pid, lambda doing: not doing.runnable).stopped


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_the_children_of_children_count(start: Start) -> None:
    process = start(f"import os\nif os.fork() == 0 and os.fork() == 0:\n while True: pass\n{SLEEP}")
    assert until(process.pid, lambda doing: doing.runnable).runnable


def test_of_very_many_descendants_some_are_looked_at(start: Start) -> None:
    process = start(f"import os, time\nfor _ in range(12):\n if os.fork() == 0: time.sleep(600)\n{SLEEP}")
    assert len(list(module._descendants(process.pid, most=3))) == 3


def test_who_is_gone_does_nothing(start: Start) -> None:
    process = start(SLEEP)
    process.kill()
    process.wait()
    assert activity(process.pid) is None
    assert cpu_time_s(process.pid) is None
    assert threads(process.pid) == []


def test_one_that_has_ended_and_is_not_collected_is_neither_stopped_nor_at_work(start: Start) -> None:
    process = start("print(flush=True)")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert activity(process.pid) == Activity(stopped=False, runnable=False, in_io=False)


def test_a_name_that_looks_like_a_state_is_none(start: Start) -> None:
    process = start("open('/proc/self/comm', 'w').write('x) R 1 (')\n" + SLEEP)
    assert not until(process.pid, lambda doing: not doing.runnable).runnable


def test_the_processor_time_is_that_of_all_threads(start: Start) -> None:
    idle, busy = start(SLEEP), start(SPIN_IN_A_THREAD + SLEEP)
    before = cpu_time_s(busy.pid)
    assert before is not None
    end = time.monotonic() + DEADLINE_S
    while (cpu_time_s(busy.pid) or 0.0) < before + 0.05:
        assert time.monotonic() < end
        time.sleep(0.005)
    spent = cpu_time_s(idle.pid)
    assert spent is not None
    assert cpu_time_s(idle.pid) == pytest.approx(spent, abs=0.01)
    assert abs((cpu_time_s(os.getpid()) or 0.0) - time.process_time()) < 0.5
