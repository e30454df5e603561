"""The file of the nodes in quarantine: shared by processes, whole at every moment, never replaced if not understood."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.launcher.agent.core.quarantine_file import QuarantineFileError, add, default_path, find, lift, read

ENTRY = Quarantined(node="gpu-7", reason="GPU 3 fell off the bus.", since=1000.0, until=2000.0, by="unicron-run")
OTHER = replace(ENTRY, node="gpu-8", until=None)
PROCESSES, NODES_EACH = 8, 5
DEADLINE_S = 30.0

# Adds nodes of its own as soon as it is told to.
ADDER = """
import sys
from pathlib import Path
from unicron_elastic.launcher.agent.core.quarantine_file import add
from unicron_elastic.base.quarantine import Quarantined
print("ready", flush=True)
sys.stdin.read()
for number in range(int(sys.argv[3])):
    node = f"node-{sys.argv[2]}-{number}"
    entry = Quarantined(node=node, reason="Lost.", since=1.0, until=None, by="test")
    add(Path(sys.argv[1]), entry, wait_s=60.0)  # whatever the disk of this machine takes
"""
# Adds a node and stops for good before, or after, the call named second.
STOPPER = """
import os, signal, sys
from pathlib import Path
from unicron_elastic.launcher.agent.core import quarantine_file as quarantine
from unicron_elastic.base.quarantine import Quarantined
def stop(*call, **options):
    if sys.argv[3] == "after":
        real(*call, **options)
    print("there", flush=True)
    signal.pause()
real = getattr(os, sys.argv[2])
setattr(os, sys.argv[2], stop)
quarantine.add(Path(sys.argv[1]), Quarantined(node="gpu-8", reason="Lost.", since=1.0, until=None, by="test"))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a" / "b" / "quarantine.json"


def _become_nobody() -> None:
    try:
        os.seteuid(65534)
    except OSError:  # a container that knows one user alone
        pytest.skip("there is no other user here")


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    """A folder in which this process cannot write, also if it is root's: it is then somebody else for a while."""
    folder = Path(tempfile.mkdtemp())
    user = os.geteuid()
    try:
        folder.chmod(0o555)
        if user == 0:
            _become_nobody()
        yield folder
    finally:
        os.seteuid(user)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def _names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_missing_file_is_an_empty_list(path: Path) -> None:
    assert read(path) == ()
    assert find(path, "gpu-7", 0.0) is None
    assert not lift(path, "gpu-7")
    assert not path.parent.exists()


def test_what_was_added_is_read_found_and_lifted(path: Path) -> None:
    assert add(path, ENTRY) == ENTRY
    assert add(path, OTHER) == OTHER
    assert read(path) == (ENTRY, OTHER)
    assert find(path, "gpu-7", 1999.0) == ENTRY
    assert find(path, "gpu-7", 2000.0) is None
    assert lift(path, "gpu-7")
    assert not lift(path, "gpu-7")
    assert read(path) == (OTHER,)


def test_a_node_that_is_there_is_added_to(path: Path) -> None:
    add(path, ENTRY)
    later = add(path, replace(ENTRY, since=1500.0, until=None, reason="Again."))
    assert later == replace(ENTRY, until=None, reason="Again.")
    assert read(path) == (later,)


def test_the_file_is_readable_by_all_and_nothing_else_stays_than_the_lock(path: Path) -> None:
    before = os.umask(0o077)
    try:
        add(path, ENTRY)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    assert _names(path.parent) == ["quarantine.json", "quarantine.json.lock"]
    assert path.read_text().startswith('{\n  "version": 1,\n  "nodes": [\n    {\n      "node": "gpu-7",\n')


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    path.parent.mkdir(parents=True)
    path.symlink_to(shared / "nodes.json")
    add(path, ENTRY)
    assert path.is_symlink()
    assert _names(shared) == ["nodes.json", "nodes.json.lock"]
    assert lift(path, "gpu-7")
    assert read(shared / "nodes.json") == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Expecting value"),
        (b'{"version": 1, "nodes": [', "Expecting value"),
        (b"\xff\xfe\xfd", "codec can't decode"),
        (b"[" * 100_000, "recursion"),
        (b"[]", "an object was expected"),
        (b'{"version": 2, "nodes": [], "racks": []}', "version 2 is newer than 1"),
        (b'{"version": 1, "nodes": [{"node": "gpu-7", "since": 1, "reason": 2}]}', "nodes[0]: reason must be a text"),
    ],
)
def test_what_cannot_be_understood_is_said_and_never_replaced(path: Path, content: bytes, words: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for call in (lambda: read(path), lambda: find(path, "x", 0.0), lambda: add(path, ENTRY), lambda: lift(path, "x")):
        with pytest.raises(QuarantineFileError) as caught:
            call()
        assert str(caught.value).startswith(f"{path} is not a list of nodes in quarantine: ")
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == content
    assert set(_names(path.parent)) <= {"quarantine.json", "quarantine.json.lock"}


def test_unknown_fields_are_ignored(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"version": 1, "nodes": [{**ENTRY.to_json(), "rack": 3}], "site": "north"}))
    assert read(path) == (ENTRY,)


def test_what_is_no_regular_file_is_neither_waited_for_nor_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for each in (pipe, tmp_path):
        with pytest.raises(QuarantineFileError, match=f"^{each} cannot be read: Not a regular file$"):
            add(each, ENTRY)
    assert pipe.is_fifo()


