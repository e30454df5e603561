"""Two jobs on four simulated hosts go through a loss, a return, an end and a submission, and nodes go where they earn.

etcd, agents and training are real (examples/two_jobs); a host is an agent that is killed with all that it runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).parent.parent.parent
sys.path[:0] = [str(TOP / "examples" / "two_jobs"), str(TOP / "benchmarks")]

DEADLINE_S = 120.0
LONG = 10**6


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Any]:
    from run import Cluster

    from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

    with EmbeddedEtcd() as etcd:
        found = Cluster(etcd.endpoint, tmp_path)
        try:
            yield found
        finally:
            found.close()


def until(cluster: Any, wanted: dict[str, int]) -> None:
    """Waits until so many hosts work for each job, and none for another."""
    has_come = _wait(lambda: _counts(cluster) == wanted)
    logs = {path.name: path.read_text()[-2000:] for path in cluster.folder.glob("*.log")}
    assert has_come, f"{_counts(cluster)} instead of {wanted}: {logs}"


def until_steps(job: Any, more: int) -> None:
    """Waits until a job has made so many steps more."""
    from waf import made_at

    before = len(made_at(job))
    assert _wait(lambda: len(made_at(job)) >= before + more), f"{job.name} does not train"


def _counts(cluster: Any) -> dict[str, int]:
    return {job: len(hosts) for job, hosts in cluster.working().items()}


def _wait(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_loss_regroup_return_finish_and_submission(cluster: Any) -> None:
    from waf import made_at

    for host in "abcd":
        cluster.start(host)
    base = cluster.submit("base", 1.0, "1:4", 12, LONG)
    chat = cluster.submit("chat", 2.0, "1:2", 4, 300)
    until(cluster, {"base": 2, "chat": 2})
    for job in (base, chat):
        until_steps(job, 3)
    lost = cluster.working()["chat"][0]
    cluster.lose(lost)
    until(cluster, {"base": 1, "chat": 2})  # chat is worth more
    until_steps(chat, 3)
    cluster.start(lost)
    until(cluster, {"base": 2, "chat": 2})
    until(cluster, {"base": 4})  # chat has ended
    assert len(made_at(chat)) == 300
    until_steps(base, 3)
    evaluation = cluster.submit("eval", 3.0, "1:3", 6, LONG)
    until(cluster, {"base": 1, "eval": 3})
    until_steps(evaluation, 3)
    moments = made_at(base)
    steps = sorted(
        {int(line.split()[1]) for path in base.log.glob("*.steps") for line in path.read_text().splitlines()}
    )
    assert steps == list(range(steps[-1] + 1)), "a step of base is missing"
    assert len(moments) == len(steps)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_plan_earns_more_than_jobs_that_keep_their_nodes_and_than_equal_shares(tmp_path: Path) -> None:
    from regroup import POLICIES, run

    waf = {}
    for policy in POLICIES:
        folder = tmp_path / policy.replace(" ", "-")
        folder.mkdir()
        waf[policy] = run(policy, folder, phase_s=20.0).waf
    assert max(waf, key=lambda policy: waf[policy]) == "the plan", waf
