"""Nodes whose workers go on in place, and what befalls them while others join, or at the same moment as others."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = pytest.mark.trains

IN_PLACE = str(Path(__file__).with_name("train_in_place.py"))
Start = Callable[..., Any]
NOT_ON_B = """
import os, runpy, sys
import torch  # as scripts do, before they fail
if os.environ["UNICRON_NODE_NAME"] == "b":
    raise ValueError("no data here")
sys.argv[0] = {script!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture
def start(launcher: Any) -> Iterator[Start]:
    """Starts a node: its name, how many there are to be, and strikes."""
    with EmbeddedEtcd() as etcd:

        def started(node: str, nodes: str, *strikes: str, steps: int = 2000, script: str = IN_PLACE) -> Any:
            return launcher.start(
                f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-backend=unicron",
                f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", "--rdzv-conf=last_call_timeout=1,lease_ttl=30",
                "--max-restarts=9", "--local-addr=127.0.0.1", f"--unicron-ledger=ledger-{node}",
                script, f"--steps={steps}", "--step-s=0.03", "--say-steps",
                *(f"--strike={strike}" for strike in strikes), env={"UNICRON_NODE_NAME": node},
            )  # fmt: skip

        yield started


def _pids(run: Any) -> list[int]:
    """Of those who have made steps there, in their order."""
    return list(dict.fromkeys(int(pid) for pid in run.until_line(r"^STEP \d+ pid (\d+)")))


def _until_another(run: Any, pid: int) -> int:
    """The process that makes steps there instead of ``pid``."""
    run.until(lambda: _pids(run)[-1] != pid, f"steps of another process than {pid}")
    return _pids(run)[-1]


def _end(*runs: Any) -> None:
    for run in runs:
        run.process.terminate()
    for run in runs:
        run.wait()


def test_nodes_that_lose_their_only_ranks_in_the_same_moment_train_to_the_end(launcher: Any, start: Start) -> None:
    strikes = ("0:3:accumulate:raise", "1:3:accumulate:raise")
    runs = [start(node, "2", *strikes, steps=6) for node in ("a", "b")]
    assert [run.wait() for run in runs] == [0, 0]
    finals = [json.loads((launcher.folder / f"final-{rank}.json").read_text()) for rank in (0, 1)]
    assert finals[0]["parameters"] == finals[1]["parameters"]


def test_a_late_node_whose_worker_ends_before_it_has_a_part_does_not_stop_the_others(
    launcher: Any, start: Start
) -> None:
    old = start("a", "1:2")
    (pid,) = _pids(old)
    new = start("b", "1:2", "1:-1:before:kill")
    new.until((launcher.folder / "struck-1--1-before").exists, "the end of the newcomer")
    new.until_line(r"^STEP ")
    assert _pids(old) == [pid]
    _end(old, new)


def test_a_node_that_fails_again_and_again_on_its_way_leaves_and_the_others_train_on(
    launcher: Any, start: Start
) -> None:
    script = launcher.script("train_not_on_b.py", NOT_ON_B.format(script=IN_PLACE))
    old = start("a", "1:2", script=script)
    (pid,) = _pids(old)
    new = start("b", "1:2", script=script)
    assert new.wait() == 1
    assert "Others train without this node: it leaves the job." in new.err
    before = len(old.until_line(r"^STEP "))
    old.until_line(r"^STEP ", count=before + 5)
    assert _pids(old) == [pid]
    _end(old)


def test_a_node_whose_keeper_is_lost_goes_on_with_another(start: Start) -> None:
    runs = [start(node, "2") for node in ("a", "b")]
    (pid,), (lost,) = (_pids(run) for run in runs)
    os.kill(runs[1].named("unicron-keeper"), signal.SIGKILL)
    _until_another(runs[1], lost)
    assert _pids(runs[0]) == [pid]
    _end(*runs)


def test_what_a_replacement_raises_is_known_also_when_the_nodes_have_met_again(launcher: Any, start: Start) -> None:
    old = start("a", "1:2", "0:100:forward:raise")
    (pid,) = _pids(old)
    new = start("b", "1:2")
    new.until_line(r"^STEP ")
    os.kill(pid, signal.SIGKILL)
    second = _until_another(old, pid)
    _until_another(old, second)
    records = [json.loads(line) for line in (launcher.folder / "ledger-a").read_text().splitlines()]
    assert [each["exception_type"] for each in records][-1] == "OSError"
    _end(old, new)


def _killed_thrice(run: Any) -> None:
    """A worker there, each time that it trains again."""
    for times in (1, 2, 3):
        run.until(lambda times=times: len(set(_pids(run))) >= times, f"worker {times}")
        os.kill(_pids(run)[-1], signal.SIGKILL)


def _steps(run: Any) -> list[int]:
    return [int(number) for number in run.until_line(r"^STEP (\d+) ")]


def test_a_node_whose_worker_fails_again_and_again_leaves_and_the_others_lose_no_step(
    launcher: Any, start: Start
) -> None:
    old, failing = (start(node, "1:2") for node in ("a", "b"))
    (pid,) = _pids(old)
    _killed_thrice(failing)
    assert failing.wait() == 1
    assert "Worker 0 has failed 3 times within 60 min. This node leaves the job." in failing.err
    before = len(_steps(old))
    old.until_line(r"^STEP ", count=before + 5)
    assert _pids(old) == [pid]
    assert _steps(old) == list(range(len(_steps(old))))
    assert "This node is in the cluster's quarantine now" in failing.err
    records = [json.loads(line) for line in (launcher.folder / "ledger-b").read_text().splitlines()]
    assert records[-1]["action"] == "isolate"
    _end(old)


def test_a_node_that_cannot_be_spared_stays_and_nobody_loses_a_step(start: Start) -> None:
    old, failing = runs = [start(node, "2") for node in ("a", "b")]
    _killed_thrice(failing)
    failing.until(lambda: len(set(_pids(failing))) == 4, "its fourth worker")
    assert "Worker 0 has failed 3 times within 60 min. The node stays: the job needs all 2 of its nodes." in failing.err
    assert _steps(old) == list(range(len(_steps(old))))
    _end(*runs)


def test_a_job_on_one_node_makes_no_step_again_however_often_a_worker_is_killed(launcher: Any) -> None:
    run = launcher.start("--standalone", "--nproc-per-node=2", "--max-restarts=9", IN_PLACE, "--steps=2000",
                         "--step-s=0.01", "--say-steps")  # fmt: skip
    for times in range(2, 6):
        run.until(lambda times=times: len(set(_pids(run))) >= times, f"worker {times}")
        os.kill([*dict.fromkeys(_pids(run))][-1], signal.SIGKILL)  # who came last, so always the same worker
    run.until(lambda: len(set(_pids(run))) == 6, "the last worker")
    assert " has failed 4 times within 60 min. The node stays: it is the only node of the job." in run.err
    numbers = _steps(run)
    assert max(before - after for before, after in itertools.pairwise(numbers)) <= 1
    _end(run)