def test_a_file_where_a_folder_should_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "quarantine.json"
    with pytest.raises(QuarantineFileError, match=r"cannot be read: Not a directory$"):
        read(path)
    with pytest.raises(QuarantineFileError, match=r"cannot be changed: (Not a directory|File exists)$"):
        add(path, ENTRY)


def test_in_a_read_only_folder_the_file_is_read_and_a_change_is_one_clear_error(read_only_folder: Path) -> None:
    path = read_only_folder / "quarantine.json"
    with pytest.raises(QuarantineFileError) as caught:
        add(path, ENTRY)
    assert str(caught.value) == f"{path} cannot be changed: Permission denied"
    assert read(path) == ()
    assert _names(read_only_folder) == []


def test_a_full_disk_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(path, ENTRY)

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(QuarantineFileError, match=r"cannot be changed: No space left on device$"):
        add(path, OTHER)
    assert read(path) == (ENTRY,)
    assert _names(path.parent) == ["quarantine.json", "quarantine.json.lock"]


def test_processes_that_add_at_once_lose_nothing(path: Path) -> None:
    argv = [sys.executable, "-c", ADDER, str(path)]
    adders = [
        subprocess.Popen(
            [*argv, str(number), str(NODES_EACH)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for number in range(PROCESSES)
    ]
    try:
        for adder in adders:
            assert adder.stdout is not None
            assert adder.stdout.readline() == "ready\n"
        for adder in adders:
            assert adder.stdin is not None
            adder.stdin.close()
        assert [adder.wait(DEADLINE_S) for adder in adders] == [0] * PROCESSES
    finally:
        for adder in adders:
            adder.kill()
            adder.wait()
            assert adder.stdout is not None
            adder.stdout.close()
    expected = {f"node-{number}-{each}" for number in range(PROCESSES) for each in range(NODES_EACH)}
    assert {entry.node for entry in read(path)} == expected


@pytest.mark.parametrize(
    ("call", "when", "is_new"),
    [("fchmod", "before", False), ("fsync", "after", False), ("replace", "before", False), ("replace", "after", True)],
)
def test_a_writer_that_is_killed_leaves_the_old_file_or_the_new_one_and_no_lock(
    path: Path, call: str, when: str, is_new: bool
) -> None:
    add(path, ENTRY)
    argv = [sys.executable, "-c", STOPPER, str(path), call, when]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "there\n"
        assert [entry.node for entry in read(path)] == ["gpu-7", "gpu-8"][: 1 + is_new]
        writer.send_signal(signal.SIGKILL)
    assert [entry.node for entry in read(path)] == ["gpu-7", "gpu-8"][: 1 + is_new]
    add(path, replace(ENTRY, node="gpu-9"))
    assert [entry.node for entry in read(path)] == ["gpu-7", *["gpu-8"][:is_new], "gpu-9"]


def test_a_lock_that_is_never_let_go_is_not_waited_for_without_end(path: Path) -> None:
    add(path, ENTRY)
    with open(f"{path}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for change in (lambda: add(path, OTHER, wait_s=0.05), lambda: lift(path, "gpu-7", wait_s=0.05)):
            with pytest.raises(QuarantineFileError) as caught:
                change()
            words = f"another process has held the lock {path}.lock for 0.05 s"
            assert str(caught.value) == f"{path} cannot be changed: {words}"
        assert read(path) == (ENTRY,)
    add(path, OTHER)


def test_without_locks_the_change_is_made_and_the_risk_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(_fd: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    said: list[str] = []
    add(path, ENTRY, said.append)
    assert said == [
        f"{path}.lock cannot be locked: No locks available. Changes of the same moment may be lost.",
    ]
    assert lift(path, "gpu-7")
    assert read(path) == ()


def test_a_fork_does_not_keep_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(path, ENTRY)
    real = os.replace
    end_r, end_w = os.pipe()

    def fork_and_replace(old: str, new: str) -> None:
        if os.fork() == 0:  # as another thread of the launcher may do at any moment
            os.close(end_w)
            os.read(end_r, 1)
            os._exit(0)
        real(old, new)

    monkeypatch.setattr(os, "replace", fork_and_replace)
    try:
        add(path, OTHER)
        monkeypatch.setattr(os, "replace", real)
        assert lift(path, "gpu-7", wait_s=0.05)
    finally:
        os.close(end_w)
        os.close(end_r)
        os.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be two users")
def test_another_user_who_may_write_in_the_folder_may_change_the_file() -> None:
    folder = Path(tempfile.mkdtemp())
    path = folder / "quarantine.json"
    try:
        folder.chmod(0o777)
        add(path, ENTRY)
        _become_nobody()
        add(path, OTHER)
        os.seteuid(0)
        assert read(path) == (ENTRY, OTHER)
    finally:
        os.seteuid(0)
        shutil.rmtree(folder)


def test_the_environment_names_the_file_else_it_is_in_the_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    monkeypatch.delenv("UNICRON_QUARANTINE", raising=False)
    assert default_path() == Path("/state/unicron/quarantine.json")
    assert default_path({"UNICRON_QUARANTINE": ""}) == Path("/state/unicron/quarantine.json")
    assert default_path({"UNICRON_QUARANTINE": "/shared/nodes.json"}) == Path("/shared/nodes.json")
