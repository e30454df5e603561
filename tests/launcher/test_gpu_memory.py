"""The wait for GPU memory between two generations of workers."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicron_elastic.health.gpu.session import Gpu
from unicron_elastic.health.gpu.state import MemoryHolder
from unicron_elastic.launcher.agent.process import gpu_memory
from unicron_elastic.launcher.agent.process.gpu_memory import Leftover, MemoryWait, describe, leftovers
from unicron_elastic.launcher.common.loop import Loop

DEADLINE_S = 30.0
GPU = Gpu(index=0, uuid="", pci="", model="", label="GPU 0", handle=None)


def holder(pid: int, used_bytes: int | None = 61 << 30) -> MemoryHolder:
    return MemoryHolder(gpu=GPU, pid=pid, used_bytes=used_bytes)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture(params=[True, False], ids=["host", "container"])
def is_host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether this is the first pid namespace, where all processes can be seen."""
    here = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(gpu_memory, "FIRST_NAMESPACE", here if request.param else here + 1)
    return bool(request.param)


def ended(loop: Loop, done: list[str]) -> str:
    assert loop.run_until(lambda: bool(done), time.monotonic() + DEADLINE_S)
    return done[0]


def test_what_is_free_is_free_at_once(loop: Loop) -> None:
    done: list[str] = []
    MemoryWait(loop, list, done.append, DEADLINE_S)
    assert ended(loop, done) == ""


def test_it_looks_until_all_is_free(loop: Loop) -> None:
    left = [[Leftover(holder(1), True)]] * 3
    done: list[str] = []
    MemoryWait(loop, lambda: left.pop() if left else [], done.append, DEADLINE_S)
    assert ended(loop, done) == ""
    assert not left


def test_after_a_while_who_holds_it_is_said_once_and_it_goes_on(loop: Loop) -> None:
    done: list[str] = []
    MemoryWait(loop, lambda: [Leftover(holder(1234), True)], done.append, 0.1)
    assert ended(loop, done) == (
        "GPU 0: 61.0 GiB still held by pid 1234, which has ended: the driver frees it late or a child holds it. "
        "The restart goes on after 0.1 s."
    )
    assert not loop.run_until(lambda: len(done) > 1, time.monotonic() + 0.02)


def test_a_driver_that_does_not_answer_is_not_waited_for(loop: Loop) -> None:
    ever = threading.Event()
    done: list[str] = []

    def look() -> list[Leftover]:
        ever.wait(DEADLINE_S)
        return []

    MemoryWait(loop, look, done.append, 0.05)
    assert ended(loop, done).startswith("NVIDIA's driver did not say within 0.05 s whether GPU memory is free.")
    ever.set()
    assert not loop.run_until(lambda: len(done) > 1, time.monotonic() + 0.02)


def test_a_question_that_fails_is_no_reason_to_wait(loop: Loop) -> None:
    def look() -> list[Leftover]:
        raise RuntimeError

    done: list[str] = []
    MemoryWait(loop, look, done.append, DEADLINE_S)
    assert ended(loop, done) == ""


def test_who_gives_up_hears_no_more(loop: Loop) -> None:
    done: list[str] = []
    MemoryWait(loop, lambda: [Leftover(holder(1), True)], done.append, 0.02).cancel()
    assert not loop.run_until(lambda: bool(done), time.monotonic() + 0.05)


def test_only_what_the_workers_are_to_answer_for_is_waited_for(is_host: bool) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    ours = subprocess.Popen(["sleep", "600"], env={"MARK": "unicron-1234"})
    others = subprocess.Popen(["sleep", "600"], env={})
    try:
        end = time.monotonic() + 30
        while "unicron-1234" not in Path(f"/proc/{ours.pid}/environ").read_text():  # empty for a moment after exec
            assert time.monotonic() < end
        worker = 1 << 22  # no pid is as large
        pids = [worker, gone.pid, zombie.pid, ours.pid, others.pid, 0, 0xFFFFFFFF]
        found = leftovers([holder(pid) for pid in pids], [worker], "unicron-1234")
        dead = [gone.pid, zombie.pid] if is_host else []
        assert [(each.holder.pid, each.has_ended) for each in found] == [
            (worker, True),
            *((pid, True) for pid in dead),
            (ours.pid, False),
        ]
        assert not [each for each in leftovers([holder(ours.pid)], [worker]) if not each.has_ended]
    finally:
        for each in (ours, others, zombie):
            each.kill()
            each.wait()


def test_what_is_not_known_is_not_said() -> None:
    said = describe([Leftover(holder(1, None), True), Leftover(holder(2), False)], 5.0)
    assert said == (
        "GPU 0: memory still held by pid 1, which has ended: the driver frees it late or a child holds it. "
        "GPU 0: 61.0 GiB still held by pid 2, which the workers left. The restart goes on after 5 s."
    )
