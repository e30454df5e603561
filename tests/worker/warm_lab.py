"""A warm process and its workers, with the agent's ends of all that they were given."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unicron_elastic.launcher.agent.process.warm import WarmProcess
from unicron_elastic.worker.channel import Channel, ChannelClosed
from unicron_elastic.worker.pulse import PulsePage

if TYPE_CHECKING:
    from conftest import Lab

TELL = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv,
    "orig_argv": sys.orig_argv,
    "env": dict(os.environ),
    "path": sys.path,
    "cwd": os.getcwd(),
    "stdin": sys.stdin.read(),
    "session": os.getsid(0) == os.getpid(),
    "name": open("/proc/self/comm").read().strip(),
    "main": __name__,
    "file": globals().get("__file__"),
    "fds": [os.readlink(entry.path).partition(":")[0] for entry in os.scandir("/proc/self/fd") if int(entry.name) > 2],
    "preloaded": sorted({"torch", "colorsys"} & set(sys.modules)),
}))
print("to stderr", file=sys.stderr)
"""


class Forked:
    """A worker forked from the warm process, with the agent's ends of all that it was given."""

    def __init__(self, lab: Lab, warm: WarmProcess, argv: Sequence[str], env: dict[str, str], cwd: str) -> None:
        self._lab = lab
        self.control, theirs = Channel.pair()
        self.control.settimeout(30.0)
        self.page = PulsePage()
        stdin_read, stdin_write = os.pipe()
        self.stdout, stdout_write = os.pipe()
        self.stderr, stderr_write = os.pipe()
        os.write(stdin_write, b"from stdin")
        os.close(stdin_write)
        streams = [stdin_read, stdout_write, stderr_write]
        try:
            number = warm.request_fork(argv, env, cwd, [theirs.fileno(), self.page.fd, *streams], [0, 1, 2])
        finally:
            theirs.close()
            for fd in streams:
                os.close(fd)
        self.pid = lab.processes.wait_for_pid(number, "worker")

    def output(self) -> tuple[str, str]:
        """What it wrote to stdout and stderr, up to its end."""
        return self._lab.read_all(self.stdout), self._lab.read_all(self.stderr)

    def said(self) -> list[dict[str, Any]]:
        """What it said on its control channel, up to its end."""
        messages: list[dict[str, Any]] = []
        with contextlib.suppress(ChannelClosed):
            while True:
                messages.append(self.control.receive()[0])
        return [message for message in messages if message.get("is") != "Ending"]

    def close(self) -> None:
        self.control.close()
        self.page.close()
        os.close(self.stdout)
        os.close(self.stderr)


class Warmer:
    """Starts warm processes and their workers, and gives everything back."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.script = folder / "train.py"
        self.script.write_text(TELL)
        self._made: list[Forked] = []
        self._begun: list[WarmProcess] = []

    def command(self, *args: str) -> list[str]:
        return [sys.executable, "-u", str(self.script), *args]

    def begin(self, preload: str, argv: Sequence[str] = (), **env: str) -> WarmProcess:
        warm = WarmProcess(self.lab.loop, self.lab.processes, preload)
        self._begun.append(warm)
        warm.begin(argv or self.command(), {**os.environ, **env}, str(self.folder), [0, 1, 2])
        return warm

    def fork(
        self, warm: WarmProcess, argv: Sequence[str] = (), env: dict[str, str] | None = None, cwd: str = "/"
    ) -> Forked:
        forked = Forked(self.lab, warm, argv or self.command(), dict(os.environ) if env is None else env, cwd)
        self._made.append(forked)
        return forked

    def close(self) -> None:
        for forked in self._made:
            forked.close()
        for warm in self._begun:
            warm.end()
