"""Faults of workers: noticed, recorded, restarted or reported, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

TRAIN = """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
step = 0
while True:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    step += 1
    if step == 3:
        os.write(1, f"TRAINING {restarts} {os.environ['RANK']} {os.getpid()}\\n".encode())
    if restarts != "0" and step >= 10:
        break
    time.sleep(0.01)
dist.destroy_process_group()
os.write(1, f"DONE {restarts} {os.environ['RANK']}\\n".encode())
"""
# So that it is known of a script that it makes no step.
HAS_STEPS = "import torch\ntorch.optim.SGD([torch.nn.Parameter(torch.ones(1))])\n"


def last_incidents(path: Path) -> dict[int, dict[str, Any]]:
    """Incidents by number, each as last recorded."""
    return {record["number"]: record for record in map(json.loads, path.read_text().splitlines())}


@pytest.mark.trains
def test_killed_ddp_worker_costs_one_restart_and_one_incident(launcher: Any) -> None:
    launcher.script("train.py", TRAIN)
    ledger = launcher.folder / "incidents.jsonl"
    run = launcher.start(
        "--nproc-per-node=2", "--max-restarts=2", "--unicron-ledger", str(ledger), "train.py", fast=False
    )
    run.until_line(r"^TRAINING 0 \d", count=2)
    victim = int(run.until_line(r"^TRAINING 0 1 (\d+)")[0])
    os.kill(victim, signal.SIGKILL)
    assert run.wait() == 0, run.err
    assert sorted(line for line in run.out.splitlines() if line.startswith("DONE")) == ["DONE 1 0", "DONE 1 1"]
    incidents = last_incidents(ledger)
    assert list(incidents) == [1]
    incident = incidents[1]
    assert (incident["rank"], incident["exit_code"], incident["action"]) == (1, -9, "restart")
    assert incident["restarts_used"] == 1
    assert all(value is not None and value >= 0 for value in incident["phases_ms"].values()), incident["phases_ms"]
    assert incident["total_ms"] == pytest.approx(sum(incident["phases_ms"].values()))


LEAVES = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.ones(1000)
for step in range(50):
    dist.all_reduce(tensor)
    if step == 20 and os.environ["RANK"] == "1":
        {leave}
"""


# A gloo group that is left to the interpreter's end aborts its process now and again, under torchrun as well.
@pytest.mark.trains
@pytest.mark.parametrize(
    ("leave", "may_abort"), [pytest.param("os._exit(7)", False, marks=pytest.mark.slow), ("sys.exit(7)", True)]
)
def test_who_left_is_blamed_although_the_other_complains_first(launcher: Any, leave: str, may_abort: bool) -> None:
    # The kernel closes the sockets of a process before it tells of its end, and the interpreter does so earlier still.
    launcher.script("leaves.py", LEAVES.format(leave=leave))
    ledger = launcher.folder / "incidents.jsonl"
    run = launcher.run("--nproc-per-node=2", "--unicron-ledger", str(ledger), "leaves.py")
    assert run.process.returncode == 1
    incident = last_incidents(ledger)[1]
    blamed = (incident["rank"], incident["exit_code"], incident["status"])
    assert blamed == (1, 7, "exited abnormally") or (may_abort and blamed == (1, -6, "killed by signal"))


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        pytest.param("import sys; sys.exit(3)", "exitcode  : 3 ", marks=pytest.mark.slow),
        ("import sys; sys.exit('some text')", "exitcode  : 1 "),
        pytest.param("import os; os._exit(7)", "exitcode  : 7 ", marks=pytest.mark.slow),
        pytest.param("import os; os.abort()", "exitcode  : -6 ", marks=pytest.mark.slow),
        ("import ctypes; ctypes.string_at(0)", "exitcode  : -11 "),
        ("raise KeyboardInterrupt", "exitcode  : -2 "),
        ("raise ValueError('boom')", "ValueError: boom"),
        pytest.param("def broken(:", "SyntaxError", marks=pytest.mark.slow),
    ],
)
def test_failed_worker_is_reported_and_exits_1(launcher: Any, body: str, reported: str) -> None:
    run = launcher.run("--nproc-per-node=1", launcher.script("fail.py", body + "\n"))
    assert run.process.returncode == 1
    assert "torch.distributed.elastic.multiprocessing.errors.ChildFailedError" in run.err
    assert "fail.py FAILED" in run.err
    assert reported in run.err


@pytest.mark.parametrize(
    "body",
    [
        "",
        *(
            pytest.param(body, marks=pytest.mark.slow)
            for body in ("import sys; sys.exit(0)", "import sys; sys.exit(None)")
        ),
    ],
)
def test_good_end_exits_0_and_leaves_no_folder(launcher: Any, body: str) -> None:
    run = launcher.run("--nproc-per-node=2", launcher.script("good.py", body + "\n"))
    assert run.process.returncode == 0, run.err
    assert run.logs_left() == []


def test_restarts_are_counted_as_torchrun_counts_them(launcher: Any) -> None:
    launcher.script(
        "count.py",
        "import os\nprint('ATTEMPT', os.environ['TORCHELASTIC_RESTART_COUNT'], os.environ['TORCHELASTIC_MAX_RESTARTS'],"
        " flush=True)\nos._exit(11)\n",
    )
    options = ["--nproc-per-node=1", "--max-restarts=2", "count.py"]
    ours = launcher.run("--unicron-same-failure-limit=0", *options)
    assert ours.process.returncode == 1
    assert ours.out.splitlines() == ["ATTEMPT 0 2", "ATTEMPT 1 2", "ATTEMPT 2 2"]


