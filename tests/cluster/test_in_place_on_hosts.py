"""Going on in place between hosts that have addresses of their own, where 127.0.0.1 leads to nobody else."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from hosts import Host, Network
from jobs import Etcd, script_path, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CUT_S = 8.0
SCRIPT = """
import os, sys, time
import torch, unicron_elastic

os.write(1, b"STARTED\\n")

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, snapshot_every=5)
run.restore()
for step in run.steps(total=10**6, micro_batches=4):
    for index in step:
        step.backward(model(torch.full((1, 2), float(index))).sum())
        time.sleep(0.01)
    optimizer.step()
    os.write(1, f"step {step.number} of {run.world_size}\\n".encode())
"""


@pytest.fixture
def start(etcd: Etcd, tmp_path: Path) -> Callable[..., Path]:
    """Starts the host's part of a job of so many nodes at most; its output."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def begin(host: Host, nodes: int = 2) -> Path:
        out = tmp_path / f"{host.name}-{len(host.started)}.out"
        out.touch()
        words = [
            f"--nnodes=1:{nodes}",
            "--max-restarts=9",
            "--rdzv-backend=unicron",
            f"--rdzv-endpoint={etcd.endpoint}",
        ]
        words += ["--rdzv-id=job", f"--local-addr={host.address}", "--rdzv-conf=last_call_timeout=20", str(script)]
        own = {"UNICRON_NODE_NAME": host.name, "XDG_STATE_HOME": str(tmp_path / host.name), "OMP_NUM_THREADS": "1"}
        host.start([script_path("unicron-run"), *words], env={**os.environ, **own}, out=out)
        return out

    return begin


def test_a_host_that_comes_back_trains_with_the_one_that_went_on(network: Network, start: Callable[..., Path]) -> None:
    a, b = network.add("a", "b")
    first, other = start(a), start(b)
    until(lambda: "of 2" in first.read_text() and "of 2" in other.read_text(), "both to train", first.read_text)
    assert "timed out" not in first.read_text() + other.read_text()

    with contextlib.suppress(subprocess.TimeoutExpired):
        b.power_off()
    until(lambda: "of 1" in first.read_text(), "the other to go on", first.read_text)
    b.power_on()
    again = start(b)
    until(lambda: "of 2" in again.read_text(), "it to train again", again.read_text)

    assert "did not tell what snapshots they have" not in again.read_text()
    assert first.read_text().count("\nstep 0 of") <= 1  # who went on did not begin anew


def _cut(one: Host, *others: Host) -> None:
    """Has nothing pass between them any more, and tells nobody; other hosts are reached as before."""
    for other in others:
        _speak(one, other, "02:00:00:00:ff:ff")


def _mend(one: Host, *others: Host) -> None:
    for other in others:
        _speak(one, other, "")


def _speak(one: Host, other: Host, mac: str) -> None:
    for here, there in ((one, other), (other, one)):
        address = mac or there.network.mac_of(there.number)
        here._configure(f"neigh replace {there.address} lladdr {address} dev eth0 nud permanent")


def _until_all_train(size: int, outs: Mapping[str, Path]) -> None:
    """Waits until each of these hosts makes a step, from now on, with so many nodes."""
    for name, out in outs.items():
        told = len(out.read_text())
        until(partial(_has_said, out, told, f"of {size}"), f"{name} to train with {size} nodes", out.read_text)


def _has_said(out: Path, told: int, words: str) -> bool:
    return words in out.read_text()[told:]


def _check_each_step_once(out: Path) -> None:
    steps = [int(number) for number in re.findall(r"^step (\d+) of", out.read_text(), re.MULTILINE)]
    assert steps == list(range(len(steps)))


def test_a_host_that_the_others_cannot_reach_comes_back_each_time(network: Network, start: Callable[..., Path]) -> None:
    """It reaches etcd all the time: its connections are lost, and its lease is not."""
    hosts = dict(zip("abcd", network.add(*"abcd"), strict=True))
    outs = {name: start(host, 4) for name, host in hosts.items()}
    others = [host for name, host in hosts.items() if name != "b"]
    until(lambda: all("of 4" in out.read_text() for out in outs.values()), "all to train", outs["a"].read_text)
    for times in (1, 2):
        _cut(hosts["b"], *others)
        _until_all_train(3, {"a": outs["a"]})
        time.sleep(CUT_S)  # as long as the fault lasts
        _mend(hosts["b"], *others)
        _until_all_train(4, outs)
        assert outs["b"].read_text().count("STARTED") <= 1 + 2 * times, outs["b"].read_text()
    for host in others:
        assert outs[host.name].read_text().count("STARTED") == 1
        _check_each_step_once(outs[host.name])


def test_two_hosts_of_four_that_the_others_cannot_reach_come_back(network: Network, start: Callable[..., Path]) -> None:
    """All four reach etcd all the time: one side goes on without the other, which waits until it is reached again."""
    hosts = dict(zip("abcd", network.add(*"abcd"), strict=True))
    outs = {name: start(host, 4) for name, host in hosts.items()}

    def told() -> str:
        return "".join(f"--- {name}\n{out.read_text()[-3000:]}" for name, out in outs.items())

    until(lambda: all("of 4" in out.read_text() for out in outs.values()), "all to train", told)
    stayed = set("abcd")
    for sides in (("ab", "cd"), ("ac", "bd")):
        told_before = {name: len(out.read_text()) for name, out in outs.items()}
        for name in sides[0]:
            _cut(hosts[name], *(hosts[other] for other in sides[1]))
        side = until(partial(_side_that_goes_on, sides, outs, told_before), "two to go on", told)
        time.sleep(CUT_S)  # as long as the fault lasts
        _until_all_train(2, {name: outs[name] for name in side})
        for name in sides[0]:
            _mend(hosts[name], *(hosts[other] for other in sides[1]))
        _until_all_train(4, outs)
        stayed &= set(side)
    for name, out in outs.items():
        said = out.read_text()
        assert said.count("This node was taken out of the job") <= 2, told()
        if name in stayed and said.count("STARTED") == 1:  # else it had missed the end of a step when the cut came
            _check_each_step_once(out)


def _side_that_goes_on(sides: tuple[str, ...], outs: Mapping[str, Path], told: Mapping[str, int]) -> str | None:
    return next((each for each in sides if all(_has_said(outs[name], told[name], "of 2") for name in each)), None)
