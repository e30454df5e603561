"""A training job on the hosts of a test: etcd on one of them, an agent on each of the others, and what they do.

What the workers did is read from their logs (see ``train_rounds``). A *generation* is the processes that were in one
process group; it is known by a name that its ranks have agreed upon.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sysconfig
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hosts import Host, Network
from warm_launcher import MARK, WarmLaunchers, WarmProcess

from unicron_elastic.rendezvous.store.server import find_binary

T = TypeVar("T")

DEADLINE_S = 60.0  # of every wait
POLL_S = 0.02
ETCD_PORT = 2379
JOB = "job"
MEMBERS = f"/unicron/jobs/{JOB}/members/"
ROUND = f"/unicron/jobs/{JOB}/round"
CHECKPOINT_STEPS = 5  # as train_rounds has it
LOSS_TOLERANCE = 1e-6  # relative; sums in another order differ by far less, another batch or model by far more
LAST_LINES = 40
SCRIPT = Path(__file__).with_name("train_rounds.py")


@dataclass(frozen=True)
class Step:
    """One step that a rank has finished; times in seconds since the epoch."""

    host: str
    pid: int
    rank: int
    size: int
    restarts: int
    number: int
    loss: float
    began: float
    ended: float


@dataclass
class Generation:
    """The ranks of one process group, and the steps that they have finished."""

    name: str
    began: float  # when the first of its ranks had met the others
    loaded: dict[str, int] = field(default_factory=dict)  # by host: the step of the checkpoint
    steps: list[Step] = field(default_factory=list)

    @property
    def hosts(self) -> set[str]:
        """Where it runs."""
        return set(self.loaded)

    @property
    def ended(self) -> float:
        """When the last step was finished on the last host; when it began, if there was none."""
        return max((step.ended for step in self.steps), default=self.began)

    def of(self, host: str) -> list[Step]:
        """The steps of a host, in the order in which they were done."""
        return [step for step in self.steps if step.host == host]

    def rank_of(self, host: str) -> int:
        """The rank of the worker of a host that has done a step."""
        return self.of(host)[0].rank

    def pid_of(self, host: str) -> int:
        """The worker of a host that has done a step."""
        return self.of(host)[0].pid

    def host_of(self, rank: int) -> str:
        """The host of a rank that has done a step."""
        return next(step.host for step in self.steps if step.rank == rank)

    def __str__(self) -> str:
        numbers = [step.number for step in self.steps]
        steps = f"steps {min(numbers)} to {max(numbers)}" if numbers else "no step"
        return f"{self.name[:6]} on {', '.join(sorted(self.hosts))}: {steps}, {self.began:.3f} to {self.ended:.3f}"


class Agent:
    """One ``unicron-run`` on a host, and what it says."""

    def __init__(self, host: Host, process: WarmProcess, out: Path) -> None:
        self.host = host
        self.process = process
        self.out = out

    @property
    def said(self) -> str:
        """Its output and that of its worker."""
        return self.out.read_text(errors="replace")

    @property
    def last_lines(self) -> str:
        """The end of its output, with its name and its exit code."""
        lines = self.said.splitlines()[-LAST_LINES:]
        return "\n".join([f"--- {self.host.name}, exit code {self.process.poll()}:", *lines])

    def kill(self) -> None:
        """Kills the agent alone; what it has started is to end by itself."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def until_said(self, word: str) -> None:
        """Waits until the output has this in it."""
        until(lambda: word in self.said, f"{self.host.name} to say {word!r}", lambda: self.last_lines)


class Etcd:
    """``unicron etcd`` on a host; it keeps its data."""

    def __init__(self, host: Host, folder: Path, warm: WarmLaunchers) -> None:
        self.host = host
        self.warm = warm
        self.endpoint = f"{host.address}:{ETCD_PORT}"
        self._folder = folder
        self._process: WarmProcess | None = None

    def start(self) -> None:
        """Starts it and waits until it serves; also again."""
        out = self._folder / "etcd.out"
        out.write_bytes(b"")
        options = [f"--host={self.host.address}", f"--port={ETCD_PORT}", f"--data-dir={self._folder / 'etcd'}"]
        command = [script_path("unicron"), "etcd", *options]
        self._process = self.host.start_warm(command, warm=self.warm, env=environment({}), cwd="/", out=out)
        until(lambda: b" serves " in out.read_bytes(), "etcd to serve", out.read_text)

    @property
    def pid(self) -> int:
        """Of the server itself."""
        found = [pid for pid in self.host.pids() if comm(pid) == "etcd"]
        assert len(found) == 1, f"{len(found)} processes are named etcd"
        return found[0]

    def kill(self) -> None:
        """Kills the server, and waits until the command that ran it has ended, too."""
        assert self._process is not None
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(DEADLINE_S)

    def members(self) -> dict[str, int]:
        """The hosts of the agents that the job knows of, and for which round each waits or has waited."""
        lines = self.ask("get", "--prefix", MEMBERS, "--print-value-only").splitlines()
        return {member["host"]: member["waits_for"] for member in map(json.loads, filter(None, lines))}

    def add_member(self, name: str, waits_for: int) -> str:
        """Has an agent join that will never do anything; returns its lease, with which it goes."""
        lease = self.ask("lease", "grant", "600").split()[1]
        told = {"node": f"{name}/1", "host": name, "label": "", "waits_for": waits_for}
        self.ask("put", f"--lease={lease}", f"{MEMBERS}{name}%2F1", json.dumps(told))
        return lease

    def round_hosts(self) -> list[str]:
        """The hosts of the job's latest round, by rank."""
        text = self.ask("get", ROUND, "--print-value-only")
        return [host for _, host in json.loads(text)["places"]] if text.strip() else []

    def ask(self, *arguments: str) -> str:
        """The answer to ``etcdctl``, on the host itself."""
        tool = find_binary().with_name("etcdctl")
        asked = self.host.run([tool, f"--endpoints={self.endpoint}", *arguments])
        assert asked.returncode == 0, asked.stderr
        return asked.stdout

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Holds the server meanwhile (SIGSTOP): its connections stay, and nothing is answered."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)


