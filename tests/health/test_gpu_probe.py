"""The state of GPUs, asked of a library that speaks NVML's ABI through the real pynvml."""

from __future__ import annotations

from collections.abc import Callable

import fake_nvml
import pytest
from fake_nvml import FakeNvml
from health_lab import DEADLINE_S, Findings, only

from unicron_elastic.base.fault import Severity, Status
from unicron_elastic.base.finding import Level
from unicron_elastic.health.gpu.nvml import GpuProbe

MakeProbe = Callable[..., GpuProbe]


def test_healthy_gpus_have_nothing_wrong(fake: FakeNvml, make_probe: MakeProbe, findings: Findings) -> None:
    fake.set({"devices": 8})
    probe = make_probe()
    assert [probe.check(at) for at in (1.0, 2.0, 3.0)] == [[], [], []]
    assert findings.said == []
    assert len(probe.gpus()) == 8


def test_gpus_are_named_by_bus_address_and_by_the_jobs_number(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"devices": 3, "gpu0.bus": 0x3B})
    probe = make_probe(visible="2,GPU-0000")
    assert [gpu.label for gpu in probe.gpus()] == [
        "GPU 1 (0000:11:00.0)",
        "GPU 2 (cuda:0, 0000:12:00.0)",
        "GPU 0 (cuda:1, 0000:3b:00.0)",
    ]


_ECC, _DRIVER = Status.ECC_ERROR, Status.GPU_DRIVER_ERROR


@pytest.mark.parametrize(
    ("values", "expected", "words"),
    [
        ({"rows_pending": 1}, ("gpu.row-remap", Level.WARN, _ECC), "at its next reset"),
        ({"rows_failed": 1}, ("gpu.row-remap", Level.CRITICAL, _ECC), "should be replaced"),
        ({"pages_pending": 1}, ("gpu.retired-pages", Level.WARN, _ECC), "retire a page"),
        ({"sram_exceeded": 1}, ("gpu.sram", Level.CRITICAL, _ECC), "in its caches"),
        ({"field.230": 1}, ("gpu.recovery", Level.CRITICAL, _DRIVER), "the GPU has to be reset."),
        ({"field.230": 2}, ("gpu.recovery", Level.CRITICAL, _DRIVER), "node has to be restarted"),
        ({"field.230": 4}, ("gpu.recovery", Level.WARN, _DRIVER), "once its present work is done"),
        ({"field.230": 99}, ("gpu.recovery", Level.WARN, _DRIVER), "number 99"),
        ({"error": fake_nvml.RESET_REQUIRED}, ("gpu.lost", Level.CRITICAL, _DRIVER), "has to be reset"),
    ],
)
def test_a_state_is_told_as_long_as_it_lasts(
    fake: FakeNvml, make_probe: MakeProbe, values: dict[str, int], expected: tuple[str, Level, Status], words: str
) -> None:
    fake.set({"devices": 2})
    probe = make_probe()
    assert probe.check(0.0) == []
    fake.set({f"gpu1.{key}": value for key, value in values.items()})
    for at in (1.0, 2.0):
        found = only(probe.check(at))
        assert (found.probe, found.level, found.status) == expected
        assert (found.subject, found.at, found.severity) == ("GPU 1 (0000:11:00.0)", at, Severity.SEV1)
        assert words in found.reason
        assert found.reason.endswith(".")
    fake.unset(*(f"gpu1.{key}" for key in values))
    assert probe.check(3.0) == []


@pytest.mark.parametrize("counter", ["ecc_volatile", "ecc_aggregate"])
def test_ecc_errors_that_come_while_watched_are_critical(fake: FakeNvml, make_probe: MakeProbe, counter: str) -> None:
    fake.set({f"gpu0.{counter}": 5})
    probe = make_probe()
    assert [found.level for found in probe.check(1.0)] == ([Level.WARN] if counter == "ecc_volatile" else [])
    fake.set({f"gpu0.{counter}": 7})
    for at in (2.0, 3.0):
        found = only(probe.check(at))
        assert (found.level, found.status, found.severity) == (Level.CRITICAL, Status.ECC_ERROR, Severity.SEV1)
        assert "2 uncorrectable ECC errors since it is watched" in found.reason


