"""Jobs that are given to a cluster: real agents, a real etcd, real jobs, and people who press Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_launcher import MARK_OF_AGENT, WarmLaunchers, environment_of_no_job

from unicron_elastic.planning.coordinate.node_status import NodeState, NodeStatus
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.rendezvous.records.plan import PhaseRecord, parse_node_status, parse_phase
from unicron_elastic.rendezvous.records.plan_keys import NODE_RECORDS, PlannedJobKeys
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import StoreError
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

DEADLINE_S = 60.0
BIN = Path(sys.executable).parent

# It says which signals it gets, and ends with the file "stop" or after them.
WORKER = """
import os, signal, sys, time

def told(number, _frame):
    os.write(1, f"GOT {number}\\n".encode())
    if "deaf" not in sys.argv:
        os._exit(1)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, told)
environ = os.environ
where = environ["UNICRON_NODE_NAME"]
os.write(1, f"WORKS {where} of {environ['WORLD_SIZE']} pid {os.getpid()}\\n".encode())
while not os.path.exists("stop"):
    time.sleep(0.02)
os.write(1, f"DONE {where}\\n".encode())
"""


class Agent:
    """``unicron agent`` on a host of its own, as far as anybody can tell."""

    def __init__(self, lab: Lab, host: str, *, endpoint: str = "", **env: str) -> None:
        self.host, self.mark = host, uuid.uuid4().hex
        self.log = lab.folder / f"agent-{host}-{self.mark}.log"
        environ = environment_of_no_job(lab.folder) | {"UNICRON_NODE_NAME": host, MARK_OF_AGENT: self.mark}
        environ |= {"XDG_STATE_HOME": str(lab.folder / "state")}
        environ |= {"UNICRON_ETCD_ENDPOINT": endpoint or lab.etcd.endpoint, **env}
        command = [str(BIN / "unicron"), "agent", "--address", "127.0.0.1"]
        with self.log.open("wb") as log, open(os.devnull, "rb") as null:
            self.process = lab.warm.start(
                command, environ, lab.folder, [null, log, log], forks_keeper=lab.trains, forks_children=True
            )

    def carriers(self) -> list[int]:
        """All processes of this agent that live, with itself."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if f"{MARK_OF_AGENT}={self.mark}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
        return found

    def assert_gone(self) -> None:
        """Fails unless nothing of it is left soon."""
        until(lambda: not self.carriers(), f"the end of all that {self.host} has started")

    def end(self) -> None:
        for pid in {*self.carriers(), *([self.process.pid] if self.process.poll() is None else [])}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Lab:
    """An etcd and agents."""

    def __init__(self, folder: Path, warm: WarmLaunchers, *, trains: bool = False) -> None:
        self.folder = folder
        self.warm = warm
        self.trains = trains
        self.etcd = EmbeddedEtcd()
        self.agents: list[Agent] = []

    def __enter__(self) -> Lab:
        self.etcd.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, *hosts: str, **env: str) -> list[Agent]:
        """Starts agents, and waits until they are there."""
        made = [Agent(self, host, **env) for host in hosts]
        self.agents += made
        self.until_idle(*hosts)
        return made

    def ask(self, question: Callable[[EtcdStore], Any]) -> Any:
        """None if the store cannot be asked."""
        with EtcdStore(StoreAddress.parse(self.etcd.endpoint)) as store:
            try:
                return question(store)
            except StoreError:
                return None

    def nodes(self) -> dict[str, NodeStatus]:
        """By host."""
        snapshot = self.ask(lambda store: store.read_prefix(NODE_RECORDS))
        return {} if snapshot is None else {(each := parse_node_status(e)).host: each for e in snapshot.entries}

    def refused(self) -> set[str]:
        """Jobs that some node has refused."""
        return {each.job for node in self.nodes().values() for each in node.refusals}

    def until_idle(self, *hosts: str) -> None:
        def are_idle() -> bool:
            nodes = self.nodes()
            return all(host in nodes and nodes[host].state is NodeState.IDLE for host in hosts)

        until(are_idle, f"idle nodes {hosts}", lambda: f"{self.nodes()}\n{self.logs()}")

    def phase(self, job: str) -> PhaseRecord | None:
        entry = self.ask(lambda store: store.read(PlannedJobKeys(job).phase)).entry
        return None if entry is None else parse_phase(entry)

    def logs(self) -> str:
        return "\n".join(f"-- {each.host}\n{each.log.read_text()}" for each in self.agents)

    def unicron(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """One command of an operator."""
        return self.warm.ask(*arguments, "--endpoint", self.etcd.endpoint)

    def close(self) -> None:
        for each in self.agents:
            each.end()
        self.etcd.stop(timeout_s=0.0)


def until(condition: Callable[[], Any], what: str, more: Callable[[], str] = str) -> Any:
    """Waits for something; fails the test at the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < end, f"{what}: not seen in {DEADLINE_S:g} s\n{more()}"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, warm_launchers: WarmLaunchers) -> Iterator[Lab]:
    """Agents a and b, which must be idle again after each test."""
    with Lab(tmp_path_factory.mktemp("lab"), warm_launchers) as lab:
        programs = lab.folder / "bin"
        programs.mkdir()
        lab.begin("a", PATH=f"{programs}:{os.environ['PATH']}")
        lab.begin("b")
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    """The shared one, with what a test has added to it."""
    before = list(shared.agents)
    yield shared
    for each in [each for each in shared.agents if each not in before]:
        each.end()
        shared.agents.remove(each)
    shared.until_idle(*(each.host for each in before))
    for each in before:
        until(lambda each=each: each.carriers() == [each.process.pid], "the end of all that was started")


@pytest.fixture
def own(tmp_path: Path, warm_launchers: WarmLaunchers) -> Iterator[Lab]:
    """For a test that breaks it."""
    made = Lab(tmp_path, warm_launchers)
    try:
        yield made
    finally:
        made.close()


Submit = Callable[..., Any]


@pytest.fixture
def submit(launcher: Any) -> Submit:
    """Starts ``unicron-run --cluster`` in the test's folder."""
    launcher.script("work.py", WORKER)

    def started(lab: Lab, *arguments: str, **options: Any) -> Any:
        return launcher.start("--cluster", lab.etcd.endpoint, *arguments, **options)

    return started


def works(run: Any, size: int, count: int | None = None) -> dict[str, int]:
    """Waits until so many say that they work; {host: pid}."""
    found = run.until_line(rf"^WORKS (\w+ of {size} pid \d+)$", size if count is None else count)
    return {line.split()[0]: int(line.split()[-1]) for line in found}


def stop(launcher: Any) -> None:
    (launcher.folder / "stop").touch()


def test_output_and_exit_code_come_to_who_submitted(lab: Lab, submit: Submit, launcher: Any) -> None:
    launcher.script("talk.py", "import sys; print('out', sys.argv[1:]); print('err', file=sys.stderr)")
    launcher.script("fail.py", "import sys; sys.exit(3)")
    well = submit(lab, "--rdzv-id=talk", "talk.py", "--nnodes", "9", "a b")
    bad = submit(lab, "--rdzv-id=bad", "fail.py")
    assert well.wait() == 0, well.err
    assert well.out == "out ['--nnodes', '9', 'a b']\n"
    assert "err\n" in well.err
    assert "talk has ended well" in well.err
    assert bad.wait() == 1
    assert "fail.py FAILED" in bad.err
    assert re.search(r"exitcode  : 3 \(pid: \d+\)", bad.err)
    assert "Traceback" not in bad.err
    assert re.search(r"bad has failed, as \w+ says: rank 0 exited with code 3", bad.err), bad.err
    assert bad.out == ""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_reaches_the_workers_and_ends_the_job(lab: Lab, submit: Submit, number: int) -> None:
    run = submit(lab, "--nnodes=2", "--rdzv-id=stopped", "work.py", wrap="trap '' HUP; exec \"$@\"")
    works(run, 2)
    run.process.send_signal(signal.SIGHUP)  # which is ignored from the start on, as by nohup
    run.process.send_signal(number)
    assert run.wait() == 1
    got = re.findall(r"^GOT (\d+)$", run.out, re.MULTILINE)
    assert len(got) == 2
    # The other node may have ended before the order comes to a busy one, whose workers are stopped for that.
    assert {f"{number:d}"} <= set(got) <= {f"{number:d}", f"{signal.SIGTERM:d}"}
    assert "DONE" not in run.out
    lab.until_idle("a", "b")
    record = lab.phase("stopped")
    assert record is not None
    assert record.phase is JobPhase.CANCELLED
    assert "stopped" not in lab.refused()


def test_a_drained_node_leaves_a_planned_job_and_is_back_when_that_is_lifted(
    lab: Lab, submit: Submit, launcher: Any
) -> None:
    run = submit(lab, "--nnodes=1:2", "--rdzv-id=drained", "--max-restarts=0", "work.py")
    works(run, 2)
    assert lab.unicron("drain", "a", "--reason", "a loud fan").returncode == 0
    works(run, 1)
    lab.until_idle("a")
    assert lab.refused() == set()
    said = re.findall(r"^\[unicron\] \S+ (Node a .*)$", run.err, re.MULTILINE)
    leaves = "This node leaves the job, which goes on: the others' workers restart without it."
    told = [line.partition(": a loud fan. ")[2] for line in said]
    assert told[:1] == [leaves], run.err
    # It does not wait for ever for the others to restart, and says so if it comes to that.
    assert told[1:] in ([], ["Its workers end.", "It has left the job."]), run.err
    assert "FAILED" not in run.err
    assert "Traceback" not in run.err
    assert lab.unicron("undrain", "a").returncode == 0
    run.until(lambda: run.out.count("WORKS a of 2") == 2, "the node in its job again")
    stop(launcher)
    assert run.wait() == 0, run.err


def test_ctrl_c_while_a_job_waits_leaves_nothing(lab: Lab, submit: Submit) -> None:
    run = submit(lab, "--nnodes=9", "--rdzv-id=huge", "work.py")
    run.until(lambda: re.search(r"huge .*(needs|waits)", run.err), "why it waits")
    run.process.send_signal(signal.SIGINT)
    assert run.wait(10.0) == 1
    record = lab.phase("huge")
    assert record is not None
    assert (record.phase, record.signal) == (JobPhase.CANCELLED, signal.SIGINT)


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once(lab: Lab, submit: Submit) -> None:
    run = submit(lab, "--nnodes=1", "--rdzv-id=deaf", "--shutdown-timeout=6", "work.py", "deaf")
    works(run, 1)
    run.process.send_signal(signal.SIGINT)
    run.until_line(r"^GOT 2$")
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.wait(5.0) == 1
    assert any(node.state is not NodeState.IDLE for node in lab.nodes().values()), "it was to be quicker than the job"
    lab.until_idle("a", "b")


@pytest.mark.slow
def test_a_detached_job_is_seen_and_cancelled_and_its_name_serves_again(lab: Lab, submit: Submit) -> None:
    run = submit(lab, "--detach", "--nnodes=1:2", "--rdzv-id=alone", "work.py")
    assert run.wait() == 0
    assert "unicron cancel" in run.err
    until(lambda: any(each.state is NodeState.WORKING for each in lab.nodes().values()), "work", lab.logs)
    assert re.search(r"^alone +running", lab.unicron("jobs").stdout, re.MULTILINE)
    assert lab.unicron("cancel", "alone").returncode == 0
    lab.until_idle("a", "b")
    again = submit(lab, "--detach", "--nnodes=3", "--rdzv-id=alone", "work.py")
    assert again.wait() == 0, again.err
    assert lab.unicron("cancel", "alone").returncode == 0


def test_a_job_outlives_who_submitted_it_and_keeps_its_name(lab: Lab, submit: Submit, launcher: Any) -> None:
    run = submit(lab, "--nnodes=2", "--rdzv-id=orphan", "work.py")
    pids = works(run, 2)
    run.process.kill()
    run.process.wait()
    until(lambda: lab.ask(lambda store: store.read(PlannedJobKeys("orphan").output)).entry is None, "its absence")
    again = submit(lab, "--rdzv-id=orphan", "work.py")
    assert again.wait() == 1
    assert re.search(r"^unicron-run: a job called orphan is in the cluster already; .*`unicron cancel", again.err)
    assert len(again.err.splitlines()) == 1
    assert all(os.path.exists(f"/proc/{pid}") for pid in pids.values())
    stop(launcher)
    lab.until_idle("a", "b")
    record = lab.phase("orphan")
    assert record is not None
    assert (record.phase, record.exit_code) == (JobPhase.FINISHED, 0)


@pytest.mark.slow
def test_a_node_that_cannot_run_it_refuses_once_and_the_other_does(lab: Lab, submit: Submit) -> None:
    program = lab.folder / "bin" / "only-on-a"
    program.write_text("#!/bin/sh\necho RUNS on $UNICRON_NODE_NAME\n")
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    run = submit(lab, "--nnodes=1:2", "--rdzv-id=choosy", "--no-python", "only-on-a", env={"PATH": path})
    assert run.wait() == 0, run.err + lab.logs()
    assert run.out.split("\n") == ["RUNS on a", ""]
    assert run.err.count("b refuses choosy: its program only-on-a is not there.") <= 1
    assert lab.logs().count("b refuses choosy: its program only-on-a is not there.") == 1


@pytest.mark.slow
def test_a_job_waits_for_enough_nodes_and_for_a_better_time_when_one_leaves(lab: Lab, submit: Submit) -> None:
    run = submit(lab, "--nnodes=3", "--rdzv-id=wide", "--max-restarts=3", "work.py")
    run.until(lambda: re.search(r"wide .*(needs|waits)", run.err), "why it waits")
    assert "WORKS" not in run.out
    (third,) = lab.begin("c")
    pids = works(run, 3)
    assert set(pids) == {"a", "b", "c"}
    third.process.terminate()
    assert third.process.wait(DEADLINE_S) == 0, third.log.read_text()
    third.assert_gone()
    until(lambda: (record := lab.phase("wide")) is not None and record.phase is JobPhase.SUBMITTED, "waiting", lab.logs)
    lab.until_idle("a", "b")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 1


@pytest.mark.slow
def test_a_killed_agent_takes_its_workers_along_and_is_replaced(lab: Lab, submit: Submit, launcher: Any) -> None:
    (third,) = lab.begin("c")
    run = submit(lab, "--nnodes=1:3", "--rdzv-id=kept", "--max-restarts=3", "work.py")
    pids = works(run, 3)
    third.process.kill()
    third.process.wait()
    third.assert_gone()
    assert not os.path.exists(f"/proc/{pids['c']}")
    works(run, 2)
    lab.agents.append(Agent(lab, "d"))  # which the job may take before it is seen to be idle
    assert "d" in works(run, 3, 6)
    stop(launcher)
    assert run.wait() == 0, run.err
    assert run.out.count("DONE") == 3


def test_a_fault_is_said_once_where_the_job_was_submitted(lab: Lab, submit: Submit, launcher: Any) -> None:
    """Both nodes speak there: the one on which it came says it."""
    step = "import torch\noptimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)\n"
    step += WORKER.replace(
        "    time.sleep(0.02)",
        "    optimizer.step()\n    os.write(1, f'STEP {where}\\n'.encode())\n    time.sleep(0.1)",
    )
    launcher.script("step.py", step)
    run = submit(lab, "--nnodes=2", "--rdzv-id=once", "--max-restarts=3", "step.py")
    pids = works(run, 2)
    for host in "ab":  # or it would be killed before its first step
        run.until_line(f"^STEP {host}$")
    os.kill(pids["b"], signal.SIGKILL)
    works(run, 2, 4)
    seen = run.out.count("STEP ")
    run.until(lambda: "first step" in run.err and run.out.count("STEP ") > seen + 20, "steps of both nodes")
    stop(launcher)
    assert run.wait() == 0, run.err
    assert run.err.count("was killed by signal 9 (SIGKILL)") == 1, run.err
    assert run.err.count("first step") == 1, run.err


@pytest.mark.slow
def test_nodes_of_a_job_may_end_one_after_the_other(lab: Lab, submit: Submit, launcher: Any) -> None:
    launcher.script("uneven.py", WORKER.replace('os.path.exists("stop")', "os.path.exists('stop' + environ['RANK'])"))
    run = submit(lab, "--nnodes=2", "--rdzv-id=uneven", "uneven.py")
    works(run, 2)
    (launcher.folder / "stop0").touch()
    run.until_line("^DONE a$")
    until(lambda: len(_workers(run)) == 1, "the end of the first")
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(3.0)  # nobody hurries the second
    (launcher.folder / "stop1").touch()
    assert run.wait() == 0, run.err
    assert "DONE b" in run.out
    assert "GOT" not in run.out
    assert "stopped" not in run.err
    lab.until_idle("a", "b")
    assert "uneven" not in lab.refused()


@pytest.mark.slow
def test_a_launcher_that_is_killed_is_no_end_of_the_job(lab: Lab, submit: Submit, launcher: Any) -> None:
    run = submit(lab, "--nnodes=1", "--rdzv-id=hit", "work.py")
    ((host, pid),) = works(run, 1).items()
    keeper = _parent(pid)
    while Path(f"/proc/{keeper}/comm").read_text() != "unicron-keeper\n":
        keeper = _parent(keeper)
    os.kill(_parent(keeper), signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the end of its worker")
    others = works(run, 1, 2)
    assert set(others) == {"a", "b"}
    assert f"{host} leaves hit: its part of it ended with exit code -9 while the job goes on." in run.err
    stop(launcher)
    assert run.wait() == 0, run.err


@pytest.mark.slow
def test_a_node_is_lent_to_another_job(lab: Lab, submit: Submit, launcher: Any) -> None:
    first = submit(lab, "--nnodes=1:2", "--rdzv-id=first", "--max-restarts=0", "work.py")
    works(first, 2)
    second = submit(lab, "--nnodes=1", "--rdzv-id=second", "--weight=3", "work.py")
    works(second, 1)
    works(first, 1)
    stop(launcher)
    assert first.wait() == 0, first.err + lab.logs()
    assert second.wait() == 0, second.err


@pytest.mark.slow
def test_a_job_that_ends_while_etcd_is_away_has_ended_well(own: Lab, submit: Submit, launcher: Any) -> None:
    own.etcd = EmbeddedEtcd(data_dir=own.folder / "etcd")
    own.etcd.start()
    own.begin("a", "b")
    run = submit(own, "--nnodes=2", "--rdzv-id=job", "work.py")
    pids = works(run, 2)
    own.etcd.stop()
    run.until(lambda: "cannot be seen" in run.err, "blindness")
    stop(launcher)
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids.values()), "the end of the workers")
    own.etcd.start()
    assert run.wait() == 0, run.err + own.logs()
    assert run.out.count("WORKS") == run.out.count("DONE") == 2
    own.until_idle("a", "b")


