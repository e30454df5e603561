"""A training loop that does not come back from a broken collective ends its process; any other is left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from unicron_elastic.engine.transport import waiter
from unicron_elastic.worker.collectives.stuck import Glance, is_stuck
from unicron_elastic.worker.process.main_stack import StackLine

OUTER = StackLine("/home/me/train.py", 7, "train")


def _in(file: str, line: int = 40) -> tuple[StackLine, ...]:
    return StackLine(file, line, "wait"), OUTER


C10D_FILE = "/lib/torch/distributed/distributed_c10d.py"
HERE = Glance(_in(C10D_FILE), cpu_s=3.0)


def test_who_stays_in_a_wait_for_others_is_stuck() -> None:
    assert is_stuck(HERE, HERE)


@pytest.mark.parametrize(
    "now",
    [
        HERE._replace(stack=(HERE.stack[0], OUTER._replace(line=8))),
        HERE._replace(stack=_in(C10D_FILE, 42)),
        HERE._replace(cpu_s=3.1),
    ],
)
def test_who_does_anything_is_not(now: Glance) -> None:
    assert not is_stuck(HERE, now)


@pytest.mark.parametrize(
    "file",
    [
        "/home/me/train.py",
        "/lib/torch/utils/data/dataloader.py",
        "/lib/python3/queue.py",
        "/lib/torch/distributed/checkpoint/filesystem.py",
        "/lib/megatron/core/dist_checkpointing/serialization.py",
        "/lib/unicron_elastic/megatron/checkpoint.py",
    ],
)
def test_who_waits_for_something_else_is_not(file: str) -> None:
    assert not is_stuck(HERE._replace(stack=_in(file)), HERE._replace(stack=_in(file)))


def test_who_waits_in_our_own_collectives_is_stuck() -> None:
    here = HERE._replace(stack=_in(waiter.__file__))
    assert is_stuck(here, here)


SCRIPT = """
import sys, time
from unicron_elastic.worker.collectives import stuck
stuck.STUCK_S, stuck.LOOK_S = 0.5, 0.05
code = compile("import time\\ndef wait(seconds):\\n    time.sleep(seconds)\\n", sys.argv[1], "exec")
names = {}
exec(code, names)
gone_on = []
stuck.end_if_stuck(lambda: bool(gone_on), "A newer world has come.")
if sys.argv[2] == "goes on":
    gone_on.append(True)
names["wait"](1.5)
"""


@pytest.mark.parametrize(
    ("file", "what", "ends"),
    [
        ("/lib/torch/distributed/distributed_c10d.py", "stays", -signal.SIGKILL),
        ("/lib/torch/distributed/distributed_c10d.py", "goes on", 0),
        ("/home/me/train.py", "stays", 0),
    ],
)
def test_the_process_ends(file: str, what: str, ends: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), file, what],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == ends, done.stderr
    assert ("begins again. A newer world has come." in done.stderr) == (ends != 0)
