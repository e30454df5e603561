"""Drivers and libraries that lack something, or are not there at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fake_nvml
import pynvml
import pytest
from fake_nvml import FakeNvml
from health_lab import DEADLINE_S, Findings, only

from unicron_elastic.base.fault import Severity, Status
from unicron_elastic.base.finding import Level
from unicron_elastic.health.gpu.nvml import GpuProbe

MakeProbe = Callable[..., GpuProbe]


def test_gpus_that_were_not_given_to_this_container_are_no_concern(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"devices": 2, "gpu0.error": fake_nvml.NO_PERMISSION})
    probe = make_probe()
    assert probe.check(1.0) == []
    assert [gpu.index for gpu in probe.gpus()] == [1]


def test_one_question_less_where_a_gpu_does_not_support_it(
    fake: FakeNvml, make_probe: MakeProbe, findings: Findings
) -> None:
    fake.set({"gpu0.nvmlDeviceGetTotalEccErrors": 3, "gpu0.nvmlDeviceGetRemappedRows": 3, "gpu0.pages_pending": 1})
    probe = make_probe()
    assert only(probe.check(1.0)).probe == "gpu.retired-pages"
    assert findings.said == []


def test_missing_rights_are_said_once(fake: FakeNvml, make_probe: MakeProbe, findings: Findings) -> None:
    fake.set({"gpu0.nvmlDeviceGetRemappedRows": fake_nvml.NO_PERMISSION})
    probe = make_probe()
    assert [probe.check(1.0), probe.check(2.0)] == [[], []]
    (said,) = findings.said
    assert said.startswith("NVML's nvmlDeviceGetRemappedRows needs more rights")


def test_an_unknown_error_is_a_warning_of_the_driver(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"gpu0.nvmlDeviceGetRemappedRows": fake_nvml.UNKNOWN})
    probe = make_probe()
    found = only(probe.check(1.0))
    assert (found.probe, found.level, found.severity) == ("gpu.driver", Level.WARN, Severity.SEV2)
    assert "nvmlDeviceGetRemappedRows failed with" in found.reason
    fake.unset("gpu0.nvmlDeviceGetRemappedRows")
    assert probe.check(2.0) == []


def test_an_old_driver_lacks_functions_and_the_rest_goes_on(
    fake: FakeNvml, make_probe: MakeProbe, findings: Findings
) -> None:
    fake.set({"gpu0.ecc_volatile": 2, "gpu0.clocks": 0x20, "gpu0.pid": 77})
    probe = make_probe(kind="old")
    assert [found.probe for found in probe.check(1.0)] == ["gpu.ecc"]
    assert [found.probe for found in probe.check(2.0)] == ["gpu.ecc", "gpu.throttled"]
    assert probe.holders() == []
    missing = {sentence.split()[1] for sentence in findings.said}
    assert {"nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues", "nvmlDeviceGetSramEccErrorStatus"} <= missing
    assert len(findings.said) == len(set(findings.said))


@pytest.mark.parametrize(
    ("values", "words"),
    [({"devices": 0}, "the driver knows no GPU"), ({"init.error": fake_nvml.DRIVER_NOT_LOADED}, "Driver Not Loaded")],
)
def test_no_gpu_or_no_driver_is_said_once(
    fake: FakeNvml, make_probe: MakeProbe, findings: Findings, values: dict[str, int], words: str
) -> None:
    fake.set(values)
    probe = make_probe()
    probe.start()
    assert [probe.check(1.0), probe.check(2.0), probe.holders(), list(probe.gpus())] == [[], [], [], []]
    assert findings.said == [f"GPUs are not watched: {words}."]


def test_a_driver_that_was_updated_under_its_library_is_a_fault(
    fake: FakeNvml, make_probe: MakeProbe, findings: Findings
) -> None:
    fake.set({"init.error": fake_nvml.VERSION_MISMATCH})
    probe = make_probe()
    for at in (1.0, 2.0):
        found = only(probe.check(at))
        assert (found.level, found.status, found.at) == (Level.CRITICAL, Status.GPU_DRIVER_ERROR, at)
        assert found.reason.startswith("NVIDIA's driver cannot be used: RM has detected an NVML/RM version mismatch.")
    assert findings.said == []


def test_pynvml_itself_may_be_missing(findings: Findings) -> None:
    def load() -> None:
        raise ModuleNotFoundError("No module named 'pynvml'")

    probe = GpuProbe(findings, say=findings.say, load=load)  # type: ignore[arg-type]
    probe.start()
    assert probe.check(1.0) == []
    assert probe.stop(DEADLINE_S)
    assert findings.said == ["GPUs are not watched: pynvml cannot be imported (No module named 'pynvml')."]


def test_an_old_pynvml_lacks_names(fake: FakeNvml, make_probe: MakeProbe, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.set({"gpu0.rows_failed": 1, "gpu0.field.230": 1})
    for name in (
        "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
        "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS",
        "c_nvmlEccSramErrorStatus_v1_t",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "NVML_NVLINK_MAX_LINKS",
    ):
        monkeypatch.delattr(pynvml, name)
    probe = make_probe()
    assert only(probe.check(1.0)).probe == "gpu.row-remap"


def test_after_stop_nothing_is_opened_again(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"gpu0.rows_failed": 1})
    probe = make_probe()
    assert probe.check(1.0)
    assert probe.stop(DEADLINE_S)
    assert pynvml.nvmlLib.fakeUsers() == 0
    assert probe.check(2.0) == []
    assert probe.stop()


_SCRIPT = """
import json, sys
from unicron_elastic.health.gpu.nvml import GpuProbe
assert "pynvml" not in sys.modules and "torch" not in sys.modules
probe = GpuProbe(say=lambda sentence: print(json.dumps(sentence)))
for found in probe.check(1.0):
    print(json.dumps([found.probe, found.level, str(found.status), found.reason]))
probe.stop(10)
"""


def _lines(environment: dict[str, str]) -> list[object]:
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_library_is_found_on_the_loaders_path(fake: FakeNvml, libraries: dict[str, Path]) -> None:
    fake.set({"devices": 8, "gpu3.rows_failed": 1})
    environment = fake.environment(libraries["new"])
    reason = "GPU 3 (0000:13:00.0) could not replace a row of bad memory: it should be replaced."
    assert _lines(environment) == [["gpu.row-remap", int(Level.CRITICAL), "ECC error", reason]]


def test_a_library_that_cannot_be_loaded_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library", encoding="ascii")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    assert _lines(environment) == ["GPUs are not watched: NVML Shared Library Not Found."]
