"""XIDs and ECC events, from NVML's event queue to the callback."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fake_nvml
import pynvml
import pytest
from fake_nvml import DOUBLE_BIT_ECC, XID, FakeNvml
from health_lab import DEADLINE_S, Findings

from unicron_elastic.base.fault import Severity, Status
from unicron_elastic.base.finding import Finding, Level
from unicron_elastic.health.gpu.nvml import GpuProbe

MakeProbe = Callable[..., GpuProbe]


@pytest.fixture
def listening(fake: FakeNvml, make_probe: MakeProbe) -> GpuProbe:
    """A probe of three GPUs that waits for events."""
    fake.set({"devices": 3})
    probe = make_probe()
    probe.start()
    assert probe.wait_until_listening(DEADLINE_S)
    return probe


@pytest.mark.usefixtures("listening")
def test_an_xid_is_heard_at_once(fake: FakeNvml, findings: Findings) -> None:
    sent = time.monotonic()
    fake.event(1, XID, 79)
    found = findings.next()
    assert sent <= found.at <= time.monotonic()
    assert (found.probe, found.level, found.status, found.severity) == (
        "gpu.xid",
        Level.CRITICAL,
        Status.GPU_DRIVER_ERROR,
        Severity.SEV1,
    )
    assert found.subject == "GPU 1 (0000:11:00.0)"
    assert found.reason == (
        "GPU 1 (0000:11:00.0) reported XID 79, the GPU has fallen off the bus: the node has to be restarted."
    )


@pytest.mark.usefixtures("listening")
def test_an_ecc_error_of_two_bits(fake: FakeNvml, findings: Findings) -> None:
    fake.event(0, DOUBLE_BIT_ECC)
    found = findings.next()
    assert (found.probe, found.level, found.status) == ("gpu.ecc-event", Level.CRITICAL, Status.ECC_ERROR)


@pytest.mark.usefixtures("listening")
def test_many_events_come_in_order_and_none_is_lost(fake: FakeNvml, findings: Findings) -> None:
    for number in (31, 45, 48, 63, 94):
        fake.event(2, XID, number)
    heard = [findings.next() for _ in range(5)]
    assert [found.reason.split()[5] for found in heard] == ["31,", "45,", "48,", "63,", "94,"]


def test_other_kinds_of_events_are_not_asked_for(fake: FakeNvml, listening: GpuProbe, findings: Findings) -> None:
    for kind in (1, 4, 16):
        fake.event(0, kind)
    fake.event(0, XID, 13)
    assert "XID 13" in findings.next().reason
    assert listening.stop(DEADLINE_S)
    assert findings.is_empty()


@pytest.mark.usefixtures("listening")
def test_an_event_of_a_mig_instance_names_it(fake: FakeNvml, findings: Findings) -> None:
    fake.set({"gpu0.instance": 3})
    fake.event(0, XID, 94)
    assert findings.next().subject == "GPU 0 (0000:10:00.0) instance 3"


@pytest.mark.usefixtures("listening")
def test_when_the_recovery_action_changes_it_is_asked_for(fake: FakeNvml, findings: Findings) -> None:
    fake.set({"gpu0.field.230": 2})
    fake.event(0, XID, 154)
    announced, action = findings.next(), findings.next()
    assert (announced.probe, announced.level) == ("gpu.xid", Level.WARN)
    assert (action.probe, action.level, action.severity) == ("gpu.recovery", Level.CRITICAL, Severity.SEV1)
    assert action.reason == "The driver says of GPU 0 (0000:10:00.0): the node has to be restarted."


def test_a_lost_gpu_is_told_without_a_check_and_the_others_are_still_heard(
    fake: FakeNvml, listening: GpuProbe, findings: Findings
) -> None:
    fake.set({"gpu1.error": fake_nvml.GPU_IS_LOST})
    found = findings.next()
    assert (found.probe, found.level, found.subject) == ("gpu.lost", Level.CRITICAL, "GPU 1 (0000:11:00.0)")
    fake.event(2, XID, 48)
    assert "XID 48" in findings.next().reason
    assert listening.stop(DEADLINE_S)
    assert findings.is_empty()


def test_when_all_gpus_are_lost_the_thread_ends(fake: FakeNvml, listening: GpuProbe, findings: Findings) -> None:
    fake.set({f"gpu{index}.error": fake_nvml.GPU_IS_LOST for index in range(3)})
    assert {findings.next().subject[:5] for _ in range(3)} == {"GPU 0", "GPU 1", "GPU 2"}
    assert listening.stop(DEADLINE_S)
    assert findings.is_empty()


def test_a_wait_that_fails_does_not_spin_and_recovers(
    fake: FakeNvml, make_probe: MakeProbe, findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = make_probe()
    waits: list[float] = []
    tried_again = threading.Event()
    wait = pynvml.nvmlEventSetWait_v2

    def count(*arguments: object) -> object:
        waits.append(time.monotonic())
        if len(waits) > 1:
            tried_again.set()
        return wait(*arguments)

    monkeypatch.setattr(pynvml, "nvmlEventSetWait_v2", count)
    fake.set({"wait.error": fake_nvml.UNKNOWN})
    probe.start()
    assert tried_again.wait(DEADLINE_S)
    assert waits[1] - waits[0] >= 0.5
    assert findings.said == ["Waiting for NVML's events fails (Unknown Error); it is tried again."]
    fake.unset("wait.error")
    fake.event(0, XID, 62)
    assert "XID 62" in findings.next().reason


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gpu0.events": 0}, "it offers none"),
        ({"gpu0.events": 0x14}, "it offers none"),
        ({"gpu0.nvmlDeviceGetSupportedEventTypes": 3}, "it does not support them"),
        ({"gpu0.nvmlDeviceRegisterEvents": fake_nvml.UNKNOWN}, "Unknown Error"),
    ],
)
def test_a_gpu_without_events_is_said_once_and_the_others_are_heard(
    fake: FakeNvml, make_probe: MakeProbe, findings: Findings, values: dict[str, int], words: str
) -> None:
    fake.set({"devices": 2, **values})
    probe = make_probe()
    probe.start()
    fake.event(1, XID, 74)
    assert "XID 74" in findings.next().reason
    assert findings.said == [f"XIDs of GPU 0 (0000:10:00.0) are not watched: {words}."]


def test_an_old_driver_has_no_events_and_is_still_checked(
    fake: FakeNvml, make_probe: MakeProbe, findings: Findings
) -> None:
    fake.set({"gpu0.pages_pending": 1})
    probe = make_probe(kind="old")
    probe.start()
    assert findings.next_said() == "This driver offers no events (Function Not Found): XIDs are not watched."
    assert [found.probe for found in probe.check(1.0)] == ["gpu.retired-pages"]


def test_whoever_listens_may_fail(fake: FakeNvml, load_fake: Callable[[str], None]) -> None:
    heard: list[Finding] = []
    second = threading.Event()

    def listen(found: Finding) -> None:
        heard.append(found)
        if len(heard) == 2:
            second.set()
        raise ValueError("no")

    load_fake("new")
    said: list[str] = []
    probe = GpuProbe(listen, say=said.append)
    probe.start()
    fake.event(0, XID, 13)
    fake.event(0, XID, 31)
    assert second.wait(DEADLINE_S)
    assert probe.stop(DEADLINE_S)
    assert said == ["A finding could not be handed on: ValueError('no')."]


def test_stop_does_not_wait_for_a_driver_that_hangs(fake: FakeNvml, listening: GpuProbe) -> None:
    fake.set({"nvmlEventSetWait_v2.hang": 1})
    began = time.monotonic()
    assert not listening.stop(0.6)
    assert time.monotonic() - began < DEADLINE_S / 2
    assert pynvml.nvmlLib.fakeUsers() == 1  # the thread still uses it, and gives it back when it can
    fake.unset("nvmlEventSetWait_v2.hang")
    assert listening.stop(DEADLINE_S)
    assert pynvml.nvmlLib.fakeUsers() == 0


def test_neither_start_nor_stop_waits_for_nvml_to_open(fake: FakeNvml, make_probe: MakeProbe) -> None:
    fake.set({"nvmlInitWithFlags.hang": 1})
    probe = make_probe()
    began = time.monotonic()
    probe.start()
    assert not probe.stop()
    assert time.monotonic() - began < DEADLINE_S / 2
    fake.unset("nvmlInitWithFlags.hang")
    assert probe.stop(DEADLINE_S)


def test_a_probe_can_be_stopped_before_it_was_started(make_probe: MakeProbe) -> None:
    assert make_probe().stop()


_SCRIPT = """
import json, sys, threading, time
from unicron_elastic.health.gpu.nvml import GpuProbe
heard = threading.Event()
def on_finding(found):
    print(json.dumps([found.reason, found.at]), flush=True)
    heard.set()
probe = GpuProbe(on_finding)
probe.start()
assert probe.wait_until_listening(20)
print("listening", flush=True)
assert heard.wait(20)
"""


def test_in_a_process_of_its_own_that_ends_without_stopping(fake: FakeNvml, libraries: dict[str, Path]) -> None:
    command = [sys.executable, "-c", _SCRIPT]
    environment = fake.environment(libraries["new"])
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        sent = time.monotonic()
        fake.event(0, XID, 119)
        reason, at = json.loads(process.stdout.readline())
        assert "XID 119" in reason
        assert 0 <= at - sent < DEADLINE_S
        assert process.wait(DEADLINE_S) == 0