@pytest.mark.slow
def test_an_agent_that_helps_a_job_nobody_plans_leaves_it_when_it_ends(own: Lab, launcher: Any) -> None:
    own.etcd.start()
    launcher.script("work.py", WORKER)
    run = launcher.start(
        "--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=unicron", f"--rdzv-endpoint={own.etcd.endpoint}",
        "--rdzv-id=loose", "--rdzv-conf=last_call_timeout=0", "--local-addr=127.0.0.1", "--max-restarts=3", "work.py",
        env={"UNICRON_NODE_NAME": "z"},
    )  # fmt: skip
    run.until_line("^WORKS z of 1 ")
    helper = Agent(own, "a")
    own.agents.append(helper)
    run.until_line("^WORKS z of 2 ")
    until(lambda: own.nodes()["a"].state is NodeState.WORKING, "work", own.logs)
    began = time.monotonic()
    helper.process.terminate()
    assert helper.process.wait(DEADLINE_S) == 0
    assert time.monotonic() - began < 20.0, "its child was not told"
    helper.assert_gone()
    run.until_line("^WORKS z of 1 ", 2)
    stop(launcher)
    assert run.wait() == 0


def test_an_agent_may_be_there_before_etcd(own: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    own.agents.append(Agent(own, "early", endpoint=f"http://127.0.0.1:{port}"))
    own.etcd = EmbeddedEtcd(port=port)
    own.etcd.start()
    own.until_idle("early")
    own.agents[0].process.terminate()
    assert own.agents[0].process.wait(DEADLINE_S) == 0


def test_two_agents_of_one_name_are_not_taken_for_each_other(lab: Lab) -> None:
    other = Agent(lab, "a")
    try:
        assert other.process.wait(DEADLINE_S) == 1
        assert "it has a node called a; give this one another name" in other.log.read_text()
        assert lab.nodes()["a"].state is NodeState.IDLE
    finally:
        other.end()


@pytest.mark.slow
def test_a_job_is_not_lost_with_what_etcd_knew(own: Lab, submit: Submit, launcher: Any) -> None:
    own.etcd.start()
    own.begin("a", "b")
    run = submit(own, "--nnodes=2", "--rdzv-id=job", "work.py")
    works(run, 2)
    own.etcd.stop(timeout_s=0.0)
    own.etcd.start()
    until(lambda: "told again" in own.logs(), "the job, told again", own.logs)
    until(lambda: (record := own.phase("job")) is not None and record.phase is JobPhase.RUNNING, "the job's phase")
    stop(launcher)
    assert run.wait() == 0, run.err + own.logs()
    assert run.out.count("WORKS") == run.out.count("DONE") == 2, "nobody was stopped"
    assert "has ended well" in run.err
    own.until_idle("a", "b")


@pytest.mark.slow
def test_an_agent_that_was_taken_for_lost_comes_back_and_works_for_one_job(
    own: Lab, submit: Submit, launcher: Any
) -> None:
    own.etcd.start()
    agents = own.begin("a", "b")
    run = submit(own, "--nnodes=1:2", "--rdzv-id=job", "--max-restarts=3", "work.py")
    works(run, 2)
    second = agents[1]
    second.process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: "b" not in own.nodes(), "its loss")
        end = time.monotonic() + 8.0
        while time.monotonic() < end:
            assert len(_workers(run)) <= 2
            time.sleep(0.1)
    finally:
        second.process.send_signal(signal.SIGCONT)
    until(lambda: "b" in own.nodes(), "its return", own.logs)
    until(lambda: [each.heads_for for each in own.nodes().values()] == ["job", "job"], "two at work", own.logs)
    until(lambda: len(_workers(run)) == 2, "one worker on each")
    stop(launcher)
    assert run.wait() == 0, run.err
    own.until_idle("a", "b")


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _workers(run: Any) -> list[int]:
    """Those of the job that live."""
    pids = {int(pid) for pid in re.findall(r"^WORKS .* pid (\d+)$", run.out, re.MULTILINE)}
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
