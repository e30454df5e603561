"""Room and writes in the folders of the job."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from health_lab import Findings, only

from unicron_elastic.base.fault import Severity, Status
from unicron_elastic.base.finding import Level, ProbeNotes
from unicron_elastic.health.host import disk
from unicron_elastic.health.host.disk import DiskProbe


class FakeStatvfs:
    """A file system of 1 TiB and a million files."""

    f_frsize = 4096
    f_blocks = (1 << 40) // 4096
    f_files = 1_000_000
    f_ffree = f_favail = 900_000
    f_bfree = f_bavail = f_blocks // 2

    def free(self, size: int) -> None:
        self.f_bfree = self.f_bavail = size // 4096

    def asked(self, _folder: str) -> Any:
        return self


@pytest.fixture
def state() -> FakeStatvfs:
    return FakeStatvfs()


def refuse_writes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def write(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk.os, "write", write)


def test_a_folder_with_room(tmp_path: Path, findings: Findings) -> None:
    probe = DiskProbe(str(tmp_path), low_bytes=1, notes=ProbeNotes(findings.say))
    assert [probe.check(at) for at in (1.0, 2.0, 100.0)] == [[], [], []]
    assert list(tmp_path.iterdir()) == []
    assert findings.said == []


@pytest.mark.parametrize(
    ("low_bytes", "free", "is_low"), [(None, 19 << 30, True), (None, 21 << 30, False), (50 << 30, 49 << 30, True)]
)
def test_little_room(tmp_path: Path, state: FakeStatvfs, low_bytes: int | None, free: int, is_low: bool) -> None:
    state.free(free)
    found = DiskProbe(str(tmp_path), low_bytes=low_bytes, statvfs=state.asked).check(3.0)
    assert [(each.probe, each.level) for each in found] == ([("disk.space", Level.WARN)] if is_low else [])


def test_a_small_file_system_may_have_less_room(tmp_path: Path, state: FakeStatvfs) -> None:
    state.f_blocks = (10 << 30) // 4096
    state.free(1 << 30)
    probe = DiskProbe(str(tmp_path), statvfs=state.asked)
    assert probe.check(1.0) == []
    state.free(1 << 28)
    found = only(probe.check(2.0))
    assert found.reason == f"Only 0.2 GiB of 10.0 GiB are free in {tmp_path}."
    assert (found.subject, found.status, found.severity) == (str(tmp_path), Status.STORAGE_ERROR, Severity.SEV2)


def test_few_files_left(tmp_path: Path, state: FakeStatvfs) -> None:
    state.f_ffree = state.f_favail = 42
    probe = DiskProbe(str(tmp_path), statvfs=state.asked)
    assert only(probe.check(1.0)).reason == f"Only 42 more files can be made in {tmp_path}."
    state.f_ffree = state.f_favail = 0
    found = only(probe.check(2.0))
    assert (found.probe, found.level) == ("disk.write", Level.CRITICAL)
    state.f_files = 0  # such as btrfs, which has no limit and counts none
    assert probe.check(3.0) == []


def test_no_room_at_all(tmp_path: Path, state: FakeStatvfs) -> None:
    state.free(0)
    found = only(DiskProbe(str(tmp_path), statvfs=state.asked).check(1.0))
    assert (found.probe, found.level, found.reason) == ("disk.write", Level.CRITICAL, f"{tmp_path} is full.")


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "is full."), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only"), (errno.EIO, "errors")],
)
def test_a_refused_write_is_told_until_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    probe = DiskProbe(str(tmp_path), low_bytes=1, write_every_s=60.0)
    assert probe.check(0.0) == []
    with monkeypatch.context() as patch:
        refuse_writes(patch, number)
        assert probe.check(59.0) == []  # no write is due
        for at in (60.0, 65.0):
            found = only(probe.check(at))
            assert (found.level, found.status) == (Level.CRITICAL, Status.STORAGE_ERROR)
            assert words in found.reason
    assert probe.check(70.0) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN, errno.EIO])
def test_a_file_system_that_is_gone(tmp_path: Path, number: int) -> None:
    def statvfs(_: str) -> os.statvfs_result:
        raise OSError(number, os.strerror(number))

    assert only(DiskProbe(str(tmp_path), statvfs=statvfs).check(1.0)).level is Level.CRITICAL


def test_a_file_system_without_nameless_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open
    asked = []

    def open_named_only(path: str, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        asked.append(path)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(disk.os, "open", open_named_only)
    assert DiskProbe(str(tmp_path), low_bytes=1).check(1.0) == []
    assert len(asked) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path, state: FakeStatvfs) -> None:
    folder = tmp_path / "run/checkpoints"
    probe = DiskProbe(str(folder), statvfs=state.asked)
    assert probe.check(1.0) == []
    assert not folder.parent.exists()
    state.free(0)
    assert only(probe.check(2.0)).subject == str(folder)


def test_a_folder_that_cannot_be_written_to_by_us_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, findings: Findings
) -> None:
    def open_refused(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(disk.os, "open", open_refused)
    probe = DiskProbe(str(tmp_path), low_bytes=1, write_every_s=0.0, notes=ProbeNotes(findings.say))
    assert [probe.check(at) for at in (1.0, 2.0)] == [[], []]
    assert findings.said == [f"Whether {tmp_path} takes writes is not watched: Permission denied."]


def test_a_path_through_a_file_is_said_once(tmp_path: Path, findings: Findings) -> None:
    (tmp_path / "file").touch()
    probe = DiskProbe(str(tmp_path / "file/folder"), notes=ProbeNotes(findings.say))
    assert [probe.check(at) for at in (1.0, 2.0)] == [[], []]
    assert findings.said == [f"{tmp_path}/file/folder cannot be watched: Not a directory."]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=64", "unicron-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("nothing can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_real_disk_that_fills_up_and_is_freed(small_disk: Path) -> None:
    probe = DiskProbe(str(small_disk), write_every_s=0.0)
    assert probe.check(1.0) == []
    with pytest.raises(OSError, match="No space"):
        (small_disk / "big").write_bytes(b"x" * (2 << 20))
    found = only(probe.check(2.0))
    assert (found.level, found.reason) == (Level.CRITICAL, f"{small_disk} is full.")
    os.truncate(small_disk / "big", (1 << 20) - 8192)
    assert only(probe.check(3.0)).probe == "disk.space"
    (small_disk / "big").unlink()
    assert probe.check(4.0) == []


def test_a_real_disk_without_files_left(small_disk: Path) -> None:
    probe = DiskProbe(str(small_disk), write_every_s=0.0)
    for number in range(os.statvfs(small_disk).f_ffree):
        (small_disk / str(number)).touch()
    assert "inodes" in only(probe.check(1.0)).reason


def test_a_real_disk_that_becomes_read_only(small_disk: Path) -> None:
    probe = DiskProbe(str(small_disk), write_every_s=0.0)
    assert probe.check(1.0) == []
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert "read-only" in only(probe.check(2.0)).reason