def test_a_job_on_a_port_that_was_named_restarts_on_it(launcher: Any) -> None:
    """As each job on one node without --standalone does before torch 2.12."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launcher.script(
        "once.py",
        "import os\nattempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "os.write(1, f'ATTEMPT {attempt} {os.environ[\"MASTER_PORT\"]}\\n'.encode())\n"
        "os._exit(11 if attempt == '0' else 0)\n",
    )
    run = launcher.run("--nproc-per-node=2", f"--master-port={port}", "--max-restarts=1", "once.py")
    assert run.process.returncode == 0, run.err
    assert run.out.count(f"ATTEMPT 1 {port}\n") == 2


@pytest.mark.trains
def test_same_failure_and_do_not_restart_code_end_early(launcher: Any) -> None:
    # Were its steps unknown, one that lives longer, as on a loaded host, might have come further.
    launcher.script("bug.py", f"{HAS_STEPS}print('ATTEMPT', flush=True)\nraise ValueError('the same each time')\n")
    run = launcher.run("--nproc-per-node=1", "--max-restarts=10", "bug.py")
    assert run.process.returncode == 1
    assert run.out.count("ATTEMPT") == 2
    assert "the same failure came twice in a row" in run.err
    launcher.script("final.py", "import sys\nprint('ATTEMPT', flush=True)\nsys.exit(93)\n")
    run = launcher.run("--nproc-per-node=1", "--max-restarts=10", "final.py")
    assert run.process.returncode == 1
    assert run.out.count("ATTEMPT") == 1


@pytest.mark.parametrize("raised", ["TimeoutError()", "ValueError(f'bad reply {attempt}')"])
def test_what_passes_is_tried_as_often_as_was_asked(launcher: Any, raised: str) -> None:
    launcher.script(
        "mends.py",
        "import os\nattempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nprint('ATTEMPT', flush=True)\n"
        f"if attempt < 3:\n    raise {raised}\n",
    )
    run = launcher.run("--nproc-per-node=1", "--max-restarts=3", "mends.py")
    assert run.process.returncode == 0, run.err
    assert run.out.count("ATTEMPT") == 4


def test_shared_memory_of_a_killed_worker_is_removed(launcher: Any) -> None:
    launcher.script(
        "shm.py",
        "import os, signal\nfrom multiprocessing import shared_memory\n"
        "made = shared_memory.SharedMemory(create=True, size=64)\nprint('MADE', made.name, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    run = launcher.run("--nproc-per-node=1", "shm.py")
    made = run.until_line(r"^MADE (\S+)")
    run.assert_gone()
    left = run.shared_memory_left(made)
    for name in left:  # this run's own, by the name its worker printed
        os.unlink(f"/dev/shm/{name.lstrip('/')}")
    assert left == []


def test_script_that_closes_our_descriptors_keeps_its_own(launcher: Any) -> None:
    launcher.script(
        "reuse.py",
        "import os\nos.closerange(3, 64)\n"
        "files = [open(os.environ['PROBE'] + f'/own-{i}', 'w') for i in range(12)]\n"
        "for file in files:\n    file.write('data')\n",
    )
    run = launcher.run("--nproc-per-node=1", "reuse.py")
    assert run.process.returncode == 0, run.err
    assert [(launcher.folder / f"own-{i}").read_text() for i in range(12)] == ["data"] * 12


def test_failure_at_once_does_not_wait_for_workers_still_starting(launcher: Any) -> None:
    launcher.script("fast.py", "import os, time\nif os.environ['RANK'] == '0':\n    os._exit(3)\ntime.sleep(600)\n")
    run = launcher.start("--nproc-per-node=16", "--shutdown-timeout=20", "fast.py")
    assert run.wait() == 1
    assert "did not end within" not in run.err


@pytest.mark.trains
def test_a_job_that_saves_and_goes_on_uses_its_restarts(launcher: Any) -> None:
    launcher.script(
        "leak.py",
        "import os, torch\ndone = torch.load('leak.pt')['step'] if os.path.exists('leak.pt') else 0\n"
        "weights = torch.nn.Linear(1, 1)\noptimizer = torch.optim.SGD(weights.parameters())\n"
        "for step in range(done + 1, done + 6):\n    optimizer.step()\n"
        "    if step % 2 == 0:\n        torch.save({'step': step}, 'leak.pt')\n"
        "    if step == 18:\n        print('DONE', flush=True)\n        os._exit(0)\n"
        "raise MemoryError('cannot allocate 2.00 GiB')\n",
    )
    run = launcher.run("--nproc-per-node=1", "--max-restarts=5", "leak.py")
    assert run.process.returncode == 0, run.err
    assert "DONE" in run.out


def test_a_script_without_an_optimizer_is_not_said_to_be_before_its_first_step(launcher: Any) -> None:
    launcher.script("own.py", "raise ValueError('in step 12')\n")
    run = launcher.run("--nproc-per-node=1", "--max-restarts=0", "own.py")
    assert "ValueError: in step 12" in run.err
    assert "first step" not in run.err


@pytest.mark.trains
def test_a_rank_that_leaves_with_0_while_another_trains_is_the_cause(launcher: Any) -> None:
    launcher.script(
        "leaves.py",
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nweights = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(weights.parameters())\n"
        "for step in range(1, 9):\n    dist.all_reduce(torch.ones(1))\n    optimizer.step()\n"
        "    if step == 3 and dist.get_rank() == 1:\n        sys.exit(0)\n",
    )
    run = launcher.run("--nproc-per-node=2", "--max-restarts=0", "leaves.py")
    assert run.process.returncode == 1
    assert "rank 1 failed first: it left with exit code 0 after 3 steps, while others still trained" in run.err
    assert "no rank here failed by itself" not in run.err
    assert "RankLeft: rank 1 left with exit code 0" in run.err
