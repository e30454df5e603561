"""Whatever lets all ranks of a job begin again, they go on from a snapshot in memory, and the console says which."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from test_paused_jobs import EVERY, SCRIPT, made, starts

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

pytestmark = pytest.mark.trains


class Job:
    """Agents of one job by name, each of them a launcher of its own."""

    def __init__(self, launcher: Any, etcd: EmbeddedEtcd, style: str, nodes: str, every: int = EVERY) -> None:
        self.launcher = launcher
        launcher.script("train.py", SCRIPT)
        self.options = [
            f"--nnodes={nodes}", "--nproc-per-node=1", "--rdzv-backend=unicron", f"--rdzv-endpoint={etcd.endpoint}",
            "--rdzv-id=job", "--rdzv-conf=last_call_timeout=1,lease_ttl=2", "--max-restarts=3",
            "--local-addr=127.0.0.1", "train.py", style, str(every),
        ]  # fmt: skip
        self.runs: dict[str, Any] = {}

    def begin(self, name: str) -> Any:
        self.runs[name] = self.launcher.start(*self.options, env={"UNICRON_NODE_NAME": name}, fast=False)
        return self.runs[name]

    def pids(self, name: str) -> list[int]:
        """Of the workers that have begun on a node, the latest last."""
        return [int(pid) for pid in re.findall(r"^START .* pid (\d+)$", self.runs[name].out, re.MULTILINE)]

    def until_trained(self) -> int:
        """Waits for a snapshot, and some steps more; returns how many steps were made."""
        for run in self.runs.values():
            run.until(lambda run=run: made(run) >= 2 * EVERY + 2, "a snapshot")
        return max(map(made, self.runs.values()))

    def until_begun_again(self, name: str, before: int, count: int = 2) -> None:
        """Waits until the workers of a node have begun again, from the newest snapshot."""
        run = self.runs[name]
        run.until(lambda: len(starts(run)) >= count, "the next start")
        step, _ = starts(run)[count - 1]
        assert step >= before - EVERY, run.err
        told = rf"All ranks go on from step {step}, from the memory of .*\. The job had come to step (\d+), of which no"
        found = run.until(lambda: re.search(told, "".join(each.err for each in self.runs.values())), "the sentence")
        assert int(found[1]) >= before - 1  # a step is counted when the script is through with it

    def end(self) -> None:
        (self.launcher.folder / "stop").touch()


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


def kill_all_workers(job: Job) -> None:
    for name in job.runs:
        os.kill(job.pids(name)[-1], signal.SIGKILL)


def kill_one_worker(job: Job) -> None:
    os.kill(job.pids("b")[-1], signal.SIGKILL)


def kill_a_launcher(job: Job) -> None:
    job.runs["b"].process.send_signal(signal.SIGKILL)


def stop_a_launcher(job: Job) -> None:
    job.runs["b"].process.send_signal(signal.SIGTERM)


def join(job: Job) -> None:
    job.begin("c")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("style", "cause"),
    [
        ("steps", kill_all_workers),  # else the others go on in place
        *(("loop", cause) for cause in (kill_all_workers, kill_one_worker, kill_a_launcher, stop_a_launcher, join)),
    ],
)
def test_all_go_on_from_memory(launcher: Any, etcd: EmbeddedEtcd, style: str, cause: Callable[[Job], None]) -> None:
    job = Job(launcher, etcd, style, "1:3")
    for name in "ab":
        job.begin(name)
    before = job.until_trained()
    cause(job)
    job.until_begun_again("a", before)
    job.end()


@pytest.mark.slow
def test_all_begin_at_step_0_where_no_snapshot_was_made_and_that_is_told(launcher: Any, etcd: EmbeddedEtcd) -> None:
    job = Job(launcher, etcd, "loop", "1", every=100_000)
    run = job.begin("a")
    job.until_trained()
    kill_all_workers(job)
    run.until(lambda: len(starts(run)) == 2, "the next start")
    run.until(lambda: "All ranks begin at step 0: no state of the job was kept." in run.err, "the sentence")
    assert [step for step, _ in starts(run)] == [0, 0]
    job.end()


ASKS_NOTHING = """
import os
import torch
import unicron_elastic

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer)
for step in run.steps(total=6, micro_batches=2):
    for index in step:
        step.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    if step.number == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_script_that_asks_for_no_snapshot_is_said_to_begin_again_with_step_0(launcher: Any) -> None:
    script = launcher.script("train.py", ASKS_NOTHING)
    run = launcher.start("--nproc-per-node=2", "--max-restarts=3", script)
    assert run.wait() == 0, run.err
    said = "run.steps() begins again with step 0: the script has not asked run.restore() for a snapshot."
    assert run.err.count(said) == 1, run.err


@pytest.mark.slow
def test_a_script_with_checkpoints_of_its_own_is_said_to_begin_again_where_it_says(launcher: Any) -> None:
    loop = "for step in run.steps"
    script = launcher.script("train.py", ASKS_NOTHING.replace(loop, f"run.begin_at(2)\n{loop}"))
    run = launcher.start("--nproc-per-node=2", "--max-restarts=3", script)
    assert run.wait() == 0, run.err
    said = "run.steps() begins again with step 2, as the script says by run.begin_at()."
    assert run.err.count(said) == 1, run.err
