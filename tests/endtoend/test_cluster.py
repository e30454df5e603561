"""Agents of one job that meet over a real etcd, none of them special."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

DEADLINE_S = 60.0


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


@pytest.fixture
def options(etcd: EmbeddedEtcd, node_options: list[str]) -> Callable[..., list[str]]:
    """The options of a node."""
    return partial(arguments_of, etcd.endpoint, node_options[-1])


def arguments_of(endpoint: str, script: str, *more: str, last_call_s: float = 1.0) -> list[str]:
    return [
        *more, "--nproc-per-node=1", "--rdzv-backend=unicron", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job",
        f"--rdzv-conf=last_call_timeout={last_call_s:g},lease_ttl=1", "--max-restarts=3", "--local-addr=127.0.0.1",
        script,
    ]  # fmt: skip


def start(launcher: Any, node: str, arguments: list[str], **more: Any) -> Any:
    return launcher.start(*arguments, env={"UNICRON_NODE_NAME": node}, **more)


def stop(launcher: Any, runs: list[Any]) -> None:
    (launcher.folder / "stop").touch()
    assert [run.wait() for run in runs] == [0] * len(runs), [run.err for run in runs]


def test_ranks_follow_the_names_of_the_nodes_not_the_order_in_which_they_came(launcher: Any, options: Any) -> None:
    # Nobody waits for a last call when all are there who can be.
    first = start(launcher, "node10", options("--nnodes=1:2", last_call_s=600))
    second = start(launcher, "node9", options("--nnodes=1:2", last_call_s=600))
    assert first.until_line(r"^GENERATION 0 of 2 rank (\d)") == ["1"]
    assert second.until_line(r"^GENERATION 0 of 2 rank (\d)") == ["0"]
    stop(launcher, [first, second])


def test_a_killed_worker_restarts_all_with_the_same_ranks(launcher: Any, options: Any) -> None:
    runs = [start(launcher, name, options("--nnodes=2")) for name in ("a", "b")]
    pids = [run.until_line(r"^GENERATION 0 of 2 rank \d pid (\d+)")[0] for run in runs]
    os.kill(int(pids[1]), signal.SIGKILL)
    for rank, run in enumerate(runs):
        run.until_line(rf"^GENERATION 1 of 2 rank {rank}")
    stop(launcher, runs)


def test_a_node_that_takes_over_from_the_only_one_goes_on_with_its_count(
    launcher: Any, options: Any, etcd: EmbeddedEtcd
) -> None:
    first = start(launcher, "a", options("--nnodes=1"))
    pids = first.until_line(r"^GENERATION 0 of 1 rank \d pid (\d+)")
    spare = start(launcher, "b", options("--nnodes=1"))
    with EtcdStore(StoreAddress.parse(etcd.endpoint)) as store:
        spare.until(lambda: len(store.read_prefix(JobKeys("job").member("")).entries) == 2, "it waits")
    os.kill(int(pids[0]), signal.SIGKILL)
    first.until_line("^GENERATION 1 of 1")
    first.process.kill()
    spare.until_line("^GENERATION 2 of 1")  # the loss of a node counts, too
    stop(launcher, [spare])


@pytest.mark.parametrize("lost", ["a", *(pytest.param(name, marks=pytest.mark.slow) for name in "bc")])
def test_any_node_may_go_and_the_others_keep_their_ranks(launcher: Any, options: Any, lost: str) -> None:
    runs = {name: start(launcher, name, options("--nnodes=2:3")) for name in "abc"}
    for name, run in runs.items():
        run.until_line(rf"^GENERATION 0 of 3 rank {'abc'.index(name)}")
    gone = runs.pop(lost)
    gone.process.kill()
    left = {"a": {"c": 0, "b": 1}, "b": {"a": 0, "c": 1}, "c": {"a": 0, "b": 1}}[lost]
    for name, rank in left.items():
        runs[name].until_line(rf"^GENERATION 1 of 2 rank {rank}")
    back = start(launcher, lost, options("--nnodes=2:3"))
    for run in (back, *runs.values()):
        run.until_line(r"^GENERATION \d of 3")
    stop(launcher, [back, *runs.values()])


def test_training_goes_on_while_the_store_is_gone(launcher: Any, options: Any, etcd: EmbeddedEtcd) -> None:
    runs = [start(launcher, name, options("--nnodes=1:2")) for name in ("a", "b")]
    for run in runs:
        run.until_line(r"^GENERATION 0 of 2")
    os.kill(etcd.pid, signal.SIGSTOP)
    try:
        for run in runs:
            run.until(lambda run=run: "cannot be seen" in run.err, "the word of blindness")
    finally:
        os.kill(etcd.pid, signal.SIGCONT)
    for run in runs:
        run.until(lambda run=run: "can be seen again" in run.err, "the word of sight")
    assert all(run.out.count("GENERATION") == 1 for run in runs)
    stop(launcher, runs)


@pytest.mark.slow
@pytest.mark.parametrize("keeps_data", [True, False])
def test_a_store_that_was_restarted_is_gone_on_with(launcher: Any, node_options: list[str], keeps_data: bool) -> None:
    folder = launcher.folder / "etcd"
    with EmbeddedEtcd(data_dir=folder) as first:
        port = int(first.endpoint.rpartition(":")[2])
        arguments = arguments_of(first.endpoint, node_options[-1], "--nnodes=1:2")
        runs = [start(launcher, name, arguments) for name in ("a", "b")]
        pids = [run.until_line(r"^GENERATION 0 of 2 rank \d pid (\d+)")[0] for run in runs]
    for run in runs:
        run.until(lambda run=run: "cannot be seen" in run.err, "the word of blindness")
    if not keeps_data:
        shutil.rmtree(folder)
    with EmbeddedEtcd(data_dir=folder, port=port):
        word = "can be seen again" if keeps_data else "has lost its data"
        for run in runs:
            run.until(lambda run=run: word in run.err, word)
        os.kill(int(pids[0]), signal.SIGKILL)
        for rank, run in enumerate(runs):
            run.until_line(rf"^GENERATION 1 of 2 rank {rank}")
        assert all(run.out.count("GENERATION") == 2 for run in runs)
        stop(launcher, runs)


def test_a_job_that_has_ended_is_closed_to_who_comes_late(launcher: Any, options: Any) -> None:
    (launcher.folder / "stop").touch()
    assert start(launcher, "a", options("--nnodes=1")).wait() == 0
    (launcher.folder / "stop").unlink()
    late = start(launcher, "b", options("--nnodes=1"))
    assert late.wait() == 1
    assert "the job 'job' is over: It has ended well on a." in late.err
    assert late.logs_left() == [], "torch has made a folder, for workers that never were"
    assert "Traceback" not in late.err


def test_an_etcd_that_is_not_there_is_one_sentence(launcher: Any, options: Any, etcd: EmbeddedEtcd) -> None:
    arguments = [
        argument.replace("lease_ttl=1", "lease_ttl=1,connect_timeout=1") for argument in options("--nnodes=1:2")
    ]
    etcd.stop()
    run = start(launcher, "a", arguments)
    assert run.wait() == 1
    assert run.logs_left() == []
    assert "the job 'job' cannot be joined: " in run.err
    assert "Traceback" not in run.err


MEET = """
import os, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
count, store = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["TORCHELASTIC_USE_AGENT_STORE"]
os.write(1, f"MET {count} {int(total)} by the agent's store {store} pid {os.getpid()}\\n".encode())
while not os.path.exists(os.path.join(os.environ["PROBE"], "stop")):
    time.sleep(0.02)
