"""Who takes part in the benchmark of recovery: how each one's job is launched, and how a dead place is filled again.

To take part, a class has ``name``, ``replaces`` and ``world_after`` and the three methods of ``Competitor``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from _launchers import LAUNCHER_VARIABLES, TORCHRUN, UNICRON, Launcher

PLAIN_DDP, OURS = TORCHRUN.name, UNICRON.name
WORKERS = Path(__file__).parent / "workers"
WORLD_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_RANK")
PR_SET_PDEATHSIG = 1
INSTALL = "docs/benchmark-recovery.md says how to make one"


@dataclass(frozen=True)
class Job:
    """What is launched: ``options`` are those of ``workers/recovery_common.py``."""

    folder: Path
    ranks: int
    options: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """A process to start: its words, and what it needs in its environment."""

    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start it in a session of its own, its output appended to ``output`` in ``folder``."""
        strange = (*LAUNCHER_VARIABLES, "TORCHFT_", "NVRX_")
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(strange) and name not in WORLD_VARIABLES and name not in TORCHRUN.environment
        }
        with (folder / "output").open("ab") as output:
            return subprocess.Popen(
                self.words,
                env={**kept, "OMP_NUM_THREADS": "1", **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509  (there is only one thread)
            )


class Competitor(Protocol):
    """One way of training that goes on when a rank dies."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    @property
    def replaces(self) -> bool:
        """Whether a dead rank is replaced, so that the world becomes whole again."""

    def problem(self) -> str | None:
        """Why it cannot take part, as a sentence; None if it can."""

    def commands(self, job: Job) -> list[Command]:
        """What is started, in this order, for a whole job."""

    def replacement(self, job: Job, slot: int) -> Command | None:
        """What is started when the process of ``slot`` has been killed; None if that is not for the benchmark to do."""


@dataclass(frozen=True)
class Launched:
    """A job that one launcher on this machine holds together and restarts."""

    name: str
    launcher: Launcher
    worker: str
    needs: str = "torch"  # the module without which it cannot take part
    restarts: int = 3
    replaces: bool = True
    worker_options: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """Whether launcher and module are there."""
        if not self.launcher.path.exists():
            return f"{self.launcher.path} does not exist"
        module, _, attribute = self.needs.partition(":")
        if importlib.util.find_spec(module) is None:
            return f"there is no module {module}"
        if attribute and not hasattr(importlib.import_module(module), attribute):
            return f"{module} has no {attribute}"
        return None

    def commands(self, job: Job) -> list[Command]:
        """The launcher alone."""
        own = (f"--nproc-per-node={job.ranks}", f"--max-restarts={self.restarts}", f"--log-dir={job.folder / 'logs'}")
        words = (
            str(self.launcher.path),
            "--standalone",
            *own,
            str(WORKERS / self.worker),
            *job.options,
            *self.worker_options,
        )
        return [Command(words, dict(self.launcher.environment))]

    def replacement(self, job: Job, slot: int) -> Command | None:  # noqa: ARG002
        """The launcher sees to it."""
        return None


@dataclass(frozen=True)
class Torchft:
    """Replicas of one process each under a lighthouse.

    The benchmark itself starts the replacement, at the moment of the kill: a supervisor that could not be faster.
    """

    python: Path | None
    name: str = "torchft"
    heartbeat_timeout_ms: int = 500  # five heartbeats; by default 5000, and the survivors wait for all of it
    join_timeout_ms: int = 1_000  # by default 60,000: what the lighthouse waits for replicas that may still come
    quorum_tick_ms: int = 10
    replaces: bool = True
    _port: list[int] = field(default_factory=list)

    def problem(self) -> str | None:
        """Whether the virtual environment has torchft."""
        return _problem_of(self.python, "torchft", "--torchft-python")

    def commands(self, job: Job) -> list[Command]:
        """The lighthouse, then the replicas."""
        assert self.python is not None
        self._port[:] = [free_port()]
        lighthouse = Command(
            (
                str(self.python.parent / "torchft_lighthouse"),
                f"--bind=127.0.0.1:{self._port[0]}",
                "--min_replicas=1",
                f"--heartbeat_timeout_ms={self.heartbeat_timeout_ms}",
                f"--join_timeout_ms={self.join_timeout_ms}",
                f"--quorum_tick_ms={self.quorum_tick_ms}",
            )
        )
        return [lighthouse, *(self.replacement(job, slot) for slot in range(job.ranks))]

    def replacement(self, job: Job, slot: int) -> Command:
        """A replica, the first one of its place or another."""
        lighthouse = f"--lighthouse=http://127.0.0.1:{self._port[0]}"
        worker = str(WORKERS / "recovery_torchft.py")
        return Command((str(self.python), worker, f"--slot={slot}", lighthouse, *job.options))


@dataclass(frozen=True)
class InProcess:
    """NVIDIA's in-process restart; its processes are started plainly, for LOCAL_RANK must not be set on a CPU."""

    python: Path | None
    name: str = "nvrx-inprocess"
    replaces: bool = False

    def problem(self) -> str | None:
        """Whether the virtual environment has it."""
        return _problem_of(self.python, "nvidia_resiliency_ext", "--nvrx-python")

    def commands(self, job: Job) -> list[Command]:
        """The process that holds the store, so that rank 0 may be killed too; then the ranks."""
        worker = (str(self.python), str(WORKERS / "recovery_nvrx.py"), *job.options)
        common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        common |= {"WORLD_SIZE": str(job.ranks)}
        ranks = [Command(worker, {**common, "RANK": str(rank)}) for rank in range(job.ranks)]
        return [Command((*worker, "--serve"), common), *ranks]

    def replacement(self, job: Job, slot: int) -> None:
        """A dead process does not come back."""


def competitors(torchft_python: Path | None, nvrx_python: Path | None) -> list[Competitor]:
    """All of them, in the order of the table."""
    return [
        plain_ddp(),
        Torchft(torchft_python),
        Torchft(torchft_python, name="torchft-default", heartbeat_timeout_ms=5_000, join_timeout_ms=60_000),
        InProcess(nvrx_python),
        _unicron(OURS),
        _unicron("unicron-reproducible", "--reproducible"),
    ]


def plain_ddp() -> Launched:
    """DDP with checkpoints under torchrun; without them, what the undisturbed step is compared with."""
    return Launched(PLAIN_DDP, TORCHRUN, "recovery_torchrun.py")


def _unicron(name: str, *options: str) -> Launched:
    return Launched(name, UNICRON, "recovery_unicron.py", needs="unicron_elastic:Run", worker_options=options)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def _die_with_parent() -> None:
    """Of a benchmark that is killed itself, which then cleans up nothing, no launcher stays."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _problem_of(python: Path | None, module: str, option: str) -> str | None:
    if python is None:
        return f"no Python with {module} was named with {option}; {INSTALL}"
    if not python.exists():
        return f"{python} does not exist; {INSTALL}"
    done = subprocess.run([str(python), "-c", f"import {module}, torch"], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{python} cannot import {module}: {last}"
    return None
