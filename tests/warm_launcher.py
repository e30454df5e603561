"""Launchers as forks of a process that has imported torch, which costs each that starts anew more than a second.

What a test starts this way is a process of its own with its own arguments, environment, folder and streams, as one that
was started anew. Run as a program, this file is the process that forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

from forked_children import offer_children
from forked_keeper import MARK as MARK_OF_PRODUCT
from forked_keeper import MARK_ROOM, Ground, freeze, run_script
from free_port import free_port

MARK = "TEST_RUN"  # in the environment of all that such a test starts; UNICRON_... would be odd to a launcher
MARK_OF_AGENT = "TEST_AGENT"  # the same, of all that an agent of a cluster starts
STARTS_WITHIN_S = 100.0
ANSWERS_WITHIN_S = 100.0
LARGEST_REQUEST = 1 << 18
MOST_FILES = 8
OUT_OF_THE_WAY = 100
OF_A_HOST = 0x40000000 | 0x04000000 | 0x00020000  # CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS
# What Python, torch and the linker read while they start: these are as they were when the forking process started.
READ_EARLY = ("PYTHON", "TORCH", "OMP_", "LD_", "LOGLEVEL", "CUDA", "HOME", "LANG", "LC_", "PATH")
# By each torch.compile, and by each rendezvous.
OF_A_JOB = ("RANK", "WORLD_SIZE")
OF_A_CHILD = {"forks_children": False, "host": None, "ends_as_script": False}
READ_EACH_TIME = ("TORCHDYNAMO_DISABLE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")


def environment(mark: str, folder: Path) -> dict[str, str]:
    """Return that of what a test starts: nothing of a job around the tests, its mark, and a folder to say things in."""
    names = [name for name in os.environ if not name.startswith(("UNICRON_", "PET_", "TORCHEL"))]
    own = {MARK: mark, "PROBE": str(folder), "OMP_NUM_THREADS": "1"}
    if _has_fixed_port():
        own["PET_MASTER_PORT"] = _port_of(folder)
    return {name: os.environ[name] for name in names} | own


@functools.cache
def _has_fixed_port() -> bool:
    """Return whether torch gives each job the same port, as before its version 2.12."""
    from unicron_elastic.launcher.config.arguments import get_args_parser

    return get_args_parser().get_default("master_port") is not None


@functools.cache
def _port_of(_folder: Path) -> str:
    """Return the port of all jobs in this folder."""
    return str(free_port())


def environment_of_no_job(folder: Path) -> dict[str, str]:
    """Return that of what is a process of its own."""
    made = environment(uuid.uuid4().hex, folder)
    return {name: value for name, value in made.items() if name not in OF_A_JOB}


def may_be_warm(env: Mapping[str, str]) -> bool:
    """Return whether a launcher with these more variables is the same when it is forked."""
    early = {name: value for name, value in env.items() if name.startswith(READ_EARLY) and name not in READ_EACH_TIME}
    return not any(os.environ.get(name) != value for name, value in early.items())


class WarmProcess:
    """A forked launcher, with what tests use of ``subprocess.Popen``."""

    def __init__(self, command: Sequence[str], pid: int, ended: socket.socket) -> None:
        self.args = command
        self.pid = pid
        self.returncode: int | None = None
        self._ended = ended

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once there is one."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], seconds)[0]:
            self.returncode = int(self._ended.recv(64))
            self._ended.close()
        return self.returncode


def _ask(
    requests: socket.socket,
    command: Sequence[str],
    env: Mapping[str, str],
    folder: Path,
    streams: Sequence[int | IO[bytes]],
    **how: object,
) -> WarmProcess:
    """Ask who forks for a process, and return it."""
    ended, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    request = json.dumps({"command": list(command), "env": dict(env), "folder": str(folder), **how})
    files = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
    with end:
        socket.send_fds(requests, [request.encode()], [*files, end.fileno()])
    assert select.select([ended], [], [], STARTS_WITHIN_S)[0], "the forking process is silent"
    return WarmProcess(command, int(ended.recv(64)), ended)


class WarmLaunchers:
    """The forking process, which starts with the first launcher."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        folder: Path,
        streams: Sequence[int | IO[bytes]],
        *,
        forks_keeper: bool = False,
        forks_children: bool = False,
        host: int | None = None,
        ends_as_script: bool = False,
    ) -> WarmProcess:
        """Start a launcher with these files from 0 on, whose keeper and warm process may be forks, too.

        So may be the launchers that an agent starts. With the pid of the first process of a host, it is on that host,
        and leads a session there. ``ends_as_script``: in the end all is done that an interpreter does at its own.
        """
        if self._requests is None:
            self._begin(env)
        assert self._requests is not None
        how = {"forks_keeper": forks_keeper, "forks_children": forks_children, "host": host}
        return _ask(self._requests, command, env, folder, streams, ends_as_script=ends_as_script, **how)

    def begin(self, said: Path, *command: str, **env: str) -> WarmProcess:
        """Start a script or a launcher in the folder in which is the file for what it says."""
        environ = {**environment_of_no_job(said.parent), **env}
        with open(os.devnull, "rb") as null, open(said, "wb") as out:
            return self.start(command, environ, said.parent, [null, out, out], forks_keeper=True)

    def ask(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a command of ``unicron`` to its end, and return what it said."""
        return self._run([os.path.join(sysconfig.get_path("scripts"), "unicron"), *words], env)

    def script(self, path: str | Path, *arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a script that nobody launched to the end of its interpreter, and return what it said."""
        return self._run(list(map(str, (path, *arguments))), env, ends_as_script=True)

    def _run(
        self, command: Sequence[str], env: Mapping[str, str], *, ends_as_script: bool = False
    ) -> subprocess.CompletedProcess[str]:
        with open(os.devnull, "rb") as null, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            here = Path.cwd()
            environ = {**environment_of_no_job(here), **env}
            process = self.start(command, environ, here, [null, out, err], ends_as_script=ends_as_script)
            try:
                code = process.wait(ANSWERS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            said = []
            for stream in (out, err):
                stream.seek(0)
                said.append(stream.read().decode())
        return subprocess.CompletedProcess(command, code, *said)

    def end(self) -> None:
        """End the forking process."""
        if self._requests is not None and self._process is not None:
            self._requests.shutdown(socket.SHUT_RDWR)  # a DataLoader's worker may have it, too
            self._requests.close()
            self._process.wait(STARTS_WITHIN_S)

    def _begin(self, env: Mapping[str, str]) -> None:
        own = {**os.environ, "OMP_NUM_THREADS": "1"}
        own = {name: value for name, value in own.items() if not name.startswith(("UNICRON_", "PET_", "TORCHEL"))}
        own[MARK] = own[MARK_OF_AGENT] = "0" * len(env[MARK])
        own[MARK_OF_PRODUCT] = "0" * MARK_ROOM
        self._requests, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            command = [sys.executable, __file__, str(there.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[there.fileno()], env=own)


class Places:
    """`Places` are those of the marks in /proc/PID/environ, where the kernel shows what a process was started with."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        self._addresses = {name: libc.getenv(name.encode()) for name in (MARK, MARK_OF_AGENT)}

    def show(self, env: Mapping[str, str]) -> None:
        """Show the marks of this environment, of those that it has."""
        for name, address in self._addresses.items():
            if value := env.get(name):
                assert len(ctypes.string_at(address)) == len(value), "marks are of one length"
                ctypes.memmove(address, value.encode(), len(value))


def _enter(host: int) -> None:
    """Go to the host of which this is the first process, as ``nsenter`` does, and begin a session."""
    pidfd = os.pidfd_open(host)
    if ctypes.CDLL(None, use_errno=True).setns(pidfd, OF_A_HOST) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter the host of process {host}")
    os.close(pidfd)
    os.setsid()


def _become(
    ground: Ground,
    places: Places,
    request: dict[str, object],
    files: Sequence[int],
    offer: Callable[[], None] | None,
) -> NoReturn:
    """Run the command's script in this fork; it is that of an agent if there is an ``offer`` to start its children."""
    code = 1
    try:
        command, env = request["command"], request["env"]
        assert isinstance(command, list)
        assert isinstance(env, dict)
        places.show(env)
        out_of_the_way = [fcntl.fcntl(file, fcntl.F_DUPFD, OUT_OF_THE_WAY) for file in files]
        for file in files:
            os.close(file)
        numbers = request.get("numbers", range(len(files)))
        assert isinstance(numbers, Sequence)
        for number, file in zip(numbers, out_of_the_way, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(env)
        tempfile.tempdir = None
        if isinstance(request["host"], int):
            _enter(request["host"])
        if request.get("leads_session"):
            os.setsid()
        os.chdir(str(request["folder"]))
        if offer is not None:
            offer()
        elif request["forks_keeper"]:  # not for an agent, which has none
            ground.offer_keeper()
        sys.argv[:] = command
        sys.path[0] = os.path.dirname(command[0])
        Path("/proc/self/comm").write_text(os.path.basename(command[0]))
        ground.renewal.renew()
        if request["ends_as_script"]:
            run_script(command[0])
        runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(ground: Ground, places: Places, requests: socket.socket) -> list[int]:
    """Fork a launcher for each request, and say its pid and, when it has ended, its exit code.

    Returns the descriptors of those that run still when nobody asks for more.
    """
    running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process

    def fork(ours: Sequence[socket.socket]) -> int:
        pid = os.fork()
        if pid == 0:
            for other, (_, end) in running.items():
                os.close(other)
                end.close()
            for each in (requests, *ours):
                each.close()
        return pid

    while True:
        for ready in select.select([requests, *running], [], [])[0]:
            if ready is not requests:
                pid, end = running.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with end, contextlib.suppress(OSError):
                    end.send(str(code).encode())
                continue
            text, files, *_ = socket.recv_fds(requests, LARGEST_REQUEST, MOST_FILES)
            if not text:
                return list(running)
            request = json.loads(text)
            end = socket.socket(fileno=files.pop())
            offer, links = None, ()
            if request["forks_children"]:
                links = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                parent = fork([end, links[0]])
                if parent == 0:
                    for file in files:
                        os.close(file)
                    _serve(ground, places, links[1])
                    os._exit(0)
                links[1].close()
                running[os.pidfd_open(parent)] = (parent, socket.socketpair()[0])
                start = partial(_ask, links[0], forks_keeper=request["forks_keeper"], **OF_A_CHILD)
                offer = partial(offer_children, start, parent)
            pid = fork([end])
            if pid == 0:
                _become(ground, places, request, files, offer)
            for each in links:
                each.close()
            for file in files:
                os.close(file)
            end.send(str(pid).encode())
            running[os.pidfd_open(pid)] = (pid, end)


def _import_what_clusters_need() -> None:
    """Import what launchers, agents and operators otherwise each would: the client of etcd, and the planner."""
    import encodings.idna  # noqa: F401

    if importlib.util.find_spec("pyetcd") is None:
        return
    from unicron_elastic.launcher import cli  # noqa: F401
    from unicron_elastic.launcher.config import odd_variables  # noqa: F401
    from unicron_elastic.launcher.config.table import SettingsTable
    from unicron_elastic.launcher.node import agent  # noqa: F401
    from unicron_elastic.rendezvous.plan import term  # noqa: F401
    from unicron_elastic.rendezvous.store import etcd  # noqa: F401

    list(SettingsTable())  # for which typer imports pydantic, as for each command


if __name__ == "__main__":
    _ground, _places = Ground(), Places()
    with _ground.preloading():
        from torch.distributed import DistError  # noqa: F401

        from unicron_elastic.compat import launch  # noqa: F401
        from unicron_elastic.compat.errors import ChildFailedError  # noqa: F401
        from unicron_elastic.compat.rendezvous import RendezvousError  # noqa: F401
        from unicron_elastic.launcher import api, main  # noqa: F401
        from unicron_elastic.launcher.agent.process import supervisor  # noqa: F401
        from unicron_elastic.training import run  # noqa: F401

        _import_what_clusters_need()
    freeze()
    for _launcher in _serve(_ground, _places, socket.socket(fileno=int(sys.argv[1]))):
        with contextlib.suppress(ProcessLookupError):  # of a process of tests that was killed, or has crashed
            signal.pidfd_send_signal(_launcher, signal.SIGKILL)
