"""Workers that are told to stop while they wait in a collective."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# Rank 2 raises in its own code while rank 1 waits for rank 0, whose way out is slow: its connections stay open on it.
FLAGGED = """
import os, signal, sys, time
import torch, torch.distributed as dist
import torch.distributed.nn
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([0, 1])
dist.barrier()
os.write(1, f"READY {rank} {os.getpid()}\\n".encode())
if rank == 2:
    while not os.path.exists(os.path.join(os.environ["PROBE"], "raise")):
        time.sleep(0.01)
    raise ValueError("mine")
if rank == 0:
    while not os.path.exists(os.path.join(os.environ["PROBE"], "leave")):
        time.sleep(0.01)
    sys.exit(0)
try:
    dist.all_reduce(torch.ones(1), group=group)
except RuntimeError as error:
    os.write(1, f"FREED asked={bool(asked)}\\n".encode())
    sys.exit(0)
"""


def test_a_handler_of_sigterm_runs_though_its_worker_waits_in_a_collective(launcher: Any) -> None:
    launcher.script("flagged.py", FLAGGED)
    run = launcher.start("--nproc-per-node=3", "--shutdown-timeout=60", "flagged.py", fast=False)
    run.until_line(r"^READY", 3)
    (launcher.folder / "raise").touch()
    run.until_line(r"^FREED asked=True")  # not by the end of rank 0, which waits for this test
    (launcher.folder / "leave").touch()
    assert run.wait() == 1
    assert re.search(r"the collectives of this worker are broken off: rank 2 raised ValueError: mine", run.err)


HANDLES = "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))"
# Rank 0 stays: with its end rank 1 would be free, which may be told to stop some milliseconds later.
DEFAULT = FLAGGED.replace(HANDLES, "if os.environ['RANK'] == '0':\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)")


def test_a_worker_without_a_handler_ends_without_a_word(launcher: Any) -> None:
    launcher.script("default.py", DEFAULT)
    run = launcher.start("--nproc-per-node=3", "--shutdown-timeout=60", "default.py", fast=False)
    run.until_line(r"^READY", 3)
    waits = re.search(r"^READY 1 (\d+)$", run.out, re.MULTILINE)
    assert waits
    (launcher.folder / "raise").touch()
    run.until(lambda: not Path(f"/proc/{waits[1]}").exists(), "the end of rank 1")
    (launcher.folder / "leave").touch()
    assert run.wait() == 1
    assert "rank 2 raised ValueError: mine" in run.err
    assert "FREED" not in run.out
    assert "broken off" not in run.err