def test_a_reset_of_the_gpu_ends_what_its_ecc_counters_told(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"gpu0.ecc_aggregate": 40})
    probe = make_probe()
    assert probe.check(1.0) == []
    fake.set({"gpu0.ecc_volatile": 2, "gpu0.ecc_aggregate": 42})
    assert only(probe.check(2.0)).level is Level.CRITICAL
    fake.set({"gpu0.ecc_volatile": 0})
    assert probe.check(3.0) == []
    fake.set({"gpu0.ecc_volatile": 1, "gpu0.ecc_aggregate": 43})
    assert "1 uncorrectable ECC error since" in only(probe.check(4.0)).reason


def test_a_link_that_goes_down_and_stays_down(fake: FakeNvml, make_probe: MakeProbe) -> None:
    probe = make_probe()
    assert probe.check(1.0) == []
    fake.set({"gpu0.link_down": 7})
    levels = [only(probe.check(at)).level for at in (2.0, 3.0, 4.0)]
    assert levels == [Level.WARN, Level.CRITICAL, Level.CRITICAL]
    found = only(probe.check(5.0))
    assert (found.probe, found.status, found.severity) == ("gpu.nvlink", Status.NVLINK_ERROR, Severity.SEV1)
    assert found.subject == "GPU 0 (0000:10:00.0) NVLink 7"
    fake.unset("gpu0.link_down")
    assert probe.check(6.0) == []


def test_a_link_that_was_never_up_is_seen_beside_its_peers_only(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"devices": 3, "gpu1.link_down": 3, "gpu2.links": 4, "gpu2.model": 200})
    probe = make_probe()
    found = only(probe.check(1.0))
    assert (found.probe, found.level, found.status) == ("gpu.nvlink-count", Level.WARN, Status.NVLINK_ERROR)
    assert "17 NVLinks up where others of its kind have 18" in found.reason


@pytest.mark.parametrize(
    ("field", "values", "words"),
    [
        ("52", (10, 11), "1 NVLink replays in the last 10 seconds"),
        ("59", (0, 3), "3 NVLink recoveries"),
        ("38", (0, 2000), "2000 NVLink CRC errors"),
        ("38", (0, 900), None),  # below the 100 a second from which they matter
        ("94", (0, 2), "2 PCIe replays"),
        ("94", (0, 1), None),
        ("214.5", (0, 1), "NVLink 5 had 1 failed NVLink recoveries"),
        ("52", (10, 0), None),  # set to zero by a reset
    ],
)
def test_counters_that_grow_too_fast(
    fake: FakeNvml, make_probe: MakeProbe, field: str, values: tuple[int, int], words: str | None
) -> None:
    fake.set({f"gpu0.field.{field}": values[0]})
    probe = make_probe()
    assert probe.check(0.0) == []
    fake.set({f"gpu0.field.{field}": values[1]})
    found = probe.check(10.0)
    if words is None:
        assert found == []
    else:
        assert words in only(found).reason
        assert only(found).level is Level.WARN
    assert probe.check(20.0) == []


