"""Real jobs of several agents with a worker each, one of which comes later or is taken away."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil
from _launchers import LAUNCH_LINE, POLL_S, WORKER, Launcher, LauncherEndedError, TimedOutError
from _launchers import _environment as environment_of
from _rendezvous_names import without_name_server
from _scenarios import Run
from _steps import StepLog, read_logs

SETTLED_STEPS = 50  # before anything happens to a job
OWN_LINE = re.compile(r"\[unicron\] ")
COORDINATES = re.compile(r"(\w+) coordinates the cluster now")
TELLS_LOSS = re.compile(r"\b(?:is|are) lost\b")
NOTICE_S = 1.0  # for a launcher's words, once all step again
NAMES = ("a", "b", "c")
# As low as they may be on a machine that others use, too: with two beats missed instead of three, nodes that wait are
# taken for dead, and a third agent never comes in.
TUNED_C10D = {"last_call_timeout": "1", "keep_alive_interval": "1"}

Spawn = Callable[[str, Sequence[str], Mapping[str, str]], subprocess.Popen[bytes]]
TakeAway = Callable[[str], None]


class Meeting:
    """Where the agents of a job meet, and what a launcher is told of it."""

    def __init__(self, etcd_endpoint: str, c10d_address: str, *, is_tuned: bool) -> None:
        self._etcd_endpoint = etcd_endpoint
        self._c10d_address = c10d_address
        self._c10d_port = _free_port()
        self._is_tuned = is_tuned
        self._job = uuid.uuid4().hex

    def options(self, launcher: Launcher, name: str, nodes: str, local_address: str) -> list[str]:
        """The launcher's options of the agent of this name; the first one hosts c10d's store."""
        if launcher.program == "unicron-run":
            where = ["--rdzv-backend=unicron", f"--rdzv-endpoint={self._etcd_endpoint}"]
            conf = ["last_call_timeout=1"] if self._is_tuned else []
            where.append("--unicron-console=plain")
        else:
            where = ["--rdzv-backend=c10d", f"--rdzv-endpoint={self._c10d_address}:{self._c10d_port}"]
            conf = [f"is_host={int(name == NAMES[0])}"]
            conf += [f"{name}={value}" for name, value in TUNED_C10D.items()] if self._is_tuned else []
        where += [f"--rdzv-conf={','.join(conf)}"] if conf else []
        rest = [f"--rdzv-id={self._job}", f"--local-addr={local_address}", "--max-restarts=3", "--nproc-per-node=1"]
        return [*where, f"--nnodes={nodes}", *rest]


class Agent:
    """A launcher of one node, and what it says."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.process = process
        self.started_ns = time.monotonic_ns()
        self.lines: list[tuple[int, str]] = []  # (monotonic ns, line)
        assert process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()

    def said_ns(self, pattern: re.Pattern[str], since_ns: int) -> int | None:
        """When it first said such a line after a moment."""
        return next((at for at, line in self.lines if at >= since_ns and pattern.search(line)), None)

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            self.lines.append((time.monotonic_ns(), line.decode(errors="replace").rstrip()))


class Job:
    """One job of a launcher; as a context manager, it leaves nothing running."""

    def __init__(
        self,
        launcher: Launcher,
        meeting: Meeting,
        nodes: str,
        deadline_s: float,
        *,
        spawn: Spawn | None = None,
        take_away: TakeAway | None = None,
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        """``spawn`` starts a program on the node of a name, and ``take_away`` ends that node: by default, processes."""
        self.launcher = launcher
        self.folder = Path(tempfile.mkdtemp(prefix="unicron-benchmark-"))
        self.steps_folder = self.folder / "steps"
        self.steps_folder.mkdir()
        self.agents: dict[str, Agent] = {}
        self._meeting = meeting
        self._nodes = nodes
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._spawn = spawn or _spawn
        self._take_away = take_away or self._kill_tree
        self._addresses = addresses or dict.fromkeys(NAMES, "127.0.0.1")

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.agents.values():
            self._kill_tree(agent.name)
        for log in read_logs(self.steps_folder):  # workers of torchrun outlive a killed agent
            with contextlib.suppress(psutil.Error):
                worker = psutil.Process(log.pid)
                if any(str(self.steps_folder) in file.path for file in worker.open_files()):
                    worker.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, *names: str) -> None:
        """Starts agents, one right after the other."""
        for name in names:
            options = self._meeting.options(self.launcher, name, self._nodes, self._addresses[name])
            worker = [str(WORKER), f"--log-dir={self.steps_folder}", f"--deadline={int(self._deadline_s) + 5}"]
            argv = [str(self.launcher.path), *options, f"--log-dir={self.folder / name}", *worker]
            environment = {**environment_of(self.launcher), "UNICRON_NODE_NAME": name}
            self.agents[name] = Agent(name, self._spawn(name, argv, environment))

    def coordinator(self) -> str:
        """The agent on which most depends: who hosts c10d's store, or leads unicron's heartbeats."""
        lines = [each for agent in self.agents.values() for each in agent.lines]
        found = [match[1] for _, line in sorted(lines) if (match := COORDINATES.search(line))]
        return found[-1] if found and found[-1] in self.agents else NAMES[0]

    def take_away(self, name: str) -> int:
        """Ends a node at once; the moment before, in ns."""
        at_ns = time.monotonic_ns()
        self._take_away(name)
        return at_ns

    def logs(self) -> list[StepLog]:
        """Of all workers so far."""
        return read_logs(self.steps_folder)

    def wait_for_step(self, world: int, step: int, known: frozenset[int], expected: Sequence[str]) -> list[StepLog]:
        """Waits until all ranks have processes, not of ``known``, that did ``step``; the agents ``expected`` must live.

        Raises TimedOutError, LauncherEndedError.
        """
        while True:
            found = {log.rank: log for log in self.logs() if log.pid not in known and log.last_step() >= step}
            if len(found) == world:
                return [found[rank] for rank in sorted(found)]
            self.check(f"step {step} of {world} ranks", expected)
            time.sleep(POLL_S)

    def check(self, what: str, expected: Sequence[str]) -> None:
        """Raises TimedOutError or LauncherEndedError if there is nothing to wait for any more."""
        for name in expected:
            if (code := self.agents[name].process.poll()) is not None:
                raise LauncherEndedError(f"the agent {name} ended with exit code {code} before {what}")
        if time.monotonic() > self._deadline:
            raise TimedOutError(f"no {what} within {self._deadline_s:g} s of the launch")

    def _kill_tree(self, name: str) -> None:
        """All processes that an agent has started, in whatever groups they are, and itself: its node is gone."""
        agent = self.agents[name]
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(agent.process.pid)
            tree = [top, *top.children(recursive=True)]
            for process in tree:  # first stopped, so that none answers the end of another
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            for process in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.process.pid, signal.SIGKILL)
        agent.process.wait(timeout=10.0)


