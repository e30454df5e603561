"""The mesh of one replica: of the processes of a node that have its shards, and of nobody else.

It is torch's default process group as well, so that what a script does with ``torch.distributed`` stays within the
replica, and what replicas do together is the run's.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unicron_elastic.base.text import counted
from unicron_elastic.engine.group import NAME, StableGroup
from unicron_elastic.engine.group.register import around
from unicron_elastic.engine.transport.superseded import given_up_when
from unicron_elastic.state.snapshot.gather import leave_group_aside
from unicron_elastic.training.of_launcher import of_launcher
from unicron_elastic.training.shard.mates import Mates, await_end, life_of, lives, make_present, present_mates
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.training.whole_number import whole_number
from unicron_elastic.worker.worlds import link

TIMEOUT_S = 600.0
_LOOK_S = 0.005


def replica_mesh(*, shard: int, tensor: int = 1, backend: str = "gloo", timeout_s: float = TIMEOUT_S) -> DeviceMesh:
    """Return the mesh of this process's replica, of ``shard`` processes, for ``fully_shard(model, mesh=mesh)``.

    With ``tensor`` it has two dimensions, of ``shard`` times ``tensor`` processes: ``mesh["shard"]`` for
    ``fully_shard``, and ``mesh["tensor"]`` for ``parallelize_module``. It makes torch's default process group, which
    has these processes alone; ``backend``: gloo, or what docs/late.md has. ``timeout_s`` is that of its collectives.
    Raises ValueError for a world that cannot be divided so, WrongUseError if there is a process group already, and
    TimeoutError if another process of the replica does not come.
    """
    shard, tensor = whole_number("shard", shard), whole_number("tensor", tensor)
    rank, size = of_launcher("RANK", 0), of_launcher("WORLD_SIZE", 1)
    name, _ = around(backend)
    check_divides(shard, tensor, size, of_launcher("LOCAL_WORLD_SIZE", size))
    seats = shard * tensor
    if dist.is_initialized() or present_mates() is not None:
        raise WrongUseError(
            "replica_mesh() makes the process group of this process's replica itself, once: take init_process_group "
            "and init_device_mesh out, as the ranks of a group over all replicas could not go on when one is lost"
        )
    if torch.cuda.is_available():
        raise WrongUseError(
            "replica_mesh() is for CPUs over gloo yet: on GPUs keep init_device_mesh(), and your own loop with "
            "run.restore() and run.snapshot() (tier 1 in docs/going-on.md)"
        )
    store = HashStore() if size == 1 else next(dist.rendezvous("env://"))[0]
    with given_up_when(lambda: False):
        dist.init_process_group(
            name,
            store=PrefixStore(f"unicron/replica/{_replica_of(rank, seats, store, timeout_s)}", store),
            rank=rank % seats,
            world_size=seats,
            timeout=timedelta(seconds=timeout_s),
        )
    dimensions = {"shard": shard} if tensor == 1 else {"shard": shard, "tensor": tensor}
    mesh = init_device_mesh("cpu", tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))
    among_mates = dist.new_group(backend=NAME)
    mates = Mates(mesh, among_mates, backend, size // seats)
    for group in (dist.group.WORLD, among_mates, *mesh.get_all_groups()):
        assert isinstance(group, StableGroup)
        if link() is not None:
            group.on_broken = partial(await_end, mates.lives)
    make_present(mates)
    register_optimizer_step_pre_hook(mates.check_summed)
    leave_group_aside()
    return mesh


def check_divides(shard: int, tensor: int, size: int, local_size: int) -> None:
    """Raises ValueError unless the launcher's world is made of whole replicas, each on one node."""
    for name, value in (("shard", shard), ("tensor", tensor)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
    seats, what = shard * tensor, "shard" if tensor == 1 else "shard times tensor"
    if size % seats:
        world = counted(size, "rank", "ranks")
        raise ValueError(f"a world of {world} cannot be divided into replicas of {seats}: {what} must divide it")
    if link() is not None and local_size % seats:
        raise ValueError(
            f"a replica of {seats} ranks must be on one node, and a node has {local_size} ranks: {what} must divide "
            "these"
        )


def _replica_of(rank: int, seats: int, store: Store, timeout_s: float) -> str:
    """Return a name that the processes of this replica have, and none of a replica that was lost before it.

    The process in the first seat writes down which one it is. Who reads that looks whether it lives: else it is that of
    a replica which was lost, and another one comes, as an agent starts all of a replica at once. Raises TimeoutError.
    """
    if link() is None:
        return str(rank // seats)
    place = f"{socket.gethostname()}/{of_launcher('GROUP_RANK', 0)}/{of_launcher('LOCAL_RANK', 0) // seats}"
    key = f"unicron/replicas/{place}"
    if rank % seats == 0:
        store.set(key, life_of(str(os.getpid())))
    end = time.monotonic() + timeout_s
    while not (store.check([key]) and lives(name := bytes(store.get(key)).decode())):
        if time.monotonic() > end:
            first = of_launcher("LOCAL_RANK", 0) // seats * seats
            raise TimeoutError(
                f"local rank {first}, the first of this replica, has not called replica_mesh() within {timeout_s:g} s: "
                "all ranks must call it"
            )
        time.sleep(_LOOK_S)
    return f"{place}/{name}"
