"""Heartbeat connections between hosts: what the kernels make of a host that falls silent, and of one that does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, Network

DEADLINE_S = 15.0
NOTICED_S = 1.0  # until the kernel has given up a silent host
TOLD_S = 1.25  # until a probe has said so as well; a second on a quiet machine
HARMLESS_S = 0.15

# The connections of one agent. Who is lost is probed, as the coordinator would; all that happens is written down.
AGENT = """
import json, sys, time
from unicron_elastic.rendezvous.cluster.heartbeat_wire import Hello
from unicron_elastic.rendezvous.cluster.links import Links

name, *boss = sys.argv[1:]
addresses = {"boss/1": boss[0]} if boss else {}

def tell(what, node="", **more):
    print(json.dumps({"at": time.monotonic(), "what": what, "node": node, **more}), flush=True)

def lost(node):
    tell("lost", node)
    if node in addresses:
        links.probe(node, addresses[node])

def probed(node, answer):
    tell("probed", node, answer=answer.value)
    if answer.value == "answers" and node != "boss/1" and not boss:
        links.probe(node, addresses[node])  # one that ends closes its port last

def heard(node, job, told):
    addresses[node] = told["address"]
    tell("heard", node)

links = Links(
    "", Hello(name + "/1", name, "job"),
    on_opened=lambda node: tell("opened", node), on_lost=lost, on_probed=probed, on_message=heard,
)
links.secret, links.leads = "secret", not boss
tell("listens", address=f"{sys.stdin.readline().strip()}:{links.port}")
if boss:
    links.connect("boss/1", boss[0])
    while not links.tell_coordinator({"address": f"{name}:{links.port}"}):
        links.poll(0.01)
while True:
    links.poll(1.0)
    tell("turn")
"""


class Agent:
    """One on a host of its own."""

    def __init__(self, host: Host, folder: Path, boss: str = "") -> None:
        self.host, self._out = host, folder / f"{host.name}.jsonl"
        argv = [sys.executable, "-c", AGENT, host.name, *([boss] if boss else [])]
        self.process = host.start(argv, out=self._out, stdin=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{host.name}\n".encode())
        self.process.stdin.flush()
        self.address: str = self.wait_for("listens")["address"]

    def told(self, what: str, since: float = 0.0) -> list[dict[str, Any]]:
        """All of one kind that has happened since a moment."""
        lines = self._out.read_text().splitlines(keepends=True) if self._out.exists() else []
        told = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        return [each for each in told if each["what"] == what and each["at"] >= since]

    def wait_for(self, what: str, since: float = 0.0) -> dict[str, Any]:
        """The first of one kind; fails the test at the deadline."""
        end = time.monotonic() + DEADLINE_S
        while not (found := self.told(what, since)):
            assert time.monotonic() < end, f"no {what!r} in {self._out.read_text()[-2000:]}"
            time.sleep(0.005)
        return found[0]


@pytest.fixture
def agents(network: Network, tmp_path: Path) -> tuple[Agent, Agent]:
    """A coordinator and an agent that is linked to it."""
    boss_host, one_host = network.add("boss", "one")
    boss = Agent(boss_host, tmp_path)
    one = Agent(one_host, tmp_path, boss.address)
    boss.wait_for("heard")
    return boss, one


def test_a_host_without_power_is_silent_within_a_second(agents: tuple[Agent, Agent]) -> None:
    boss, one = agents
    one.host.cut()  # power_off does the same first, and then takes its time
    began = time.monotonic()
    one.host.power_off()
    lost, probed = boss.wait_for("lost"), boss.wait_for("probed")
    print("silent_host_lost:", lost["at"] - began)
    print("silent_host_told:", probed["at"] - began)
    assert (lost["node"], probed["node"], probed["answer"]) == ("one/1", "one/1", "silent")
    assert lost["at"] - began < NOTICED_S
    assert probed["at"] - began < TOLD_S


def test_a_coordinator_without_power_is_silent_within_a_second(agents: tuple[Agent, Agent]) -> None:
    boss, one = agents
    boss.host.cut()
    began = time.monotonic()
    boss.host.power_off()
    probed = one.wait_for("probed")
    print("silent_coordinator_told:", probed["at"] - began)
    assert (probed["node"], probed["answer"]) == ("boss/1", "silent")
    assert probed["at"] - began < TOLD_S


def test_a_process_that_ends_is_noticed_at_once(agents: tuple[Agent, Agent]) -> None:
    boss, one = agents
    began = time.monotonic()
    one.process.kill()
    lost = boss.wait_for("lost")
    probed = boss.wait_for("probed")
    while probed["answer"] == "answers":  # its port is closed last
        probed = boss.wait_for("probed", probed["at"] + 1e-9)
    print("ended_process_told:", probed["at"] - began)
    assert lost["node"] == "one/1"
    assert probed["answer"] in ("refused", "silent")  # the latter where a busy machine takes its time to close the port
    assert probed["at"] - began < NOTICED_S  # milliseconds, on a machine with nothing else to do


def test_a_process_that_is_stopped_keeps_its_link_and_answers(agents: tuple[Agent, Agent], tmp_path: Path) -> None:
    boss, one = agents
    os.kill(one.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    boss.wait_for("turn", began + 2 * NOTICED_S)
    asking = Agent(boss.host.network.add("two")[0], tmp_path, one.address)  # it is no coordinator, and does not run
    assert (boss.told("lost"), boss.told("probed")) == ([], [])
    probed = asking.wait_for("probed")
    assert probed["answer"] == "answers"
    os.kill(one.process.pid, signal.SIGCONT)
    one.wait_for("turn", time.monotonic())
    assert (one.told("lost"), boss.told("lost")) == ([], [])


@pytest.mark.parametrize("cut", ["both", *(pytest.param(way, marks=pytest.mark.slow) for way in ("in", "out"))])
def test_a_short_cut_costs_no_link(agents: tuple[Agent, Agent], cut: str, request: pytest.FixtureRequest) -> None:
    _, one = agents
    if cut != "both":
        request.getfixturevalue("one_way_cut")
    began = time.monotonic()
    {"both": one.host.cut, "in": one.host.cut_in, "out": one.host.cut_out}[cut]()
    time.sleep(HARMLESS_S)
    one.host.restore()
    mended = time.monotonic()
    if mended - began > 2 * HARMLESS_S:
        pytest.skip(f"the machine is too busy for a short cut: it lasted {mended - began:.2f} s")
    for agent in agents:
        agent.wait_for("turn", mended + 2 * NOTICED_S)
        assert (agent.told("lost"), agent.told("probed")) == ([], [])


@pytest.mark.parametrize("cut", ["in", "out"])
def test_a_host_that_is_cut_off_in_one_direction_is_silent(agents: tuple[Agent, Agent], cut: str) -> None:
    _, one = agents
    began = time.monotonic()
    (one.host.cut_in if cut == "in" else one.host.cut_out)()
    for agent in agents:
        probed = agent.wait_for("probed")
        assert probed["answer"] == "silent"
        assert probed["at"] - began < TOLD_S + 0.2  # to shape the link takes a tool some time
