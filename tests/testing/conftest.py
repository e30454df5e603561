"""Small training jobs of one or two ranks that break by a plan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 30.0

# Says on stdout how far it got. GATHER: "ddp", or "manual" for a script that reduces by itself.
TRAIN = """
from unicron_elastic.testing.chaos import install_from_environment; install_from_environment()
import contextlib, os, threading, time
import torch, torch.distributed as dist
from torch.distributed import all_reduce as reduce_by_name
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
torch.manual_seed(0)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gather, width = os.environ.get("GATHER", ""), int(os.environ.get("WIDTH", "8"))
steps, micro_batches = int(os.environ.get("STEPS", "4")), int(os.environ.get("MICRO_BATCHES", "1"))

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(width, width, bias=False)
    def forward(self, x):
        say("forward", step, micro_batch)
        return self.layer(x).sum()

if gather:
    dist.init_process_group("gloo", init_method="file://" + os.environ["STORE"], rank=rank, world_size=world)
step = micro_batch = 0
inner = Model()
model = DistributedDataParallel(inner) if gather == "ddp" else inner
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
{before}
for step in range(1, steps + 1):
    with torch.no_grad():
        inner.layer(torch.ones(1, width))  # an evaluation: no forward of a step
    if gather == "manual":
        dist.all_reduce(torch.ones(1))  # for a log: no gradients
    for micro_batch in range(1, micro_batches + 1):
        is_last = micro_batch == micro_batches
        with contextlib.nullcontext() if is_last or gather != "ddp" else model.no_sync():
            loss = model(torch.full((1, width), float(rank + 1)))
            say("backward", step, micro_batch)
            loss.backward()
    if gather == "manual":
        reduce_by_name(inner.layer.weight.grad)
    say("reduced", step, inner.layer.weight.grad[0, 0].item())
    {inside}
    began = time.monotonic()
    optimizer.step()
    say("stepped", step, time.monotonic() - began)
    optimizer.zero_grad()
say("end")
"""


def train_script(before: str = "", inside: str = "") -> str:
    """The script's text, with something more before and in its loop."""
    return TRAIN.format(before=before, inside=inside)


class Worker:
    """One rank of a job."""

    def __init__(self, server: Server, pid: int, output: Path) -> None:
        self._server = server
        self.pid = pid
        self._output = output

    @property
    def out(self) -> str:
        """What it said on stdout and stderr so far."""
        return self._output.read_text()

    @property
    def last(self) -> str:
        """The last place in the script that it told of, without what follows the step."""
        told = [
            line for line in self.out.splitlines() if line.startswith(("forward", "backw", "reduced", "step", "end"))
        ]
        return " ".join(told[-1].split()[: 2 if told[-1].startswith(("reduced", "stepped")) else 3])

    def wait(self) -> int:
        """Its exit code."""
        code = self._server.ask({"wait": self.pid, "seconds": DEADLINE_S})["code"]
        assert code is not None, f"it still runs\n{self.out}"
        return int(code)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Waits for something; fails the test at the deadline."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, f"{what}: not seen\n{self.out}"
            time.sleep(0.005)

    def until_stopped(self) -> None:
        """Waits until it is stopped as a whole."""
        stat = Path(f"/proc/{self.pid}/stat")
        self.until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "stopped")

    def kill(self) -> None:
        """Ends it."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()


class Server:
    """The process whose forks the workers are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        program = Path(__file__).with_name("fork_server.py")
        env = {key: value for key, value in os.environ.items() if not key.startswith(("UNICRON_", "TORCHEL"))}
        self._process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request and its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def start(self, plan: str, *, ranks: int = 1, script: str | None = None, **env: str) -> list[Worker]:
        """Starts a job, with ``env`` beside what a launcher sets."""
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        path = folder / "train.py"
        path.write_text(train_script() if script is None else script)
        workers = []
        for rank in range(ranks):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "TORCHELASTIC_RESTART_COUNT": "0",
                "STORE": str(folder / "store"),
                "UNICRON_CHAOS": plan,
                **env,
            }
            output = folder / f"rank-{rank}"
            output.touch()
            pid = self.ask({"script": str(path), "output": str(output), "env": variables})["pid"]
            workers.append(Worker(self, pid, output))
        return workers

    def end(self) -> None:
        """Ends it with all that it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Starts jobs."""
    server = Server(tmp_path_factory.mktemp("jobs"))
    try:
        yield server
    finally:
        server.end()


@pytest.fixture(scope="session")
def script() -> Callable[..., str]:
    """``train_script`` for the test modules, which cannot import this file."""
    return train_script
