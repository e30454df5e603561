"""Workers that are told to stop while they wait in a collective."""

from __future__ import annotations

import re
import time
from typing import Any

# Rank 0 raises in its own code, rank 3 goes on sleeping for a while; nobody else has a fault of its own.
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
os.write(1, f"READY {rank}\\n".encode())
if rank == 2:
    time.sleep(1)
    raise ValueError("mine")
if rank == 0:  # a slow way out, on which its connections stay open
    while not asked:
        time.sleep(0.01)
    time.sleep(8)
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
    run.until_line(r"^FREED asked=True")
    freed_at = time.monotonic()
    assert run.wait() == 1
    assert time.monotonic() - freed_at > 3  # rank 0's end is not what freed it
    assert re.search(r"the collectives of this worker are broken off: rank 2 raised ValueError: mine", run.err)


DEFAULT = FLAGGED.replace("signal.signal(", "id(")


def test_a_worker_without_a_handler_ends_without_a_word(launcher: Any) -> None:
    launcher.script("default.py", DEFAULT)
    run = launcher.start("--nproc-per-node=3", "--shutdown-timeout=60", "default.py", fast=False)
    assert run.wait() == 1
    assert "FREED" not in run.out
    assert "broken off" not in run.err
