"""Whole runs of ``unicron-run`` and ``torchrun`` as a user starts them, and proof that nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_launcher import WarmLaunchers, environment, may_be_warm

from unicron_elastic.launcher.config.arguments import get_args_parser

DEADLINE_S = 60.0
HAS_SHUTDOWN_TIMEOUT = "--shutdown-timeout" in get_args_parser().format_usage()
for _number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:  # by nohup, say; what the tests start is not to inherit it
        signal.signal(_number, lambda *_: None)

# A worker that tells its generation and waits for the file "stop".
NODE = """
import os, time
environ = os.environ
count, size, rank = environ["TORCHELASTIC_RESTART_COUNT"], environ["WORLD_SIZE"], environ["RANK"]
os.write(1, f"GENERATION {count} of {size} rank {rank} pid {os.getpid()}\\n".encode())
while not os.path.exists(os.path.join(environ["PROBE"], "stop")):
    time.sleep(0.02)
"""


class Run:
    """One launcher process with its own temporary folder, and what it has started."""

    def __init__(
        self,
        tool: str,
        arguments: list[str],
        folder: Path,
        warm: WarmLaunchers | None,
        *,
        forks_keeper: bool = False,
        **popen: Any,
    ) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.temporary = folder / f"tmp-{self.mark}"
        self.temporary.mkdir()
        self.out_path, self.err_path = folder / f"out-{self.mark}", folder / f"err-{self.mark}"
        environ = environment(self.mark, folder)
        environ |= {"TMPDIR": str(self.temporary), "XDG_STATE_HOME": str(folder / "state")}
        more = popen.pop("env", {})
        environ |= more
        wrap = popen.pop("wrap", None)
        command = [os.path.join(sysconfig.get_path("scripts"), tool), *arguments]
        if wrap is not None:
            command = ["bash", "-c", wrap, "bash", *command]
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            if warm is not None and wrap is None and not popen and may_be_warm(more):
                with open(os.devnull, "rb") as null:
                    self.process: Any = warm.start(
                        command,
                        environ,
                        folder,
                        [null, out, err],
                        forks_keeper=forks_keeper,
                        forks_children=tool == "unicron" and "agent" in arguments,
                    )
                return
            self.process = subprocess.Popen(
                command, env=environ, cwd=folder, **{"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, **popen}
            )

    @property
    def out(self) -> str:
        """What came to stdout so far."""
        return self.out_path.read_text(errors="replace")

    @property
    def err(self) -> str:
        """What came to stderr so far."""
        return self.err_path.read_text(errors="replace")

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit code; fails the test at the deadline."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {deadline_s:g} s\n{self.out}\n{self.err}")

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Waits for something the run does; fails the test at the deadline or when the launcher ends first."""
        end = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            ended = self.process.poll() is not None
            if ended and not (found := condition()):
                pytest.fail(f"{what}: the launcher ended with {self.process.returncode}\n{self.out}\n{self.err}")
            if found:
                break
            if time.monotonic() > end:
                pytest.fail(f"{what}: not seen in {DEADLINE_S:g} s\n{self.out}\n{self.err}")
            time.sleep(0.01)
        return found

    def until_line(self, pattern: str, count: int = 1) -> list[str]:
        """Waits until ``count`` lines of stdout match; returns the first group of each, or the line."""
        compiled = re.compile(pattern, re.MULTILINE)
        return self.until(lambda: (found := compiled.findall(self.out))[count - 1 :] and found, f"{count} x {pattern}")

    def carriers(self) -> dict[int, str]:
        """{pid: name} of every process that this run has started and that still lives."""
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if self.mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found[int(name)] = Path(f"/proc/{name}/comm").read_text().strip()
        return found

    def named(self, name: str) -> int:
        """The pid of this run's process with this ``comm``, once it is there."""
        return self.until(lambda: [pid for pid, comm in self.carriers().items() if comm == name], name)[0]

    def assert_gone(self) -> None:
        """Fails unless every process of this run ends by itself now."""
        end = time.monotonic() + 10.0
        while left := self.carriers():
            assert time.monotonic() < end, f"processes left behind: {left}"
            time.sleep(0.01)

    def logs_left(self) -> list[str]:
        """Temporary log folders that the run has not removed."""
        return [path.name for path in self.temporary.glob("torchelastic_*")]

    def shared_memory_left(self, made: list[str]) -> list[str]:
        """Which of the entries that this run's own workers said they made are still in /dev/shm."""
        return [name for name in made if os.path.exists(f"/dev/shm/{name.lstrip('/')}")]

    def clear(self) -> None:
        """Ends what a failed test left running: processes that carry this run's own mark, and no others."""
        for pid in [self.process.pid, *self.carriers()]:
            if pid != self.process.pid or self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Launcher:
    """Starts runs in a test's folder."""

    def __init__(self, folder: Path, warm: WarmLaunchers | None, *, forks_keeper: bool) -> None:
        self.folder = folder
        self.warm = warm
        self.forks_keeper = forks_keeper
        self.runs: list[Run] = []

    def script(self, name: str, text: str) -> str:
        """Writes a script and returns its name, relative to the folder in which runs start."""
        (self.folder / name).write_text(text)
        return name

    @staticmethod
    def is_listening(port: int) -> bool:
        """Whether somebody listens on this port of this host."""
        with socket.socket() as probe:
            return probe.connect_ex(("localhost", port)) == 0

    def start(self, *arguments: str, tool: str = "unicron-run", fast: bool = True, **popen: Any) -> Run:
        """Starts a run; ``fast`` preloads no torch, for tests that are not about the warm start.

        The launcher is a fork of one process for all, but for a test that is marked ``cold``, or says how it starts.
        In one that is marked ``trains``, torch is there at once.
        """
        own = ["--unicron-preload=json"] if fast and tool == "unicron-run" and not self.forks_keeper else []
        if not HAS_SHUTDOWN_TIMEOUT:  # torch 2.11: the 30 s that are the default elsewhere
            arguments = tuple(word for word in arguments if not word.startswith("--shutdown-timeout="))
        warm = self.warm if tool in ("unicron", "unicron-run") else None
        run = Run(tool, [*own, *arguments], self.folder, warm, forks_keeper=self.forks_keeper, **popen)
        self.runs.append(run)
        return run

    def run(self, *arguments: str, **options: Any) -> Run:
        """Starts a run and waits for its end."""
        run = self.start(*arguments, **options)
        run.wait()
        return run