class Training:
    """One job with a worker on each host."""

    def __init__(self, etcd: Etcd, folder: Path) -> None:
        self.etcd = etcd
        self.agents: list[Agent] = []
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes
        self._generations: dict[str, Generation] = {}
        (folder / "log").mkdir()

    def start(self, host: Host, *, nnodes: str, conf: str = "") -> Agent:
        """Starts an agent on a host, with more for ``--rdzv-conf``."""
        number = len(self.agents)
        temporary = self._folder / f"tmp-{host.name}-{number}"
        temporary.mkdir()
        arguments: list[str | Path] = [
            f"--nnodes={nnodes}", "--nproc-per-node=1", "--max-restarts=100", "--rdzv-backend=unicron",
            f"--rdzv-endpoint={self.etcd.endpoint}", f"--rdzv-id={JOB}", f"--local-addr={host.address}",
            f"--rdzv-conf=lease_ttl=1{conf and ','}{conf}", SCRIPT, self._folder,
        ]  # fmt: skip
        own = {
            "UNICRON_NODE_NAME": host.name,
            "TMPDIR": str(temporary),
            "XDG_STATE_HOME": str(temporary),
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        out = self._folder / f"agent-{host.name}-{number}.out"
        argv = [script_path("unicron-run"), *arguments]
        process = host.start_warm(argv, warm=self.etcd.warm, env=environment(own), cwd=self._folder, out=out)
        self.agents.append(Agent(host, process, out))
        return self.agents[-1]

    def generations(self) -> list[Generation]:
        """All there were, in the order in which they began."""
        for path in (self._folder / "log").iterdir():
            self._read_on(path)
        return sorted(self._generations.values(), key=lambda each: each.began)

    def until_training(self, *hosts: Host, after: Generation | None = None, steps: int = 3) -> Generation:
        """Waits for a generation on exactly these hosts in which each has done some steps; ``after`` is too old."""
        names, begun = {host.name for host in hosts}, 0.0 if after is None else after.began

        def found() -> Generation | None:
            fit = (each for each in self.generations() if each.hosts == names and each.began > begun)
            return next((each for each in fit if all(len(each.of(name)) >= steps for name in names)), None)

        return self.until(found, f"steps on {', '.join(sorted(names))}")

    def until_more_steps(self, generation: Generation, steps: int = 10) -> None:
        """Waits until this generation has gone on, on all its hosts."""
        done = {host: len(generation.of(host)) for host in generation.hosts}
        self.until(
            lambda: self.generations() and all(len(generation.of(host)) >= done[host] + steps for host in done),
            f"{steps} more steps of {generation}",
        )

    def until(self, condition: Callable[[], T | None], what: str) -> T:
        """Waits for something that the job does; fails the test with what its agents said at the deadline."""
        return until(condition, what, self.story)

    def end(self, agents: Collection[Agent]) -> list[Generation]:
        """Has the training end, and checks that it does on all these hosts, and what was done from first to last."""
        (self._folder / "stop").touch()
        for agent in agents:
            self.until(lambda agent=agent: agent.process.poll() is not None, f"the end of {agent.host.name}")  # type: ignore[misc]
        codes = {agent.host.name: agent.process.returncode for agent in agents}
        assert set(codes.values()) == {0}, f"exit codes {codes}\n{self.story()}"
        for agent in agents:
            self.until(lambda agent=agent: not agent.host.pids(), f"the end of all on {agent.host.name}")  # type: ignore[misc]
        generations = self.generations()
        wrong = faults_in(generations)
        assert not wrong, "\n".join([*wrong, *map(str, generations), self.story()])
        return generations

    def story(self) -> str:
        """Generations and the last words of all agents, for who reads of a failure."""
        return "\n".join([*map(str, self.generations()), *(agent.last_lines for agent in self.agents)])

    def _read_on(self, path: Path) -> None:
        with path.open("rb") as log:
            log.seek(self._read.get(path, 0))
            text = log.read()
        text = text[: text.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(text)
        for line in text.splitlines():
            self._take(json.loads(line))

    def _take(self, told: dict[str, Any]) -> None:
        name, at = told["generation"], told["at"]
        generation = self._generations.setdefault(name, Generation(name, at))
        generation.began = min(generation.began, at)
        if "loaded" in told:
            generation.loaded[told["host"]] = told["loaded"]
            return
        rank = {key: told[key] for key in ("host", "pid", "rank", "size", "restarts", "loss", "began")}
        generation.steps.append(Step(number=told["step"], ended=at, **rank))


class Cluster:
    """Hosts that train together, one agent on each."""

    def __init__(
        self, network: Network, training: Training, *, nnodes: str = "2:3", names: str = "abc", conf: str = ""
    ) -> None:
        self.network = network
        self.training = training
        self.nnodes = nnodes
        self.conf = conf
        self.hosts = {name: network.add(name)[0] for name in names}
        self.agents = {name: self.start(name) for name in names}
        self.first = self.until_training(names)

    def start(self, name: str) -> Agent:
        """Starts an agent on a host, which may be a new one."""
        if name not in self.hosts:
            self.hosts[name] = self.network.add(name)[0]
        return self.training.start(self.hosts[name], nnodes=self.nnodes, conf=self.conf)

    def replace(self, name: str) -> None:
        """Starts another agent where one was lost."""
        self.agents[name] = self.start(name)

    def of(self, names: str) -> list[Host]:
        """Hosts by their names, which are letters."""
        return [self.hosts[name] for name in names]

    def until_training(self, names: str, after: Generation | None = None) -> Generation:
        """Waits for a generation on exactly these hosts."""
        return self.training.until_training(*self.of(names), after=after)

    def end(self, names: str) -> list[Generation]:
        """Ends the job on these hosts, which are all that are left."""
        return self.training.end([self.agents[name] for name in names])


def faults_in(generations: list[Generation]) -> list[str]:
    """What no training may do whatever happens to its hosts, as sentences; ``generations`` in the order of their begin.

    No two generations train at the same time; each goes on from the last checkpoint or, if its writer was lost, the
    one before it, on all ranks; no step is left out; and each step has the loss of a run that nothing happened to.
    """
    found = []
    for before, after in itertools.pairwise(generations):
        if after.began < max(each.ended for each in generations if each.began <= before.began):
            found.append(f"Two generations trained at the same time: {before}; and {after}.")
    done = 0
    for each in generations:
        found += _odd_steps(each)
        loaded = set(each.loaded.values())
        if len(loaded) != 1 or not done - 2 * CHECKPOINT_STEPS < max(loaded) <= done:
            found.append(f"Step {done} was done, and the next generation goes on from step {loaded}: {each}.")
        done = max([done, *(step.number for step in each.steps)])
    return found


def _odd_steps(generation: Generation) -> list[str]:
    """What is wrong with the steps of one generation."""
    found = []
    for host, loaded in generation.loaded.items():
        numbers = [step.number for step in generation.of(host)]
        if numbers != list(range(loaded + 1, loaded + 1 + len(numbers))):
            found.append(f"The steps of {host} do not follow one another from {loaded} on: {numbers}.")
    for step in generation.steps:
        right = undisturbed_loss(step.number)
        if abs(step.loss - right) > LOSS_TOLERANCE * right:
            found.append(f"Step {step.number} has the loss {step.loss} on {step.host}, undisturbed {right}.")
    if any(step.size != len(generation.hosts) for step in generation.steps):
        found.append(f"Ranks are missing: {generation}.")
    return found


@cache
def _undisturbed() -> tuple[Iterator[float], list[float]]:
    from train_rounds import undisturbed_losses

    return undisturbed_losses(), []


def undisturbed_loss(step: int) -> float:
    """The loss of a step in a run that nothing happens to, which is computed as far as it is asked for."""
    coming, known = _undisturbed()
    known.extend(itertools.islice(coming, max(0, step - len(known))))
    return known[step - 1]


def until(condition: Callable[[], T | None], what: str, story: Callable[[], str]) -> T:
    """Waits until ``condition`` returns something; fails the test with ``story`` at the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > end:
            pytest.fail(f"not seen in {DEADLINE_S:g} s: {what}\n{story()}")
        time.sleep(POLL_S)
    return found


def comm(pid: int) -> str:
    """The name of a process; "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process, without what the tests themselves were started with."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UNICRON_", "PET_", "TORCHEL"))}
    return {**kept, "OMP_NUM_THREADS": "1", MARK: uuid.uuid4().hex, **more}


def script_path(name: str) -> str:
    """A command of the package under test."""
    return os.path.join(sysconfig.get_path("scripts"), name)
