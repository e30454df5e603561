"""What an agent of a cluster starts is a fork as well, where the agent is one (see warm_launcher.py).

Its ``unicron-run`` would import torch anew for each job. Here a process that was forked together with the agent, and
has torch in memory, forks each. The agent sees the pipes, the exit code and the pid that it would have seen. Only the
parent is another one, which ends with the agent, and with it the children, as they end with an agent.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from warm_launcher import WarmProcess

OF_AGENT = "UNICRON_AGENT_PID"  # as in unicron_elastic.launcher.config.forwarded
_LAUNCHER = ("-m", "unicron_elastic.launcher.main")

Start = Callable[..., "WarmProcess"]


class ForkedChild:
    """A child of an agent, with what that uses of ``subprocess.Popen``."""

    def __init__(self, process: WarmProcess, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = process.pid
        self.stdout, self.stderr = stdout, stderr
        self._process = process
        self._has_ended = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._process.returncode

    def wait(self) -> int:
        """Return the exit code once there is one."""
        self._has_ended.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(9)

    def _wait(self) -> None:
        self._process.wait()
        self._has_ended.set()


def offer_children(start: Start, parent: int) -> None:
    """Have this process, which becomes an agent, start its children by ``start``, in the process ``parent``."""
    from unicron_elastic.launcher.node import children

    begin = partial(_begin, start, parent)
    instead: Any = SimpleNamespace(Popen=begin, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    children.subprocess = instead


def _begin(
    start: Start,
    parent: int,
    command: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    pass_fds: Sequence[int],
    **streams: object,
) -> Any:
    if tuple(command[1:3]) != _LAUNCHER:
        return subprocess.Popen(command, cwd=cwd, env=env, pass_fds=pass_fds, **streams)  # type: ignore[call-overload]
    os.stat(cwd)
    command = [os.path.join(sysconfig.get_path("scripts"), "unicron-run"), *command[3:]]
    env = {**env, OF_AGENT: str(parent)}
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    with open(os.devnull, "rb") as null, open(to_out, "wb") as its_out, open(to_err, "wb") as its_err:
        numbers = [0, 1, 2, *pass_fds]
        process = start(
            command, env, Path(cwd), [null, its_out, its_err, *pass_fds], numbers=numbers, leads_session=True
        )
    return ForkedChild(process, open(out, "rb", buffering=0), open(err, "rb", buffering=0))
