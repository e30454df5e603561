"""One launch of a case: its agents, what is done to them from outside, until all have ended, and what is left then."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from differential.case import Case, Fault

__all__ = ["MARK", "Begin", "Launched", "Log", "begin_agent", "deadline_s", "launch", "read_logs"]

MARK = "UNICRON_DIFFERENTIAL"
WORKER = Path(__file__).with_name("worker.py")
PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
POLL_S = 0.02
STOPPED_S = 5.0
TORCHS = ("torchinductor_root",)  # makes a folder when some of its parts are imported
STORM = 25  # processes beyond what can be explained, at which a job is ended
GONE_S = 5.0
BASE_S, EACH_S = 35.0, 6.0
STRANGE = ("UNICRON_", "PET_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")


@dataclass
class Log:
    """The lines of one process."""

    place: str
    pid: int
    lines: list[dict[str, Any]]

    def of(self, what: str) -> list[dict[str, Any]]:
        """Those of this kind."""
        return [line for line in self.lines if line["what"] == what]


@dataclass
class Launched:
    """What came of a launch. ``codes`` by node; None: it had to be ended."""

    codes: dict[str, list[int | None]] = field(default_factory=dict)
    logs: list[Log] = field(default_factory=list)
    finals: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)  # the state of a process, as it ended
    problems: list[str] = field(default_factory=list)  # of processes: left behind, too many, beyond the deadline
    done: list[str] = field(default_factory=list)  # what was done from outside
    took_s: float = 0.0
    err: str = ""


class Process(Protocol):
    """A `Process` is what a launch uses of ``subprocess.Popen``."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""

    def wait(self) -> int:
        """Return the exit code once there is one."""


Begin = Callable[[Sequence[str], Mapping[str, str], Path, Sequence[IO[bytes]]], Process]


@dataclass
class _Agent:
    node: str
    process: Process
    is_killed: bool = False