@pytest.mark.parametrize(
    ("values", "probe_name", "words"),
    [
        ({"pcie_width": 8}, "gpu.pcie-width", "8 PCIe lanes where 16 are possible"),
        ({"pcie_generation": 3, "busy": 90}, "gpu.pcie-generation", "PCIe generation 3 where 5 is possible"),
        ({"clocks": 0x40 | 0x08}, "gpu.throttled", "hardware slows it down because it is too hot."),
        ({"clocks": 0x20}, "gpu.throttled", "driver slows it down because it is too hot."),
        ({"clocks": 0x80 | 0x08 | 0x20}, "gpu.throttled", "too hot and an external power brake slows it down."),
        ({"clocks": 0x08}, "gpu.throttled", "its hardware slows it down."),
    ],
)
def test_what_makes_a_gpu_slow_is_told_once_it_lasts(
    fake: FakeNvml, make_probe: MakeProbe, values: dict[str, int], probe_name: str, words: str
) -> None:
    fake.set({f"gpu0.{key}": value for key, value in values.items()})
    probe = make_probe()
    assert probe.check(1.0) == []
    for at in (2.0, 3.0):
        found = only(probe.check(at))
        assert (found.probe, found.level, found.severity) == (probe_name, Level.WARN, Severity.SEV3)
        assert words in found.reason
    fake.unset(*(f"gpu0.{key}" for key in values))
    assert probe.check(4.0) == []
    fake.set({f"gpu0.{key}": value for key, value in values.items()})
    assert probe.check(5.0) == []


@pytest.mark.parametrize("values", [{"pcie_generation": 1}, {"clocks": 0x04}, {"clocks": 0x01}, {"clocks": 0x02}])
def test_an_idle_or_power_capped_gpu_is_healthy(fake: FakeNvml, make_probe: MakeProbe, values: dict[str, int]) -> None:
    fake.set({f"gpu0.{key}": value for key, value in values.items()})
    probe = make_probe()
    assert [probe.check(1.0), probe.check(2.0)] == [[], []]


def test_a_lost_gpu_is_told_once_for_all_its_checks_and_the_others_go_on(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"devices": 3})
    probe = make_probe()
    assert probe.check(1.0) == []
    fake.set({"gpu1.error": fake_nvml.GPU_IS_LOST, "gpu2.rows_failed": 1})
    lost, failed = probe.check(2.0)
    assert (lost.probe, lost.level, lost.status) == ("gpu.lost", Level.CRITICAL, Status.GPU_DRIVER_ERROR)
    assert lost.reason == "GPU 1 (0000:11:00.0) is lost: it has fallen off the bus or does not answer the driver."
    assert failed.subject == "GPU 2 (0000:12:00.0)"


def test_a_gpu_that_is_lost_before_we_come(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"devices": 2, "gpu0.error": fake_nvml.GPU_IS_LOST})
    probe = make_probe()
    found = only(probe.check(1.0))
    assert (found.level, found.subject) == (Level.CRITICAL, "GPU 0")
    assert found.reason == "GPU 0 cannot be opened by the driver (NVML error 15)."
    assert [gpu.label for gpu in probe.gpus()] == ["GPU 1 (0000:11:00.0)", "GPU 0"]


def test_who_holds_memory(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"devices": 2, "gpu0.pid": 77, "gpu0.mps_pid": 78, "gpu0.graphics_pid": 77})
    fake.set({"gpu1.pid": 77, "gpu1.used": -1})
    probe = make_probe()
    held = [(holder.gpu.index, holder.pid, holder.used_bytes) for holder in probe.holders()]
    assert held == [(0, 77, 1 << 30), (0, 78, 1 << 30), (1, 77, None)]
    assert probe.memory_held_by([77, 99]) == {77: 1 << 30}
    fake.set({"gpu0.error": fake_nvml.GPU_IS_LOST})
    assert probe.memory_held_by([77, 78]) == {77: 0}


@pytest.mark.gpu
def test_a_real_gpu_answers(findings: Findings) -> None:
    probe = GpuProbe(findings, say=findings.say)
    if not probe.gpus():
        pytest.skip("no GPU here")
    probe.start()
    assert probe.wait_until_listening(DEADLINE_S)
    critical = [found for found in probe.check(1.0) + probe.check(2.0) if found.level is Level.CRITICAL]
    assert critical == []
    probe.holders()
    assert probe.stop(DEADLINE_S)
