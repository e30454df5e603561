"""What operators do to a cluster: spares, a coordinator of its own, drain, cancel, stop; and what is left of a job."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from warm_launcher import WarmLaunchers

from unicron_elastic.rendezvous.records.cluster import CLUSTER, NODES
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

DEADLINE_S = 60.0
Start = Callable[..., Any]
Unicron = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture
def store(etcd: EmbeddedEtcd) -> Iterator[EtcdStore]:
    with EtcdStore(StoreAddress.parse(etcd.endpoint)) as opened:
        yield opened


@pytest.fixture
def start(launcher: Any, etcd: EmbeddedEtcd, node_options: list[str]) -> Start:
    """Starts an agent of the job."""

    def started(node: str, nnodes: str, conf: str = "") -> Any:
        return launcher.start(
            f"--nnodes={nnodes}", "--nproc-per-node=1", "--rdzv-backend=unicron", f"--rdzv-endpoint={etcd.endpoint}",
            "--rdzv-id=job", f"--rdzv-conf=last_call_timeout=1,lease_ttl=30{conf}", "--max-restarts=3",
            "--local-addr=127.0.0.1", node_options[-1], env={"UNICRON_NODE_NAME": node},
        )  # fmt: skip

    return started


class Service:
    """``unicron coordinator`` or ``agent`` in the background."""

    def __init__(self, warm: WarmLaunchers, folder: Path, endpoint: str, what: str, name: str) -> None:
        self.log = folder / f"{name}.log"
        command = [os.path.join(sysconfig.get_path("scripts"), "unicron"), what, "--address", "127.0.0.1"]
        where = {"UNICRON_ETCD_ENDPOINT": endpoint, "UNICRON_NODE_NAME": name}
        self.process = warm.begin(self.log, *command, **where)

    def until(self, words: str) -> None:
        """Waits until it has said so."""
        end = time.monotonic() + DEADLINE_S
        while words not in self.log.read_text():
            assert time.monotonic() < end, f"{words!r} is not in {self.log.read_text()}"
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def end(self) -> int:
        """By SIGTERM."""
        self.process.terminate()
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def service(
    launcher: Any, etcd: EmbeddedEtcd, warm_launchers: WarmLaunchers
) -> Iterator[Callable[[str, str], Service]]:
    made: list[Service] = []

    def begin(what: str, name: str) -> Service:
        made.append(Service(warm_launchers, launcher.folder, etcd.endpoint, what, name))
        return made[-1]

    yield begin
    for each in made:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


@pytest.fixture
def unicron(etcd: EmbeddedEtcd, warm_launchers: WarmLaunchers) -> Unicron:
    """Runs one command of an operator."""
    return lambda *words: warm_launchers.ask(*words, "--endpoint", etcd.endpoint)


@pytest.mark.cold  # so that the killed agent has connected to the coordinator by the time its worker speaks
def test_a_killed_agent_is_noticed_by_its_connection_not_by_its_lease(start: Start, launcher: Any) -> None:
    runs = {name: start(name, "2:3") for name in "abc"}
    for run in runs.values():
        run.until_line(r"^GENERATION 0 of 3")
    runs.pop("a").process.kill()
    ranks = set()
    for run in runs.values():
        ranks.add(run.until_line(r"^GENERATION 1 of 2 rank (\d)")[0])  # the lease would take 30 s
        # The latter ones if it had not connected to the coordinator yet: it, or the round's store, which it had, tells.
        assert re.search(r"a is lost: (its process has ended\.|it has not connected to )|store is gone: ", run.err), (
            run.err
        )
    assert ranks == {"0", "1"}  # who has which depends on who had met first
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in runs.values()] == [0, 0]


def test_an_agent_that_is_stopped_says_that_it_leaves(start: Start, launcher: Any) -> None:
    runs = [start(name, "1:2") for name in "ab"]
    for run in runs:
        run.until_line(r"^GENERATION 0 of 2")
    runs[0].process.terminate()
    runs[1].until_line(r"^GENERATION 1 of 1")
    assert runs[0].wait() == 1
    assert "a has left." in runs[1].err
    (launcher.folder / "stop").touch()
    assert runs[1].wait() == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_job_whose_agents_are_all_stopped_is_no_problem(
    start: Start, launcher: Any, unicron: Unicron, how: int
) -> None:
    runs = [start(name, "2:3") for name in "abc"]
    for run in runs:
        run.until_line(r"^GENERATION 0 of 3")
    for run in runs:
        run.process.send_signal(how)
    assert [run.wait() for run in runs] == [1, 1, 1]
    told = unicron("status", "--json")
    assert told.returncode == 0, told.stdout
    (job,) = json.loads(told.stdout)["jobs"]
    assert (job["state"], job["why"], job["nodes"]) == ("stopped", "All of its nodes were told to stop.", 0)
    assert "stopped" in unicron("jobs").stdout
    again = [start(name, "2:3") for name in "ab"]
    for run in again:
        run.until_line(r"^GENERATION 0 of 2")
    assert "training" in unicron("jobs").stdout
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in again] == [0, 0]


def test_a_job_is_stopped_though_one_of_its_nodes_waited_for_the_other_by_then(start: Start, unicron: Unicron) -> None:
    first, second = runs = [start(name, "2:2") for name in "ab"]
    for run in runs:
        run.until_line(r"^GENERATION 0 of 2")
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 1
    second.until(lambda: "waits" in unicron("nodes").stdout, "a node that waits")
    second.process.send_signal(signal.SIGINT)
    assert second.wait() == 1
    told = unicron("status")
    assert told.returncode == 0, told.stdout
    assert "stopped" in told.stdout


def test_a_job_whose_agents_were_all_killed_is_critical(
    start: Start, unicron: Unicron, service: Callable[[str, str], Service]
) -> None:
    service("coordinator", "boss").until("coordinates the cluster")
    runs = [start(name, "2:2") for name in "ab"]
    for run in runs:
        run.until_line(r"^GENERATION 0 of 2")
    for run in runs:
        run.process.kill()
    end = time.monotonic() + DEADLINE_S
    while (told := unicron("status")).returncode != 2:
        assert time.monotonic() < end, told.stdout
    assert "job stands still: No node of it is there." in told.stdout


def test_a_spare_takes_the_place_of_who_is_lost(start: Start, launcher: Any, unicron: Unicron) -> None:
    first, second = (start(name, "2:3", ",target_nodes=2") for name in "ab")
    for run in (first, second):
        run.until_line(r"^GENERATION 0 of 2")
    spare = start("c", "2:3", ",target_nodes=2")
    spare.until(lambda: "waits" in unicron("nodes").stdout, "a node that waits")
    assert first.out.count("GENERATION") == 1  # it does not disturb
    second.process.kill()
    for run in (first, spare):
        run.until_line(r"^GENERATION 1 of 2")
    (launcher.folder / "stop").touch()
    assert [first.wait(), spare.wait()] == [0, 0]


def test_an_agent_without_a_job_is_lent_to_one_and_comes_back(
    start: Start, launcher: Any, unicron: Unicron, service: Callable[[str, str], Service]
) -> None:
    runs = [start(name, "2:2") for name in "ab"]
    for run in runs:
        run.until_line(r"^GENERATION 0 of 2")
    spare = service("agent", "s")
    spare.until("s is a spare of the cluster")
    assert "idle" in unicron("nodes").stdout
    runs[1].process.kill()
    runs[0].until_line(r"^GENERATION 1 of 2")
    spare.until("GENERATION 1 of 2 rank 1")
    (launcher.folder / "stop").touch()
    assert runs[0].wait() == 0, runs[0].err + spare.log.read_text()
    spare.until("has ended with exit code 0: it is a spare again.")
    assert spare.end() == 0


@pytest.mark.slow
def test_a_coordinator_without_a_node_goes_before_agents(
    start: Start, launcher: Any, unicron: Unicron, service: Callable[[str, str], Service]
) -> None:
    runs = [start(name, "1:2") for name in "ab"]
    for run in runs:
        run.until_line(r"^GENERATION 0 of 2")
    dedicated = service("coordinator", "co")
    dedicated.until("co coordinates the cluster now.")
    dedicated.process.kill()
    dedicated.process.wait()
    # Agents notice that, too, and one of them takes over.
    coordinates = re.compile("^[ab] .*coordinator$", re.MULTILINE)
    runs[0].until(lambda: coordinates.search(unicron("nodes").stdout), "another coordinator")
    os.kill(runs[0].process.pid, signal.SIGKILL)
    runs[1].until_line(r"^GENERATION 1 of 1")
    (launcher.folder / "stop").touch()
    assert runs[1].wait() == 0


def test_a_drained_node_leaves_when_it_can_and_is_refused_until_lifted(
    start: Start, launcher: Any, unicron: Unicron
) -> None:
    runs = {name: start(name, "1:2") for name in "ab"}
    for run in runs.values():
        run.until_line(r"^GENERATION 0 of 2")
    assert "It runs job, and is asked to leave" in unicron("drain", "a", "--reason", "a loud fan").stdout
    runs["b"].until_line(r"^GENERATION 0 of 1")  # no restart is counted
    assert runs["a"].wait() == 1
    assert re.search(r"Node a is drained by .*: a loud fan\. It has left the job\.", runs["a"].err), runs["a"].err
    refused = start("a", "1:2")
    assert refused.wait() == 1
    assert "a loud fan" in refused.err
    assert "Traceback" not in refused.err
    assert unicron("undrain", "a").returncode == 0
    back = start("a", "1:2")
    back.until_line(r"^GENERATION \d of 2")
    (launcher.folder / "stop").touch()
    assert [runs["b"].wait(), back.wait()] == [0, 0]


def test_a_cancelled_job_ends_on_all_nodes_also_where_it_waits(start: Start, unicron: Unicron) -> None:
    training, waiting = start("a", "1:2", ",target_nodes=1"), start("b", "1:2", ",target_nodes=1")
    training.until(lambda: "GENERATION 0" in training.out + waiting.out, "training")
    training.until(lambda: "waits" in unicron("nodes").stdout, "a node that waits")
    assert unicron("cancel", "job", "--reason", "enough is learned").returncode == 0
    for run in (training, waiting):
        assert run.wait() == 1
        assert "the job 'job' was cancelled by" in run.err
        assert "enough is learned" in run.err
        assert "Traceback" not in run.err


def test_of_a_finished_job_nothing_stays_but_with_a_lease(start: Start, launcher: Any, store: EtcdStore) -> None:
    runs = [start(name, "1:2") for name in "ab"]
    for run in runs:
        run.until_line(r"^GENERATION 0 of 2")
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in runs] == [0, 0]
    left = store.read_prefix("").entries
    assert {entry.key for entry in left if entry.lease_id is None} == {f"{CLUSTER}secret"}
    assert not [entry.key for entry in left if entry.key.startswith(NODES) or "/members/" in entry.key]