@pytest.fixture
def launcher(tmp_path: Path, request: pytest.FixtureRequest, warm_launchers: WarmLaunchers) -> Iterator[Launcher]:
    """Runs of this test; each must leave no process behind, and in the end none does."""
    cold, trains = (request.node.get_closest_marker(name) for name in ("cold", "trains"))
    made = Launcher(tmp_path, None if cold else warm_launchers, forks_keeper=trains is not None)
    try:
        yield made
        for run in made.runs:
            if run.process.poll() is not None and "torchrun" not in str(run.process.args):
                run.assert_gone()
    finally:
        for run in made.runs:
            run.clear()
            sys.stdout.write(f"{run.process.args}:\n{run.err}\n")  # pytest shows it if the test has failed


@pytest.fixture
def short() -> Iterator[dict[str, str]]:
    """For runs with workers of a DataLoader: they make sockets below TMPDIR, whose names must be short."""
    with tempfile.TemporaryDirectory(prefix="u-", dir="/tmp") as folder:
        yield {"TMPDIR": folder}


def read_until(fd: int, wanted: bytes, deadline_s: float = DEADLINE_S) -> bytes:
    """Reads a pipe or terminal until ``wanted`` has come."""
    seen = b""
    end = time.monotonic() + deadline_s
    while wanted not in seen:
        assert select.select([fd], [], [], max(0.0, end - time.monotonic()))[0], f"... {seen[-300:]!r} is all that came"
        try:
            chunk = os.read(fd, 4096)
        except OSError:  # EIO: nobody has the terminal open any more
            chunk = b""
        assert chunk, f"the end came after ... {seen[-300:]!r}"
        seen += chunk
    return seen


@pytest.fixture
def reader() -> Callable[..., bytes]:
    """``read_until`` for the test modules, which cannot import this file."""
    return read_until


@pytest.fixture
def node_options(launcher: Any) -> list[str]:
    """Everything but --nnodes; the port is free now."""
    launcher.script("node.py", NODE)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    return [
        "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=job",
        "--rdzv-conf=last_call_timeout=1", "--max-restarts=3", "node.py",
    ]  # fmt: skip
