"""What a script that registers its state gets back after a restart: from memory, from another node, from storage."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unicron_elastic.rendezvous.store.server import EmbeddedEtcd
from unicron_elastic.state.snapshot.file import SnapshotFile, read_header

pytestmark = pytest.mark.trains

STEPS = 30
EVERY = 5

# Each rank trains on its share of a batch; at step "die" rank 1 does something and dies. Losses are told bit by bit.
SCRIPT = """
import ctypes, os, signal, sys, time
import torch, torch.distributed as dist
import unicron_elastic
from unicron_elastic.state.snapshot import file as snapshot_file

torch.set_num_threads(1)
kind, how = sys.argv[1], sys.argv[2]
steps, every, die = 30, 5, 17
is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
probe = os.environ["PROBE"]
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
is_exact = kind == "fsdp" or "storage" not in how  # else random numbers of rank 1 are lost
drop = 0.1 if is_exact else 0.0
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(drop), torch.nn.Tanh(), torch.nn.Linear(64, 1))
if kind == "ddp":
    model.insert(1, torch.nn.BatchNorm1d(64))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh
    wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
peer_every = 10 if how == "node" else 0
run = unicron_elastic.Run(model=wrapped, optimizer=optimizer, scheduler=scheduler, peer_snapshot_every=peer_every)
folder = os.path.join(probe, "states") if "storage" in how else None
start = run.restore(folder)
os.write(1, f"START {start} rank {rank}\\n".encode())

def die_in_copy():
    move, moves = snapshot_file._move, []
    def dying(*arguments):
        move(*arguments)
        moves.append(1)
        if len(moves) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    snapshot_file._move = dying

def spoil_newest():
    run._snapshots.wait()
    newest = max(run._snapshots._writer._files, key=lambda file: file.header().step)
    newest.room(newest.header().total_bytes)[-70] ^= 1