def join(job: Job, run: Run) -> None:
    """A third agent comes to two that train: how long do they stand still?"""
    with _problems(run, job):
        job.start("a", "b")
        old = job.wait_for_step(2, SETTLED_STEPS, frozenset(), "ab")
        known = frozenset(log.pid for log in job.logs())
        job.start("c")
        new = job.wait_for_step(3, 1, known, "abc")
        _standstill(run, old, new)
        run.values["launch_to_step_ms"] = (_first_step_ns(new) - job.agents["c"].started_ns) / 1e6


def loss(job: Job, run: Run, *, of_coordinator: bool) -> None:
    """One of three nodes is taken away: how long do the others stand still?"""
    with _problems(run, job):
        job.start(*NAMES)
        old = job.wait_for_step(3, SETTLED_STEPS, frozenset(), NAMES)
        known = frozenset(log.pid for log in job.logs())
        coordinator = job.coordinator()
        others = [name for name in NAMES if name != coordinator]
        victim = coordinator if of_coordinator else others[run.repetition % len(others)]
        left = [name for name in NAMES if name != victim]
        run.notes["victim"] = [victim]
        lost_ns = job.take_away(victim)
        new = job.wait_for_step(2, 1, known, left)
        _standstill(run, old, new)
        run.values["loss_to_step_ms"] = (_first_step_ns(new) - lost_ns) / 1e6
        _wait_for_words(job, left, lost_ns)
        is_ours = job.launcher.program == "unicron-run"
        for measure, pattern in (("noticed_ms", OWN_LINE if is_ours else LAUNCH_LINE), ("told_ms", TELLS_LOSS)):
            moments = [job.agents[name].said_ns(pattern, lost_ns) for name in left]
            if heard := [at for at in moments if at is not None]:
                run.values[measure] = (min(heard) - lost_ns) / 1e6


def _wait_for_words(job: Job, names: Sequence[str], since_ns: int) -> None:
    """The words of a loss may come after the step that ended it."""
    end = time.monotonic() + NOTICE_S
    while time.monotonic() < end and not any(job.agents[name].said_ns(TELLS_LOSS, since_ns) for name in names):
        time.sleep(POLL_S)


def _standstill(run: Run, old: Sequence[StepLog], new: Sequence[StepLog]) -> None:
    """From the last step of the old world to the first one of all ranks of the new one."""
    last_ns = max(log.step_ns()[-1] for log in old)
    run.values["standstill_ms"] = (_first_step_ns(new) - last_ns) / 1e6


def _first_step_ns(logs: Sequence[StepLog]) -> int:
    return max(log.step_ns()[0] for log in logs)


@contextlib.contextmanager
def _problems(run: Run, job: Job) -> Iterator[None]:
    """A failure of the job is a result like any other."""
    try:
        yield
    except (LauncherEndedError, TimedOutError, psutil.Error) as error:
        run.problem = str(error)
        run.notes["last_lines"] = [
            f"{agent.name}: {line}" for agent in job.agents.values() for _, line in agent.lines[-6:]
        ]


def _spawn(_name: str, argv: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*without_name_server(), *argv],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
