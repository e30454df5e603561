"""The table of GPUs in a report, and questions that are never answered."""

from __future__ import annotations

import threading

from unicron_elastic.health.gpu.session import Gpu
from unicron_elastic.health.gpu.state import GpuState, MemoryHolder
from unicron_elastic.launcher.agent.hangs.gpu_lines import Asker, gpu_lines

DEADLINE_S = 30.0


def gpu(index: int, model: str = "NVIDIA H100") -> Gpu:
    return Gpu(index=index, uuid="", pci="", model=model, label=f"GPU {index}", handle=None)


def test_without_gpus_there_is_no_table() -> None:
    assert gpu_lines([], {}) == []


def test_a_driver_that_does_not_answer_is_said() -> None:
    assert gpu_lines(None, {}) == ["NVIDIA's driver did not answer within 1 s: nothing is known of the GPUs."]


def test_each_gpu_is_a_row_with_what_is_wrong_below_it() -> None:
    first, second, third = gpu(0), gpu(1, ""), gpu(12)
    states = [
        GpuState(
            gpu=first,
            utilisation_percent=100,
            memory_used_bytes=61 << 30,
            memory_total_bytes=80 << 30,
            temperature_c=71,
            throttling=("its hardware slows it down",),
            pending=("a row of bad memory waits to be replaced",),
            holders=(
                MemoryHolder(gpu=first, pid=77, used_bytes=60 << 30),
                MemoryHolder(gpu=first, pid=78, used_bytes=None),
            ),
        ),
        GpuState(gpu=second),
        GpuState(gpu=third, gone="it has to be reset"),
    ]
    assert gpu_lines(states, {77: "rank 3"}) == [
        "GPU                 busy  memory (GiB)  temperature  held by (GiB)",
        "GPU 0 NVIDIA H100   100%  61.0 of 80.0  71 °C        rank 3, pid 77: 60.0, pid 78: ?",
        "    its hardware slows it down.",
        "    a row of bad memory waits to be replaced.",
        "GPU 1               ?     ? of ?        ?            nobody",
        "GPU 12 NVIDIA H100  -     -             -            it has to be reset",
    ]


def test_an_open_question_is_not_asked_again() -> None:
    may_answer = threading.Event()
    asked: list[int] = []

    def question() -> str:
        asked.append(1)
        assert may_answer.wait(DEADLINE_S)
        return "answer"

    asker = Asker(question)
    assert asker.ask(0.01) is None
    assert asker.ask(DEADLINE_S) is None
    assert len(asked) == 1
    may_answer.set()
    assert asker._asking.acquire(timeout=DEADLINE_S)  # then the first question has come back
    asker._asking.release()
    assert asker.ask(DEADLINE_S) == "answer"


def test_an_error_is_no_answer() -> None:
    def question() -> str:
        raise RuntimeError

    asker = Asker(question)
    assert [asker.ask(DEADLINE_S), asker.ask(DEADLINE_S)] == [None, None]
