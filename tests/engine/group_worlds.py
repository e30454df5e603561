"""One of several ranks whose process groups go from world to world under what holds them.

    python group_worlds.py WHAT RANK SIZE FOLDER [KIND] [gloo]

Prints one JSON object. With "gloo" it does the same with groups of gloo alone, as far as that can be done.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import collective_ranks as ranks
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from unicron_elastic.engine.group import NAME, GlooInside, StableGroup
from unicron_elastic.engine.group.connect_inside import connect_inside
from unicron_elastic.engine.transport.waiter import AbandonedError
from unicron_elastic.worker.collectives import recorder

STEPS = 6
NEVER_S = 60.0


def world() -> Any:
    """Return the group of all."""
    return dist.group.WORLD


class Job:
    """One rank: it begins, and enters further worlds."""

    def __init__(self, rank: int, size: int, folder: str, *, only_gloo: bool) -> None:
        self.rank, self.size = rank, size
        self.folder = folder
        self.only_gloo = only_gloo
        store = dist.FileStore(f"{folder}/first", size)
        dist.init_process_group("gloo" if only_gloo else NAME, store=store, rank=rank, world_size=size)

    def enter(self, name: str, size: int, is_left: Callable[[], bool] = lambda: False, group: Any = None) -> Any:
        """Exchange the inside of a group, by default that of all, for one of ``size`` ranks."""
        group = world() if group is None else group
        store = dist.FileStore(f"{self.folder}/{name}", -1)
        inside = connect_inside(GlooInside, store, rank=self.rank, size=size, timeout_s=NEVER_S, is_left=lambda: False)
        return group.enter(inside, rank=self.rank, ranks=range(size), world=group.world + 1, is_left=is_left)

    def wait_for(self, name: str) -> None:
        """Wait until another rank has said so."""
        end = time.monotonic() + NEVER_S
        while not os.path.exists(f"{self.folder}/{name}"):
            assert time.monotonic() < end, name
            time.sleep(0.002)

    def say(self, name: str) -> None:
        """Let other ranks go on."""
        Path(f"{self.folder}/{name}").touch()


def fewer(job: Job, kind: str) -> dict[str, Any]:
    """Train in DDP, and on with one rank less."""
    model, optimizer = ranks.build(kind)
    ranks.train(model, optimizer, job.rank, range(STEPS // 2))
    if job.rank == job.size - 1:
        return {}
    if job.only_gloo:
        dist.destroy_process_group()
        store = dist.FileStore(f"{job.folder}/second", job.size - 1)
        dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size - 1)
        model = DistributedDataParallel(model.module, bucket_cap_mb=0.01)
        if kind == "ddp with a hook":
            model.register_comm_hook(None, ranks.allreduce_hook)
    else:
        job.enter("second", job.size - 1)
    ranks.train(model, optimizer, job.rank, range(STEPS // 2, STEPS))
    return {
        "digest": ranks.digest(model.parameters()),
        "size": dist.get_world_size(),
        "ranks": dist.get_process_group_ranks(world()),
    }


def again(job: Job, kind: str) -> dict[str, Any]:
    """Train, and on with the same ranks in another world; a mesh and a tensor on it stay."""
    model, optimizer = ranks.build(kind)
    mesh = DeviceMesh.from_group(world(), "cpu") if kind == "fsdp2" else None
    whole = torch.arange(8.0)
    spread = None if mesh is None else distribute_tensor(whole, mesh, [Shard(0)])
    ranks.train(model, optimizer, job.rank, range(STEPS // 2))
    if not job.only_gloo:
        job.enter("second", job.size)
        assert world().world == 1
    ranks.train(model, optimizer, job.rank, range(STEPS // 2, STEPS))
    if spread is not None:
        assert torch.equal(spread.full_tensor(), whole)
    return {"digest": ranks.digest(model.parameters())}


def compiled(job: Job, _kind: str) -> dict[str, Any]:
    """Call compiled code that has the group's name in it, in two worlds."""
    graphs: list[Any] = []

    def keep(graph: Any, _examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=keep)
    def total(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(tensor, "sum", world()) * 2

    found = [float(total(torch.ones(1)))]
    if job.rank < 2:
        job.enter("second", 2)
        found.append(float(total(torch.ones(1))))
    return {"found": found, "graphs": len(graphs)}


def broken(job: Job, _kind: str) -> dict[str, Any]:
    """Wait in one of two groups, which breaks; the other stays whole, and the broken one is exchanged."""
    other: Any = dist.new_group(list(range(job.size)))
    assert isinstance(other, StableGroup)
    dist.barrier(group=other)
    if job.rank < 2:
        threading.Timer(0.2, other.break_off).start()
    began = time.monotonic()
    error = ""
    try:
        if job.rank < 2:  # the last one never comes
            dist.all_reduce(torch.ones(1_000_000), group=other)
    except RuntimeError as raised:
        error = type(raised).__name__
    took = time.monotonic() - began
    dist.barrier()  # the other group is whole
    job.enter("anew", job.size, group=other)
    total = torch.ones(1)
    dist.all_reduce(total, group=other)
    return {"error": error, "is_fast": took < 10.0, "total": float(total)}


def superseded(job: Job, kind: str) -> dict[str, Any]:
    """Wait within a model for a rank that never comes, until a newer world does; train on in that."""
    model, optimizer = ranks.build(kind)
    ranks.train(model, optimizer, job.rank, range(2))
    left = threading.Event()
    job.enter("second", job.size, left.is_set)
    error = ""
    if job.rank == 0:
        threading.Timer(0.2, left.set).start()
        try:
            ranks.backward(model, job.rank, 2)
        except AbandonedError:
            error = "abandoned"
        except RuntimeError as raised:
            error = str(raised)
        job.say("over")
    job.wait_for("over")
    job.enter("third", job.size)
    optimizer.zero_grad()  # what a broken pass has left
    if kind == "fsdp2" and error:
        model.reset_iter_state()
    ranks.train(model, optimizer, job.rank, range(2, 4))
    return {"error": error, "digest": ranks.digest(model.parameters())}


def given_up(job: Job, _kind: str) -> dict[str, Any]:
    """Send to and receive from a rank that does neither, until a newer world comes."""
    found = []
    for begin in (dist.isend, dist.irecv, dist.reduce_scatter_tensor):
        left = threading.Event()
        job.enter(begin.__name__, 2, left.is_set)
        if job.rank == 0:
            tensor = torch.ones(10_000_000)
            work = begin(tensor, tensor.repeat(2), async_op=True) if "reduce" in begin.__name__ else begin(tensor, 1)
            left.set()
            try:
                work.wait()
            except AbandonedError:
                found.append(begin.__name__)
            job.say(f"{begin.__name__} is over")
        job.wait_for(f"{begin.__name__} is over")
    return {"abandoned": found}


def recorded(job: Job, _kind: str) -> dict[str, Any]:
    """Have collectives of two groups counted by their names, in two worlds."""
    other: Any = dist.new_group(list(range(job.size)))
    names = {group.group_name: kind for group, kind in ((world(), "all"), (other, "other"))}
    found = []
    for number in range(2):
        for group, count in ((world(), 3), (other, 1 + number)):
            for _ in range(count):
                dist.all_reduce(torch.ones(1), group=group)
        recorder.learn()
        found.append({names[name]: begun for name, (begun, _) in recorder.counts(list(names)).items()})
        if number == 0:
            job.enter("second", job.size, group=other)
    return {"found": found}


def main() -> None:
    """Do what the arguments say."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    what, rank, size, folder, *words = sys.argv[1:]
    job = Job(int(rank), int(size), folder, only_gloo="gloo" in words)
    print(json.dumps(globals()[what](job, words[0] if words else "")), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
