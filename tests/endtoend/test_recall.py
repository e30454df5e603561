"""A node that is taken from a job which goes on: over a real etcd, with real processes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from finals import final
from warm_launcher import WarmLaunchers

from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = pytest.mark.trains

DEADLINE_S = 60.0
IN_PLACE = str(Path(__file__).with_name("train_in_place.py"))
KEYS = JobKeys("job")
Start = Callable[..., Any]
Unicron = Callable[..., str]


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture
def recall(etcd: EmbeddedEtcd) -> Iterator[Callable[[str], object]]:
    with EtcdStore(StoreAddress.parse(etcd.endpoint)) as store:
        yield lambda host: store.put(KEYS.recalled(host), b"job b gains more from it.")


@pytest.fixture
def unrecall(etcd: EmbeddedEtcd) -> Iterator[Callable[[str], object]]:
    with EtcdStore(StoreAddress.parse(etcd.endpoint)) as store:
        yield lambda host: store.delete(KEYS.recalled(host))


@pytest.fixture
def start(launcher: Any, etcd: EmbeddedEtcd, node_options: list[str]) -> Start:
    """Starts an agent of the job, which may restart for nothing."""

    def started(node: str, nnodes: str, *script: str, last_call_s: int = 20) -> Any:
        return launcher.start(
            f"--nnodes={nnodes}", "--nproc-per-node=1", "--rdzv-backend=unicron", f"--rdzv-endpoint={etcd.endpoint}",
            "--rdzv-id=job", f"--rdzv-conf=last_call_timeout={last_call_s},lease_ttl=30", "--max-restarts=0",
            "--local-addr=127.0.0.1", f"--unicron-ledger=ledger-{node}", *(script or (node_options[-1],)),
            env={"UNICRON_NODE_NAME": node},
        )  # fmt: skip

    return started


def _began(runs: dict[str, Any], size: int) -> None:
    for run in runs.values():
        run.until_line(rf"^GENERATION 0 of {size} ")


def _assert_left_well(run: Any, node: str) -> None:
    assert run.wait() == 0, run.err
    assert re.search(rf"Node {node} is recalled: job b gains more from it\. .*left the job", run.err), run.err
    assert "Traceback" not in run.err
    assert "quarantine" not in run.err


def _incidents(folder: Path) -> list[str]:
    """Their numbers, reasons and decisions, those that are told again as well."""
    lines = (line for path in folder.glob("ledger-*") for line in path.read_text().splitlines())
    return [
        " ".join(str(told.get(name)) for name in ("host", "number", "reason", "decision"))
        for told in map(json.loads, lines)
    ]


@pytest.mark.parametrize(
    "node", ["a", pytest.param("b", marks=pytest.mark.slow), pytest.param("c", marks=pytest.mark.slow)]
)  # "a" hosts the round's store
def test_the_others_restart_without_it_and_nobody_counts_that(
    start: Start, launcher: Any, recall: Callable[[str], object], node: str
) -> None:
    runs = {name: start(name, "1:3") for name in "abc"}
    _began(runs, 3)
    recall(node)
    _assert_left_well(runs.pop(node), node)
    _began(runs, 2)
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in runs.values()] == [0, 0], [run.err for run in runs.values()]
    for run in runs.values():
        assert f"Node {node} is recalled: job b gains more from it. All workers restart without it." in run.err
    assert _incidents(launcher.folder) == []


def test_who_recalls_all_leaves_the_fewest_that_the_job_needs(
    start: Start, launcher: Any, recall: Callable[[str], object]
) -> None:
    runs = {name: start(name, "1:3") for name in "abc"}
    _began(runs, 3)
    for name in "abc":
        recall(name)
    end = time.monotonic() + DEADLINE_S
    while sum(run.process.poll() is not None for run in runs.values()) < 2:
        assert time.monotonic() < end, [run.err for run in runs.values()]
        time.sleep(0.01)
    (left,) = (run for run in runs.values() if run.process.poll() is None)
    left.until_line(r"^GENERATION 0 of 1 ")
    left.until(lambda: "The node stays: it is the only node of the job." in left.err, "why it stays")
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in runs.values()] == [0, 0, 0]


def test_a_node_that_is_needed_stays_until_another_has_come(
    start: Start, launcher: Any, recall: Callable[[str], object]
) -> None:
    runs = {name: start(name, "2:3", last_call_s=1) for name in "ab"}
    _began(runs, 2)
    recall("a")
    runs["a"].until(lambda: "The node stays: the job needs all 2 of its nodes." in runs["a"].err, "why it stays")
    runs["c"] = start("c", "2:3")
    _assert_left_well(runs.pop("a"), "a")
    runs["c"].until_line(r"^GENERATION 0 of 2 ")
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in runs.values()] == [0, 0], [run.err for run in runs.values()]


def test_a_node_that_is_not_recalled_any_more_stays(
    start: Start, launcher: Any, recall: Callable[[str], object], unrecall: Callable[[str], object]
) -> None:
    runs = {name: start(name, "2:2") for name in "ab"}
    _began(runs, 2)
    recall("nobody")
    recall("a")
    runs["a"].until(lambda: "The node stays: " in runs["a"].err, "why it stays")
    unrecall("a")
    runs["a"].until(lambda: "This node is not recalled any more: it stays." in runs["a"].err, "that it stays")
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in runs.values()] == [0, 0]
    assert all(run.out.count("GENERATION") == 1 for run in runs.values())


@pytest.mark.slow
def test_who_waits_in_rendezvous_leaves_too(start: Start, launcher: Any, recall: Callable[[str], object]) -> None:
    waiting = start("a", "2:3")
    waiting.until(lambda: "waits" in unicron("nodes"), "a node that waits")
    recall("a")
    _assert_left_well(waiting, "a")
    runs = {name: start(name, "2:3", last_call_s=1) for name in "bc"}  # the job is not closed
    _began(runs, 2)
    spare = start("a", "2:3")
    _assert_left_well(spare, "a")
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in runs.values()] == [0, 0]
    assert all(run.out.count("GENERATION") == 1 for run in runs.values())


@pytest.fixture
def unicron(etcd: EmbeddedEtcd, warm_launchers: WarmLaunchers) -> Unicron:
    """Runs one command of an operator, and returns what it said."""

    def run(*words: str) -> str:
        done = warm_launchers.ask(*words, "--endpoint", etcd.endpoint)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def undisturbed(alone: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """What one process comes to by itself in so many steps."""

    def train(steps: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("undisturbed")
        alone(folder, IN_PLACE, f"--steps={steps}")
        return final(folder, 0)

    return train


def _finals(folder: Path) -> list[dict[str, Any]]:
    """Of all ranks; which node has which depends on who had met first."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("final-*.json"))]


