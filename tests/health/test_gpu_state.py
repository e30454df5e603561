"""How GPUs are and who holds their memory, from the fake library up to what the launcher makes of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import fake_nvml
import pynvml
import pytest
from fake_nvml import FakeNvml
from health_lab import DEADLINE_S, wait_until

from unicron_elastic.health.gpu.nvml import GpuProbe
from unicron_elastic.health.gpu.session import Gpu
from unicron_elastic.health.gpu.state import GpuState, MemoryHolder
from unicron_elastic.launcher.agent.core import node
from unicron_elastic.launcher.agent.core.node import NodeWatch
from unicron_elastic.launcher.agent.process import gpu_memory
from unicron_elastic.launcher.common.loop import Loop

MakeProbe = Callable[..., GpuProbe]


def test_all_that_the_driver_tells(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"devices": 2, "gpu1.busy": 97, "gpu1.celsius": 71, "gpu1.memory_used": 61 << 30, "gpu1.pid": 77})
    fake.set({"gpu1.clocks": 0x40, "gpu1.rows_pending": 1, "gpu1.rows_failed": 1, "gpu1.pages_pending": 1})
    quiet, busy = make_probe().state()
    assert (quiet.index, quiet.name, quiet.gone) == (0, "NVIDIA Fake 100", "")
    assert (quiet.utilisation_percent, quiet.temperature_c) == (0, 35)
    assert (quiet.memory_used_bytes, quiet.memory_total_bytes) == (1 << 30, 80 << 30)
    assert quiet.throttling == quiet.pending == quiet.holders == ()
    assert (busy.utilisation_percent, busy.temperature_c, busy.memory_used_bytes) == (97, 71, 61 << 30)
    assert busy.throttling == ("its hardware slows it down because it is too hot",)
    assert len(busy.pending) == 3
    assert [(holder.pid, holder.used_bytes) for holder in busy.holders] == [(77, 1 << 30)]


def test_a_lost_gpu_does_not_hide_the_others(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"devices": 3})
    probe = make_probe()
    assert len(probe.gpus()) == 3
    fake.set({"gpu0.error": fake_nvml.GPU_IS_LOST, "gpu1.error": fake_nvml.RESET_REQUIRED})
    lost, reset, well = probe.state()
    assert (lost.gone, reset.gone) == ("it does not answer (NVML error 15)", "it has to be reset")
    assert (lost.utilisation_percent, lost.memory_used_bytes) == (None, None)
    assert well.gone == ""


NOT_SUPPORTED = 3
QUESTIONS = ("MemoryInfo", "UtilizationRates", "Temperature", "RemappedRows", "RetiredPagesPendingStatus")


@pytest.mark.parametrize("code", [NOT_SUPPORTED, fake_nvml.NO_PERMISSION, fake_nvml.UNKNOWN])
def test_what_a_gpu_does_not_tell_is_not_known(fake: FakeNvml, make_probe: MakeProbe, code: int) -> None:
    fake.set({f"gpu0.nvmlDeviceGet{name}": code for name in QUESTIONS} | {"gpu0.clocks": 0x80})
    (state,) = make_probe().state()
    assert (state.utilisation_percent, state.temperature_c) == (None, None)
    assert (state.memory_used_bytes, state.memory_total_bytes) == (None, None)
    assert (state.pending, state.holders) == ((), ())
    assert state.throttling == ("an external power brake slows it down",)


def test_an_old_driver_tells_less(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"gpu0.busy": 50, "gpu0.clocks": 0x20, "gpu0.pid": 77, "gpu0.rows_pending": 1})
    (state,) = make_probe(kind="old").state()
    assert (state.utilisation_percent, state.memory_total_bytes) == (50, 80 << 30)
    assert state.throttling == ("its driver slows it down because it is too hot",)
    assert (state.pending, state.holders) == ((), ())


@pytest.mark.parametrize("answer", [None, (), "words", object(), (1, 2, 3, 4, 5)])
def test_answers_of_another_shape_are_none(
    make_probe: MakeProbe, monkeypatch: pytest.MonkeyPatch, answer: object
) -> None:
    probe = make_probe()
    assert len(probe.gpus()) == 1
    for name in (*QUESTIONS[:2], *QUESTIONS[3:4], "CurrentClocksEventReasons", "ComputeRunningProcesses"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", lambda *_: answer)
    (state,) = probe.state()
    assert state == GpuState(gpu=state.gpu, temperature_c=35, throttling=state.throttling)
    assert state.throttling == ()


def test_without_a_gpu_there_is_no_state(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"devices": 0})
    probe = make_probe()
    assert not probe.is_open
    assert probe.state() == []
    assert not probe.is_open


class Node:
    """The watch over a node with fake GPUs, and what was said."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.said: list[str] = []
        self.watch = NodeWatch(self.loop, self.said.append, lambda _event: None)

    def start(self, *, opens: bool = True) -> None:
        self.watch.start([], lambda: {77: "rank 3"}, "")
        health = self.watch._health
        assert health is not None
        if opens:
            wait_until(lambda: health.gpus.is_open)

    def wait(self, *pids: int, timeout_s: float = DEADLINE_S) -> float:
        began = time.monotonic()
        self.watch.wait_until_gpus_are_free(pids, timeout_s=timeout_s)
        return time.monotonic() - began


