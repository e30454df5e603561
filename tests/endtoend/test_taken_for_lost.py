"""Nodes that live although the others took them for lost come back once each, and nobody else loses any work."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cable import Cable

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = pytest.mark.trains

IN_PLACE = str(Path(__file__).with_name("train_in_place.py"))
LEASE_S = 1.0  # etcd grants somewhat more
CALM_S = 5.0  # in which processes were started by the hundred
STARTED = """
import os, runpy, sys
os.write(1, b"STARTED %d\\n" % os.getpid())
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


class Node:
    """One node of a job: its agent, its way to etcd, and what its workers have done."""

    def __init__(self, name: str, run: Any, cable: Cable) -> None:
        self.name = name
        self.run = run
        self.cable = cable

    @property
    def started(self) -> list[int]:
        """The processes of workers that were started, in their order."""
        return [int(pid) for pid in re.findall(r"^STARTED (\d+)$", self.run.out, re.MULTILINE)]

    @property
    def steps(self) -> list[tuple[int, int]]:
        """(number, pid) of each step."""
        found = re.findall(r"^STEP (\d+) pid (\d+) ", self.run.out, re.MULTILINE)
        return [(int(number), int(pid)) for number, pid in found]

    def times_lost(self, name: str) -> int:
        """How often it has said that the node of this name was lost."""
        told: list[str] = re.findall(r"^\[unicron\] \S+ (.+) (?:is|are) lost: the lease", self.run.err, re.MULTILINE)
        return sum(name in names.split(", ") for names in told)

    def until_steps(self, more: int, pid: int | None = None) -> None:
        """Waits for this many more steps, of another process than ``pid``."""
        before = len(self.steps)
        self.run.until(
            lambda: len(self.steps) >= before + more and self.steps[-1][1] != pid, f"{more} steps, not of {pid}"
        )


@pytest.fixture
def begin(launcher: Any) -> Iterator[Callable[[str], list[Node]]]:
    """Starts nodes with these names, which all train when it returns."""
    cables: list[Cable] = []
    with EmbeddedEtcd() as etcd:

        def begun(names: str) -> list[Node]:
            script = launcher.script("train_started.py", STARTED.format(script=IN_PLACE))
            nodes = []
            for name in names:
                cables.append(Cable(int(etcd.endpoint.rpartition(":")[2])))
                run = launcher.start(
                    f"--nnodes=1:{len(names)}", "--nproc-per-node=1", "--rdzv-backend=unicron",
                    f"--rdzv-endpoint=127.0.0.1:{cables[-1].port}", "--rdzv-id=job",
                    f"--rdzv-conf=last_call_timeout=20,lease_ttl={LEASE_S:g}", "--max-restarts=9",
                    "--local-addr=127.0.0.1", script, "--steps=20000", "--step-s=0.03", "--say-steps",
                    env={"UNICRON_NODE_NAME": name},
                )  # fmt: skip
                nodes.append(Node(name, run, cables[-1]))
            for node in nodes:
                node.until_steps(3)
            return nodes

        yield begun
        for cable in cables:
            cable.end()


@contextlib.contextmanager
def _while_lost(nodes: Sequence[Node], other: Node) -> Iterator[None]:
    """What is begun within ends when another node has taken each of these for lost."""
    before = {node.name: other.times_lost(node.name) for node in nodes}
    yield
    other.run.until(lambda: all(other.times_lost(each) > count for each, count in before.items()), f"{before} are lost")


def _stopped(nodes: Sequence[Node], other: Node) -> None:
    """Their agents do nothing for a while; their workers go on."""
    with _while_lost(nodes, other):
        for node in nodes:
            os.kill(node.run.process.pid, signal.SIGSTOP)
    for node in nodes:
        os.kill(node.run.process.pid, signal.SIGCONT)


def _cut_from_etcd(nodes: Sequence[Node], other: Node) -> None:
    with _while_lost(nodes, other):
        for node in nodes:
            node.cable.silence()
    for node in nodes:
        node.cable.mend()


def _end(nodes: Sequence[Node]) -> None:
    for node in nodes:
        node.run.process.terminate()
    for node in nodes:
        node.run.wait()


@pytest.mark.parametrize(
    ("names", "taken", "lapse"),
    [
        pytest.param("ab", "a", _stopped, id="stopped"),
        pytest.param("ab", "b", _stopped, id="another is stopped", marks=pytest.mark.slow),
        pytest.param("abc", "bc", _stopped, id="two are stopped"),
        pytest.param("ab", "b", _cut_from_etcd, id="cut from etcd", marks=pytest.mark.slow),
    ],
)
def test_it_comes_back_once_and_the_others_make_all_their_steps(
    begin: Callable[[str], list[Node]], names: str, taken: str, lapse: Callable[[Sequence[Node], Node], None]
) -> None:
    nodes = dict(zip(names, begin(names), strict=True))
    lost, others = [nodes[name] for name in taken], [nodes[name] for name in names if name not in taken]
    lapse(lost, others[0])
    for node in lost:
        node.until_steps(10, node.started[0])
    time.sleep(CALM_S)
    assert [len(node.started) for node in lost] == [2] * len(lost), lost[0].run.err
    for node in others:
        assert node.started == [node.steps[0][1]]
        numbers = [number for number, _ in node.steps]
        assert numbers == list(range(len(numbers)))
    for node in lost:  # with the state of the others
        first, pid = next(step for step in node.steps if step[1] == node.started[1])
        assert pid == node.started[1]
        assert first > 3
    _end(list(nodes.values()))


def test_it_comes_back_each_time(begin: Callable[[str], list[Node]]) -> None:
    a, b = begin("ab")
    for times in (1, 2):
        _cut_from_etcd([b], a)
        b.until_steps(10, b.started[times - 1])
        assert len(b.started) == times + 1, b.run.err
    assert a.started == [a.steps[0][1]]
    numbers = [number for number, _ in a.steps]  # it goes on meanwhile
    assert numbers == list(range(len(numbers)))
    _end([a, b])


def _children(pid: int) -> list[str]:
    threads = os.listdir(f"/proc/{pid}/task")
    return [child for each in threads for child in Path(f"/proc/{pid}/task/{each}/children").read_text().split()]


@pytest.mark.slow
def test_time_that_passed_for_nobody_counts_for_nobody(begin: Callable[[str], list[Node]]) -> None:
    nodes = begin("abc")
    etcd_pid = next(int(pid) for pid in _children(os.getpid()) if "etcd" in Path(f"/proc/{pid}/comm").read_text())
    every = [pid for node in nodes for pid in node.run.carriers()] + [etcd_pid]
    before = [node.started for node in nodes]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in every:
            os.kill(pid, number)
        time.sleep(12.0)  # four times as long as a lease
    for node in nodes:
        node.until_steps(5)
    assert [node.started for node in nodes] == before
    for node in nodes:
        assert " lost" not in node.run.err
        assert "cannot be seen" not in node.run.err
    _end(nodes)
