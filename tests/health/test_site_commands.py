"""A site's own checks: what they say, and that nothing of them is left when they do not end."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest
from health_lab import DEADLINE_S, only, wait_until

from unicron_elastic.base.fault import Severity
from unicron_elastic.base.finding import CHECK_FAILED, Level
from unicron_elastic.health.host import command
from unicron_elastic.health.host.command import CommandProbe


def reason(command: str) -> str:
    return only(CommandProbe(command, name="gpu-check").check(1.0)).reason


def test_ok_is_nothing_to_tell() -> None:
    assert CommandProbe("echo all is well").check(1.0) == []
    assert CommandProbe([sys.executable, "-c", ""]).check(1.0) == []


@pytest.mark.parametrize(("code", "level"), [(1, Level.WARN), (2, Level.CRITICAL)])
def test_warning_and_critical(code: int, level: Level) -> None:
    command = f"echo 'GPU 3 is hot. | temp=99;;'; echo more; exit {code}"
    found = only(CommandProbe(command, name="gpu-check").check(5.0))
    assert (found.probe, found.subject, found.at) == ("command", "gpu-check", 5.0)
    assert (found.level, found.status, found.severity) == (level, CHECK_FAILED, Severity.SEV1)
    assert found.reason == "The check gpu-check says GPU 3 is hot."


def test_the_site_may_say_how_bad_critical_is() -> None:
    found = only(CommandProbe("exit 2", severity=Severity.SEV2).check(1.0))
    assert found.severity is Severity.SEV2
    assert found.reason == "The check exit 2 found something wrong and does not say what."


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo dunno; exit 3", "ended with code 3, which says neither good nor bad: dunno."),
        ("no-such-command", "ended with code 127, which says neither good nor bad: "),
        ("kill -SEGV $$", "was killed by signal 11, which says neither good nor bad."),
    ],
)
def test_anything_else_is_unknown(command: str, words: str) -> None:
    assert words in reason(command)
    assert only(CommandProbe(command).check(1.0)).level is Level.WARN


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    found = only(CommandProbe([str(tmp_path / "nothing")]).check(1.0))
    assert (found.level, found.status) == (Level.WARN, CHECK_FAILED)
    assert found.reason == f"The check {tmp_path}/nothing cannot be run: No such file or directory."


def test_errors_are_what_it_says_if_it_says_nothing_else() -> None:
    assert reason("echo trouble >&2; exit 2").endswith("says trouble.")
    assert reason("echo trouble >&2; echo output; exit 2").endswith("says output.")


def test_what_it_writes_is_taken_with_care() -> None:
    assert reason(r"printf '\033[31mred\033[0m \377\n'; exit 2").endswith("says [31mred[0m \N{REPLACEMENT CHARACTER}.")
    long = reason("head -c 3000000 /dev/zero | tr '\\0' x; exit 2")
    assert 300 < len(long) < 400


def test_who_is_late_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = f"sleep 60 & echo $! > {pid_file}.new; mv {pid_file}.new {pid_file}; echo waiting; wait"
    probe = CommandProbe(command, name="slow", timeout_s=1.0)
    found = only(probe.check(1.0))
    assert (found.level, found.severity) == (Level.WARN, Severity.SEV2)
    assert found.reason == "The check slow did not end within 1 s and was killed: waiting."
    child = int(pid_file.read_text(encoding="ascii"))
    wait_until(lambda: _has_ended(child))


def test_a_child_that_keeps_the_output_open_holds_up_nobody() -> None:
    began = time.monotonic()
    probe = CommandProbe("setsid sleep 5 & echo started; exit 2", timeout_s=DEADLINE_S)
    assert only(probe.check(1.0)).reason.endswith("says started.")
    assert time.monotonic() - began < 4.0


def test_closing_kills_what_runs_and_runs_nothing_more(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    probe = CommandProbe(f"touch {mark}; sleep 60; exit 2", timeout_s=60.0)
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(probe.check(1.0)))
    thread.start()
    wait_until(mark.exists)
    probe.close()
    thread.join(DEADLINE_S)
    assert results == [[]]
    mark.unlink()
    assert probe.check(2.0) == []
    assert not mark.exists()


def test_nothing_is_started_beside_what_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = CommandProbe("sleep 60", name="stuck", timeout_s=0.05)
    with monkeypatch.context() as patch:  # a process that waits in the kernel hears no signal
        patch.setattr(command.os, "killpg", lambda *_: None)
        patch.setattr(command, "_END_S", 0.01)
        assert "was killed" in only(probe.check(1.0)).reason
        found = only(probe.check(2.0))
    assert found.reason == "The check stuck is still there although it was killed: it waits in the kernel."
    assert found.level is Level.WARN
    probe.close()
    wait_until(lambda: probe.check(3.0) == [])


def test_no_descriptors_and_no_children_are_left() -> None:
    probe = CommandProbe("echo x; exit 1")
    probe.check(1.0)
    before = len(os.listdir("/proc/self/fd"))
    for at in range(5):
        assert len(probe.check(float(at))) == 1
    assert len(os.listdir("/proc/self/fd")) == before


def _has_ended(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