for step in range(start, steps):
    data = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    loss = wrapped(data[rank::size]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if how == "in-copy" and is_first and rank == 1 and step == 14:
        die_in_copy()
    os.write(1, f"STEP {step} rank {rank} loss {loss.item().hex()}\\n".encode())
    if "memory" in how or how in ("in-copy", "spoiled", "node"):
        run.snapshot(step + 1, every=every)
    if folder and (step + 1) % every == 0:
        run.save(folder, step + 1, keep=2)
    if how == "node" and is_first and step == die:
        run._snapshots.wait()
        os.write(1, f"WAITS rank {rank}\\n".encode())
        while True:
            time.sleep(0.05)
    if is_first and rank == 1 and step == die and "none" not in how:
        if how == "spoiled":
            spoil_newest()
        if folder:
            dist.barrier()
        run._snapshots.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    if folder and is_first and rank == 0 and step == die and "none" not in how:
        run.wait_saved()
        dist.barrier()
run.wait_saved()
dist.destroy_process_group()
"""


def losses(text: str) -> dict[tuple[int, int], list[str]]:
    """By step and rank, the loss each time that it was computed."""
    found: dict[tuple[int, int], list[str]] = {}
    for step, rank, loss in re.findall(r"^STEP (\d+) rank (\d+) loss (\S+)$", text, re.MULTILINE):
        found.setdefault((int(step), int(rank)), []).append(loss)
    return found


def starts(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^START (\d+)", text, re.MULTILINE)]


def train(launcher: Any, kind: str, how: str, tool: str = "unicron-run") -> Any:
    launcher.script("train.py", SCRIPT)
    run = launcher.run("--standalone", "--nproc-per-node=2", "--max-restarts=2", "train.py", kind, how, tool=tool)
    assert run.process.returncode == 0, run.err
    return run


def assert_as_if_nothing_happened(launcher: Any, text: str, kind: str, how: str = "none") -> None:
    """Each loss, the repeated ones too, is that of a run without a fault, to the last bit."""
    undisturbed = losses(train(launcher, kind, how).out)
    found = losses(text)
    assert set(found) == set(undisturbed) == {(step, rank) for step in range(STEPS) for rank in range(2)}
    different = [key for key, each in sorted(found.items()) if set(each) != set(undisturbed[key])]
    assert different == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_the_loss_goes_on_from_the_snapshot_in_memory(launcher: Any, kind: str) -> None:
    run = train(launcher, kind, "memory")
    assert starts(run.out) == [0, 0, 15, 15]
    assert "All ranks go on from step 15, from the memory of their hosts." in run.err
    assert_as_if_nothing_happened(launcher, run.out, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_dies_while_it_copies_has_the_snapshot_before(launcher: Any, kind: str) -> None:
    run = train(launcher, kind, "in-copy")
    assert starts(run.out) == [0, 0, 10, 10]
    assert "All ranks go back to step 10, the newest that everyone has: rank 1 has no state of step 15." in run.err
    assert_as_if_nothing_happened(launcher, run.out, kind)


@pytest.mark.slow
def test_a_spoiled_snapshot_is_not_used(launcher: Any) -> None:
    run = train(launcher, "fsdp", "spoiled")
    assert starts(run.out) == [0, 0, 10, 10]
    assert "Rank 1: the state of step 15 cannot be used: " in run.err
    assert "its checksum is wrong" in run.err
    assert_as_if_nothing_happened(launcher, run.out, "fsdp")


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_under_torchrun_the_state_comes_from_storage(launcher: Any, kind: str) -> None:
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # which torchrun's restarts need with gloo
    launcher.script("train.py", SCRIPT)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=2", "train.py", kind, "storage-memory"]
    run = launcher.run(*options, tool="torchrun", env=env)
    assert run.process.returncode == 0, run.err
    assert starts(run.out) == [0, 0, 15, 15]
    assert "All ranks go on from step 15, from storage." in run.err
    states = launcher.folder / "states"
    assert sorted(path.name for path in states.iterdir()) == ["step-25", "step-30"]
    shutil.rmtree(states)
    assert_as_if_nothing_happened(launcher, run.out, kind, "storage-none")


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    with EmbeddedEtcd() as server:
        yield server


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_spare_node_gets_the_state_of_a_lost_one_from_its_neighbour(
    launcher: Any, etcd: EmbeddedEtcd, kind: str
) -> None:
    launcher.script("train.py", SCRIPT)
    options = [
        "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=unicron", f"--rdzv-endpoint={etcd.endpoint}",
        "--rdzv-id=job", "--rdzv-conf=last_call_timeout=1,lease_ttl=1", "--max-restarts=3", "--local-addr=127.0.0.1",
        "train.py", kind, "node",
    ]  # fmt: skip
    nodes = [launcher.start(*options, env={"UNICRON_NODE_NAME": name}) for name in "ab"]
    for node in nodes:
        node.until_line(r"^WAITS")
    spare = launcher.start(*options, env={"UNICRON_NODE_NAME": "c"})
    nodes[0].until(lambda: keeps(nodes[0].process.pid, rank=1, step=10), "the copy of the neighbour's snapshot")
    nodes[1].process.send_signal(signal.SIGKILL)
    assert [nodes[0].wait(), spare.wait()] == [0, 0], nodes[0].err + spare.err
    text = nodes[0].out + spare.out
    assert starts(text) == [0, 10, 10], text  # the copy, which is made less often, has what is of the lost rank
    said = nodes[0].err + spare.err
    assert "from the memory of a neighbouring node" in said
    assert_as_if_nothing_happened(launcher, nodes[0].out + nodes[1].out + spare.out, kind, "node-none")


def keeps(pid: int, rank: int, step: int) -> bool:
    """Whether an agent has a whole snapshot of a rank in its memory."""
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "unicron-snapshot" not in os.readlink(path):
                continue
            with open(path, "rb") as file:
                header = read_header(file.fileno())
        except (OSError, ValueError):
            continue
        if (header.rank, header.step) == (rank, step) and is_whole(path):
            return True
    return False


def is_whole(path: Path) -> bool:
    file = SnapshotFile(os.open(path, os.O_RDWR))
    try:
        return file.is_whole()
    finally:
        file.close()


DRAWS = """
import os, random, sys, torch, unicron_elastic
torch.set_num_threads(1)
rank, (seeds, until, name) = int(os.environ["RANK"]), sys.argv[1:]
torch.manual_seed(5 if seeds == "alike" else rank)
random.seed(5)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = unicron_elastic.Run(model=model, optimizer=optimizer, seed=1)
folder = os.path.join(os.environ["PROBE"], name)
run.restore(folder)
for step in run.steps(int(until), 4):
    drawn = random.random(), float(torch.rand(()))
    for index in step:
        step.backward(model(drawn[0] * torch.ones(2)).sum())
    optimizer.step()
    os.write(1, f"DREW {rank} {step.number} {drawn[0]:.9f} {drawn[1]:.9f}\\n".encode())
    run.save(folder, step.number + 1)
run.wait_saved()
"""


@pytest.mark.parametrize("seeds", ["alike", "apart"])
@pytest.mark.parametrize("ranks", [2, 3])  # that go on, from what 2 have saved
def test_what_all_ranks_draw_alike_between_steps_goes_on_from_storage(launcher: Any, seeds: str, ranks: int) -> None:
    def drawn(size: int, until: int, name: str) -> dict[tuple[str, int], tuple[str, str]]:
        script = launcher.script("draws.py", DRAWS)
        run = launcher.start("--standalone", f"--nproc-per-node={size}", script, seeds, str(until), name, fast=False)
        assert run.wait() == 0, run.err
        lines = re.findall(r"^DREW (\d) (\d) (\S+) (\S+)$", run.out, re.MULTILINE)
        return {(rank, int(step)): (python, torchs) for rank, step, python, torchs in lines}

    whole = drawn(2, 4, "whole")
    drawn(2, 2, "part")
    again = drawn(ranks, 4, "part")
    for rank in map(str, range(ranks)):
        for step in (2, 3):
            assert again[rank, step][0] == whole["0", step][0]
            is_right = again[rank, step][1] == whole["0", step][1]
            assert is_right is (seeds == "alike" or rank == "0")  # no rank draws what is another's own
