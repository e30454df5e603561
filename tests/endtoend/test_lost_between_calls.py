"""Two nodes, of which one, or its rank, is lost while the ranks are behind a call of ``run.steps()``."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

pytestmark = pytest.mark.trains

SCRIPT = """
import os, sys, time, torch, unicron_elastic
from pathlib import Path
torch.set_num_threads(1)
torch.manual_seed(5)
rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder = Path(os.environ["PROBE"])
def say(text):
    os.write(1, f"{text}\\n".encode())
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, reproducible=True)
for epoch in range(3):
    for step in run.steps(total=2 * (epoch + 1), micro_batches=2):
        for index in step:
            step.backward(model(torch.ones(1, 4) * (index + step.number)).square().mean())
        optimizer.step()
        say(f"STEP {step.number}")
    if run.is_passing:
        continue
    if epoch == int(sys.argv[1]) and not (folder / "lost").exists():
        say(f"EVALUATES rank {rank} pid {os.getpid()}")
        while not (folder / "lost").exists():
            time.sleep(0.01)
    run.mean(1.0)
    say(f"MEAN of {epoch} partial {run.is_partial} world {run.world_size}")
if len(sys.argv) > 2 and rank == 0:
    say("HAS TRAINED")
    while not (folder / "end").exists():
        time.sleep(0.002)
say(f"TRAINED {[round(each, 12) for each in model.weight.flatten().tolist()]}")
"""


Start = Callable[..., tuple[Any, Any]]


@pytest.fixture
def start(launcher: Any) -> Start:
    """Starts two nodes that meet in a store of this process, and waits until their ranks, 0 and 1, are in an epoch."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def start(epoch: int, *arguments: str) -> tuple[Any, Any]:
        options = (
            "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{store.port}",
            "--rdzv-id=job", "--rdzv-conf=is_host=false,last_call_timeout=1,keep_alive_interval=1", "--max-restarts=3",
            launcher.script("train.py", SCRIPT), str(epoch), *arguments,
        )  # fmt: skip
        runs = [launcher.start(*options) for _ in range(2)]
        ranks = [run.until_line(r"^EVALUATES rank (\d)")[0] for run in runs]
        return (runs[0], runs[1]) if ranks == ["0", "1"] else (runs[1], runs[0])

    return start


def _pid(run: Any) -> int:
    return int(run.until_line(r"^EVALUATES rank \d pid (\d+)")[0])


def _let_evaluate(launcher: Any, left: Any, pid: int) -> None:
    """Let who waits in its evaluation go on when the process ``pid`` is gone."""
    left.until(lambda: not Path(f"/proc/{pid}").exists(), "the end of a worker")
    (launcher.folder / "lost").touch()


def _steps(run: Any) -> list[int]:
    return [int(number) for number in re.findall(r"^STEP (\d+)", run.out, flags=re.MULTILINE)]


def test_who_is_left_does_not_wait_for_a_node_whose_launcher_was_killed(launcher: Any, start: Start) -> None:
    left, lost = start(1)
    pid = _pid(lost)
    lost.process.kill()
    _let_evaluate(launcher, left, pid)
    assert left.wait() == 0, left.err
    assert "gives no sign of life, and connections have broken: it is lost. 1 rank goes on" in left.err
    assert _steps(left) == list(range(6))
    assert "MEAN of 1 partial True world 1" in left.out


def test_the_others_go_on_with_what_they_do_and_the_lost_one_is_replaced(launcher: Any, start: Start) -> None:
    runs = left, lost = start(1)
    os.kill(_pid(lost), signal.SIGKILL)
    _let_evaluate(launcher, left, _pid(lost))
    assert [run.wait() for run in runs] == [0, 0], left.err + lost.err
    assert "was killed by signal 9 (SIGKILL) after 4 steps. 1 rank goes on with what it does between steps." in left.err
    assert _steps(left) == list(range(6))
    assert "begins again" not in left.err
    assert "TRAINED" in left.out


def test_a_replacement_that_comes_to_the_others_as_they_end_ends_with_them(launcher: Any, start: Start) -> None:
    runs = left, lost = start(1, "waits")
    os.kill(_pid(lost), signal.SIGKILL)
    _let_evaluate(launcher, left, _pid(lost))
    left.until_line(r"^HAS TRAINED")
    lost.until(lambda: "rank 1 is back and joins the others" in lost.err, "the replacement")
    (launcher.folder / "end").touch()
    assert [run.wait() for run in runs] == [0, 0], left.err + lost.err
    assert _steps(left) == list(range(6))


def test_all_begin_again_if_the_others_end_as_nobody_does_what_the_lost_one_had_to_do(
    launcher: Any, start: Start
) -> None:
    runs = left, lost = start(2)
    os.kill(_pid(lost), signal.SIGKILL)
    _let_evaluate(launcher, left, _pid(lost))
    assert [run.wait() for run in runs] == [0, 0], left.err + lost.err
    assert "was lost after the last step, and nobody does what it had to do there: all workers begin again." in left.err
    assert _steps(left) == [*range(6), *range(6)]
    assert [run.out.count("TRAINED") for run in runs] == [2, 1]