@pytest.mark.parametrize("node", ["a", pytest.param("c", marks=pytest.mark.slow)])  # "a" is rank 0, with the store
def test_in_place_the_others_go_on_in_their_processes(
    start: Start, launcher: Any, recall: Callable[[str], object], undisturbed: Any, node: str
) -> None:
    script = (IN_PLACE, "--steps=20", "--step-s=0.05", "--wait-for-worlds=2", "--say-steps")
    runs = {name: start(name, "1:3", *script) for name in "abc"}
    for run in runs.values():
        run.until_line(r"^STEP 3 ")
    recall(node)
    gone = runs.pop(node)
    _assert_left_well(gone, node)
    assert [run.wait() for run in runs.values()] == [0, 0], [run.err for run in runs.values()]
    for run in runs.values():
        assert len(set(re.findall(r"^STEP \d+ pid (\d+)", run.out, re.MULTILINE))) == 1  # it went on in its process
        assert f"Node {node} is recalled: job b gains more from it. 2 ranks go on without it." in run.err
    expected, finals = undisturbed(20), _finals(launcher.folder)
    assert len(finals) == 2
    for found in finals:
        assert (found["parameters"], found["losses"]) == (expected["parameters"], expected["losses"])
        assert found["world_size"] == 2
    assert _incidents(launcher.folder) == []


@pytest.mark.parametrize("node", ["b", pytest.param("a", marks=pytest.mark.slow)])  # "a" is rank 0, with the store
def test_in_place_the_others_go_on_without_a_drained_node(
    start: Start, launcher: Any, unicron: Unicron, undisturbed: Any, node: str
) -> None:
    script = (IN_PLACE, "--steps=20", "--step-s=0.05", "--wait-for-worlds=2", "--say-steps")
    runs = {name: start(name, "1:3", *script) for name in "abc"}
    for run in runs.values():
        run.until_line(r"^STEP 3 ")
    unicron("drain", node, "--reason", "a loud fan")
    gone = runs.pop(node)
    assert gone.wait() == 1, gone.err  # who started it must not take its end for the job's
    assert re.search(rf"Node {node} is drained by .*: a loud fan\. It has left the job\.", gone.err), gone.err
    assert "Traceback" not in gone.err
    assert "FAILED" not in gone.err
    assert "which goes on: the others go on in their processes." in gone.err
    assert [run.wait() for run in runs.values()] == [0, 0], [run.err for run in runs.values()]
    for run in runs.values():
        assert len(set(re.findall(r"^STEP \d+ pid (\d+)", run.out, re.MULTILINE))) == 1
        assert re.search(rf"Node {node} is drained by .*: a loud fan\. 2 ranks go on without it\.", run.err), run.err
    assert [found["losses"] for found in _finals(launcher.folder)] == [undisturbed(20)["losses"]] * 2
    assert _incidents(launcher.folder) == []


@pytest.mark.slow
def test_in_place_a_node_that_is_needed_leaves_when_another_has_come(
    start: Start, launcher: Any, recall: Callable[[str], object], undisturbed: Any
) -> None:
    script = (IN_PLACE, "--steps=60", "--step-s=0.05", "--wait-for-worlds=3", "--say-steps")
    runs = {name: start(name, "2:3", *script, last_call_s=1) for name in "ab"}
    for run in runs.values():
        run.until_line(r"^STEP 2 ")
    recall("a")
    runs["a"].until(lambda: "The node stays: the job needs all 2 of its nodes." in runs["a"].err, "why it stays")
    runs["c"] = start("c", "2:3", *script)
    _assert_left_well(runs.pop("a"), "a")
    assert [run.wait() for run in runs.values()] == [0, 0], [run.err for run in runs.values()]
    assert len(set(re.findall(r"^STEP \d+ pid (\d+)", runs["b"].out, re.MULTILINE))) == 1
    assert final(launcher.folder, 1)["parameters"] == undisturbed(60)["parameters"]
    assert _incidents(launcher.folder) == []