"""


@pytest.mark.trains
@pytest.mark.parametrize("tool", [pytest.param("torchrun", marks=pytest.mark.slow), "unicron-run"])
def test_workers_meet_in_a_store_of_their_own_if_they_are_to(launcher: Any, etcd: EmbeddedEtcd, tool: str) -> None:
    # The first worker hosts it then, as under torch's own rendezvous; so it needs a port that the agent has not taken.
    arguments = arguments_of(etcd.endpoint, launcher.script("meet.py", MEET), "--nnodes=2")
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    runs = [launcher.start(*arguments, tool=tool, env={**env, "UNICRON_NODE_NAME": name}) for name in "ab"]
    pids = [run.until_line(r"^MET 0 2 by the agent's store False pid (\d+)")[0] for run in runs]
    os.kill(int(pids[1]), signal.SIGKILL)
    for run in runs:
        run.until_line(r"^MET \d 2 by the agent's store False", count=2)
    stop(launcher, runs)


def test_plain_torchrun_meets_over_it_too(launcher: Any, options: Any) -> None:
    runs = [start(launcher, name, [*options("--nnodes=2")], tool="torchrun") for name in ("a", "b")]
    for rank, run in enumerate(runs):
        run.until_line(rf"^GENERATION 0 of 2 rank {rank}")
    began = time.monotonic()
    stop(launcher, runs)
    assert time.monotonic() - began < DEADLINE_S
