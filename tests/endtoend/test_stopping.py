"""Workers that are told to stop while they wait in a collective."""

from __future__ import annotations

import os
import re
import signal
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


WAITS_TO_JOIN = """
import os, signal, time
import torch, unicron_elastic
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: None)
rank, place = os.environ["RANK"], Path(os.environ["PROBE"])
begun = place / f"begun-{rank}"
is_first = not begun.exists()
begun.touch()
os.write(1, f"BEGUN {rank} {os.getpid()}\\n".encode())
def wait_for(name):
    while not (place / name).exists():
        time.sleep(0.01)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer)
if not is_first:
    wait_for("on")
for step in run.steps(2, 2):
    for index in step:
        step.backward(model(torch.ones(1)).sum())
    optimizer.step()
    os.write(1, f"STEP {step.number} {rank}\\n".encode())
    if is_first and step.number == 0:
        wait_for("never")
"""


def test_who_waits_to_join_others_who_are_no_more_is_not_waited_for(launcher: Any) -> None:
    launcher.script("joins.py", WAITS_TO_JOIN)
    run = launcher.start("--nproc-per-node=2", "--shutdown-timeout=60", "--max-restarts=3", "joins.py", fast=False)
    run.until_line(r"^STEP 0", 2)
    pids = dict(re.findall(r"^BEGUN (\d) (\d+)$", run.out, re.MULTILINE))
    os.kill(int(pids["1"]), signal.SIGKILL)
    run.until_line(r"^BEGUN 1", 2)
    os.kill(int(pids["0"]), signal.SIGKILL)
    (launcher.folder / "on").touch()
    run.until_line(r"^STEP 1", 2)
    assert run.wait() == 0
    assert "this rank waits for the others no longer: " in run.err