def deadline_s(case: Case) -> float:
    """For a launch, by what happens in it and how loaded the machine is."""
    load = max(1.0, min(4.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
    pace = case.steps * (case.micro_batches * case.pace_s + case.between_s) + case.after_s
    return (BASE_S + EACH_S * len(case.faults) + pace) * load


def begin_agent(words: Sequence[str], env: Mapping[str, str], folder: Path, streams: Sequence[IO[bytes]]) -> Process:
    """Start an agent in ``folder``, with ``streams`` for what it writes and for what it complains of."""
    out, err = streams
    return subprocess.Popen(
        words, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
        start_new_session=True, preexec_fn=_die_with_parent,  # noqa: PLW1509  (it only calls prctl)
    )  # fmt: skip


def launch(case: Case, folder: Path, endpoint: str = "", begin: Begin = begin_agent) -> Launched:
    """Runs ``case`` in ``folder``; ``endpoint`` is that of an etcd for cases with nodes, ``begin`` starts an agent."""
    (folder / "case.json").write_text(case.to_json())
    return _Launch(case, folder, endpoint, begin).run()


class _Launch:
    """While it goes on."""

    def __init__(self, case: Case, folder: Path, endpoint: str, begin: Begin) -> None:
        self.case, self.folder, self.endpoint, self.begin = case, folder, endpoint, begin
        self.mark = uuid.uuid4().hex
        self.agents: list[_Agent] = []
        self.found = Launched()
        self.waiting = [fault for fault in case.faults if not fault.is_inside]
        self.due: list[tuple[float, Fault]] = []
        self.stopped: list[tuple[float, _Agent]] = []
        self.most = 3 * case.ranks + 3 * len(case.faults) + 4 + STORM

    def run(self) -> Launched:
        """Until all have ended."""
        started = time.monotonic()
        end = started + deadline_s(self.case)
        try:
            for number in range(max(1, self.case.nodes)):
                self._start("abcd"[number])
            while any(agent.process.poll() is None for agent in self.agents):
                self._act()
                if time.monotonic() > end:
                    self.found.problems.append(f"the job had not ended after {end - started:.0f} s")
                    self._ask_for_stacks()
                    break
                if len(list(self.folder.glob("log.*"))) > self.most:
                    self.found.problems.append(f"more than {self.most} processes were started")
                    break
                time.sleep(POLL_S)
            for agent in self.agents:
                if not agent.is_killed:
                    self.found.codes.setdefault(agent.node, []).append(agent.process.poll())
            self._see_what_is_left(is_ended=not self.found.problems)
        finally:
            self._kill_all()
        self.found.took_s = time.monotonic() - started
        self.found.logs = read_logs(self.folder)
        for log in self.found.logs:
            path = self.folder / f"final.{log.place}.{log.pid}"
            if path.exists():
                self.found.finals[(log.place, log.pid)] = torch.load(path, weights_only=False)
        self.found.err = (self.folder / "err").read_text(errors="replace")
        return self.found

    def _start(self, node: str) -> None:
        case = self.case
        where = ["--standalone"]
        if case.nodes:
            most = max(case.nodes, len({*"abcd"[: case.nodes], *(f.place for f in case.faults if not f.is_inside)}))
            where = [
                f"--nnodes={case.least_nodes}:{most}", "--rdzv-backend=unicron", f"--rdzv-endpoint={self.endpoint}",
                f"--rdzv-id={self.mark}", "--rdzv-conf=last_call_timeout=2", "--local-addr=127.0.0.1",
                "--unicron-isolate-after=0",  # the quarantine would be that of all cases that share this etcd
            ]  # fmt: skip
        words = [
            str(Path(sys.executable).parent / "unicron-run"), *where, f"--nproc-per-node={case.ranks_per_node}",
            "--max-restarts=12", "--unicron-console=plain", f"--unicron-ledger={self.folder / f'ledger-{node}'}",
            str(WORKER), str(self.folder),
        ]  # fmt: skip
        temporary = self.folder / f"tmp-{len(self.agents)}"
        temporary.mkdir()
        environment = {name: value for name, value in os.environ.items() if not name.startswith(STRANGE)} | {
            MARK: self.mark,
            "TMPDIR": str(temporary),
            "XDG_STATE_HOME": str(self.folder / f"state-{node}"),
            "OMP_NUM_THREADS": "1",
            "UNICRON_NODE_NAME": node,
            "RES_OPTIONS": "timeout:1 attempts:1",
        }
        with (self.folder / "out").open("ab") as out, (self.folder / "err").open("ab") as err:
            process = self.begin(words, environment, self.folder, (out, err))
        self.agents.append(_Agent(node, process))

    # -- what is done from outside ------------------------------------------------------------------------------------

    def _act(self) -> None:
        now = time.monotonic()
        for fault in [each for each in self.waiting if (self.folder / f"reached-{each.step}").exists()]:
            self.waiting.remove(fault)
            self.due.append((now + fault.delay_s, fault))
        for item in [each for each in self.due if each[0] <= now]:
            self.due.remove(item)
            self._do(item[1])
        for item in [each for each in self.stopped if each[0] <= now]:
            self.stopped.remove(item)
            with contextlib.suppress(ProcessLookupError):
                os.kill(item[1].process.pid, signal.SIGCONT)

    def _do(self, fault: Fault) -> None:
        agent = next((each for each in self.agents if each.node == fault.place and not each.is_killed), None)
        is_alive = agent is not None and agent.process.poll() is None
        if fault.kind == "node-join":
            if self.agents and all(each.process.poll() is not None for each in self.agents):
                return
            self._start(fault.place)
        elif not is_alive or agent is None:
            return
        elif fault.kind == "agent-stop":
            os.kill(agent.process.pid, signal.SIGSTOP)
            self.stopped.append((time.monotonic() + STOPPED_S, agent))
        else:
            agent.is_killed = True
            os.kill(agent.process.pid, signal.SIGKILL)
            if fault.kind == "node-return":
                self._start(fault.place)
        self.found.done.append(f"{fault.kind} {fault.place}")

    # -- the end ------------------------------------------------------------------------------------------------------

    def _see_what_is_left(self, *, is_ended: bool) -> None:
        if not is_ended:
            return
        end = time.monotonic() + GONE_S * max(1.0, os.getloadavg()[0] / 2)
        while (left := self._carriers()) and time.monotonic() < end:
            time.sleep(POLL_S)
        if left:
            self.found.problems.append(f"processes were left behind: {', '.join(sorted(left.values()))}")
        if all(codes == [0] for codes in self.found.codes.values()):  # else its error files are for people
            files = [
                str(path.relative_to(self.folder)) for path in self.folder.glob("tmp-*/*") if path.name not in TORCHS
            ]
            if files:
                self.found.problems.append(f"files were left behind: {', '.join(sorted(files)[:4])}")

    def _carriers(self) -> dict[int, str]:
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if self.mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found[int(name)] = Path(f"/proc/{name}/comm").read_text().strip()
        return found

    def _ask_for_stacks(self) -> None:
        living = self._carriers()  # the number of one that has ended may be another process's by now
        for log in (each for each in read_logs(self.folder) if each.pid in living):
            with contextlib.suppress(ProcessLookupError):
                os.kill(log.pid, signal.SIGUSR1)
                time.sleep(0.1)

    def _kill_all(self) -> None:
        for agent in self.agents:
            if agent.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent.process.pid, signal.SIGKILL)
            agent.process.wait()
        end = time.monotonic() + GONE_S
        while (left := self._carriers()) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)


def _die_with_parent() -> None:
    """In an agent before it begins: a harness that is ended leaves nothing that somebody would have to look for."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def read_logs(folder: Path) -> list[Log]:
    """Of all processes that have begun, in the order of their beginning."""
    found = []
    for path in sorted(folder.glob("log.*"), key=lambda each: each.stat().st_mtime_ns):
        _, place, pid = path.name.split(".")
        lines = [line for line in path.read_text().split("\n") if line]
        found.append(Log(place, int(pid), [json.loads(line) for line in lines]))
    return found