@pytest.fixture
def watched(load_fake: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(gpu_memory, "FIRST_NAMESPACE", 0)  # other processes of this machine are no concern here
    load_fake("new")
    made = Node()
    yield made
    made.watch.stop()
    made.loop.close()


def test_a_report_names_the_ranks(fake: FakeNvml, watched: Node) -> None:
    fake.set({"gpu0.pid": 77, "gpu0.rows_pending": 1})
    assert watched.watch.gpu_lines() == []  # nothing is watched yet
    watched.start()
    heading, row, below = watched.watch.gpu_lines()
    assert heading.startswith("GPU ")
    assert row.split() == (
        "GPU 0 (0000:10:00.0) NVIDIA Fake 100 0% 1.0 of 80.0 35 °C rank 3, pid 77: 1.0".split()  # noqa: SIM905
    )
    assert below == "    a row of bad memory waits to be replaced."
    watched.watch.stop()
    assert watched.watch.gpu_lines() == []


def test_a_driver_that_hangs_is_not_waited_for(fake: FakeNvml, watched: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "DRIVER_TIMEOUT_S", 0.05)
    watched.start()
    fake.set({"nvmlDeviceGetMemoryInfo.hang": 1})
    assert "did not answer" in watched.watch.gpu_lines()[0]
    assert "did not answer" in watched.watch.gpu_lines()[0]
    fake.unset("nvmlDeviceGetMemoryInfo.hang")
    wait_until(lambda: len(watched.watch.gpu_lines()) == 2)


def test_without_gpus_nothing_is_written_nor_waited_for(fake: FakeNvml, watched: Node) -> None:
    fake.set({"devices": 0})
    assert watched.wait(77) < DEADLINE_S / 2
    watched.start(opens=False)
    assert watched.watch.gpu_lines() == []
    done: list[bool] = []
    watched.watch.when_gpus_are_free([77], lambda: done.append(True))()
    assert done == [True]  # without a turn of the loop
    assert watched.said == []


def test_a_restart_waits_until_memory_is_free(fake: FakeNvml, watched: Node) -> None:
    watched.start()
    fake.set({"devices": 1, "gpu0.pid": 77})
    watched.loop.call_at(time.monotonic() + 0.1, lambda: fake.unset("gpu0.pid"))
    assert 0.09 < watched.wait(77) < DEADLINE_S / 2
    assert watched.said == []


def test_it_goes_on_and_says_who_holds_memory(fake: FakeNvml, watched: Node) -> None:
    fake.set({"gpu0.pid": 77, "gpu0.used": 61 << 30})
    watched.start()
    assert watched.wait(77, timeout_s=0.1) < DEADLINE_S / 2
    (said,) = watched.said
    assert said.startswith("GPU 0 (0000:10:00.0): 61.0 GiB still held by pid 77, which has ended: the driver frees")


def test_memory_of_others_is_not_waited_for(fake: FakeNvml, watched: Node) -> None:
    fake.set({"gpu0.pid": os.getpid()})
    watched.start()
    assert watched.wait(77) < DEADLINE_S / 2
    assert watched.said == []


def test_a_signal_gives_up_the_wait(fake: FakeNvml, watched: Node) -> None:
    fake.set({"gpu0.pid": 77})
    watched.start()

    def fail() -> None:
        raise KeyboardInterrupt

    watched.loop.call_soon(fail)
    with pytest.raises(KeyboardInterrupt):
        watched.wait(77)


def test_the_restart_goes_on_while_the_driver_hangs(fake: FakeNvml, watched: Node) -> None:
    watched.start()
    fake.set({"nvmlDeviceGetComputeRunningProcesses_v3.hang": 1})
    assert watched.wait(77, timeout_s=0.05) < DEADLINE_S / 2
    assert "did not say within 0.05 s" in watched.said[0]
    fake.unset("nvmlDeviceGetComputeRunningProcesses_v3.hang")


def test_holders_are_told_with_their_gpu(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"gpu0.pid": 77})
    (holder,) = make_probe().holders()
    assert isinstance(holder, MemoryHolder)
    assert isinstance(holder.gpu, Gpu)
