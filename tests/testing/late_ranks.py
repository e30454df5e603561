"""One of several ranks that try the late back end: what each operation gives, and what it trains.

    python late_ranks.py operations|train RANK SIZE STORE [stream] [torn] [WHAT ...]

Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from unicron_elastic.testing import late

STEPS, ABORT_AT = 4, 2


def operations(rank: int, size: int) -> dict[str, dict[str, Any]]:  # noqa: PLR0915 - a list of operations
    """What each operation gives after its wait, and when it has landed."""
    mine, total = float(rank), float(sum(range(size)))
    world: Any = dist.group.WORLD
    sub = dist.new_group(list(range(size)))
    ranks = torch.arange(size).float()
    found: dict[str, dict[str, Any]] = {}

    def full(*shape: int) -> Tensor:
        return torch.full(shape, mine)

    def look(name: str, operation: Callable[[], Tensor], expected: Tensor) -> None:
        try:
            result = operation()
            is_late = not bool(torch.equal(result.float().nan_to_num(-1.0), expected))
            late.synchronize()
            found[name] = {"is_late": is_late, "is_right": bool(torch.allclose(result.float(), expected))}
        except Exception as error:
            late.synchronize()
            found[name] = {"error": f"{type(error).__name__}: {error}"}

    def reduced(**options: Any) -> Tensor:
        tensor = full(4)
        work = dist.all_reduce(tensor, **options)
        if work is not None:
            work.wait()
        return tensor

    def after(begin: Callable[..., Any], tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        begin(tensor, *args, **options)
        return tensor

    def to_neighbour() -> Tensor:
        came = torch.ones(2)
        pair = [
            dist.P2POp(dist.isend, full(2), (rank + 1) % size),
            dist.P2POp(dist.irecv, came, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return came

    def listed(begin: Callable[[list[Tensor]], Any], parts: int, length: int) -> Tensor:
        given = [torch.zeros(length) for _ in range(parts)]
        begin(given)
        late.synchronize()
        return torch.cat(given)

    def objects() -> Tensor:
        given: list[Any] = [None] * size
        dist.all_gather_object(given, rank)
        return torch.tensor([float(each) for each in given])

    def waited(tensor: Tensor) -> Tensor:
        return functional.wait_tensor(tensor)

    look("all_reduce", reduced, torch.full((4,), total))
    look("all_reduce, asynchronous", lambda: reduced(async_op=True), torch.full((4,), total))
    look("all_reduce, another group", lambda: reduced(group=sub), torch.full((4,), total))
    look("broadcast", lambda: after(dist.broadcast, full(4), 1), torch.ones(4))
    spread = ranks.repeat_interleave(2)
    look("all_gather_into_tensor", lambda: after(dist.all_gather_into_tensor, torch.zeros(2 * size), full(2)), spread)
    look("all_gather", lambda: listed(lambda given: dist.all_gather(given, full(2)), size, 2), spread)
    scattered = torch.full((2,), total)
    look(
        "reduce_scatter_tensor",
        lambda: after(dist.reduce_scatter_tensor, torch.zeros(2), full(2 * size)),
        scattered,
    )
    look("all_to_all_single", lambda: after(dist.all_to_all_single, torch.zeros(size), full(size)), ranks)
    look(
        "all_to_all",
        lambda: listed(lambda given: dist.all_to_all(given, [full(1) for _ in range(size)]), size, 1),
        ranks,
    )
    look("batch_isend_irecv", to_neighbour, torch.full((2,), float((rank - 1) % size)))
    look("functional all_reduce", lambda: waited(functional.all_reduce(full(2), "sum", world)), scattered)
    look("functional all_gather", lambda: waited(functional.all_gather_tensor(full(2), 0, world)), spread)
    look(
        "functional reduce_scatter",
        lambda: waited(functional.reduce_scatter_tensor(full(2 * size), "sum", 0, world)),
        scattered,
    )
    look("functional broadcast", lambda: waited(functional.broadcast(full(2), 1, world)), torch.ones(2))
    look("all_gather_object", objects, ranks)
    return found


def train(rank: int, kind: str, *, aborts: bool) -> dict[str, Any]:
    """A few steps of a small model; what its parameters are then."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 5))
    model: nn.Module = net
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for each in net:
            if isinstance(each, nn.Linear):
                fully_shard(each)
        fully_shard(net)
    else:
        model = DistributedDataParallel(net, bucket_cap_mb=0.01)
        if kind == "ddp with a hook":
            model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(10 * step + rank)
        inputs, labels = torch.randn(16, 32, generator=draw), torch.randint(5, (16,), generator=draw)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        if aborts and step == ABORT_AT:
            dist.group.WORLD.abort()
        optimizer.step()
        optimizer.zero_grad()
    late.synchronize()
    tensors = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()
    return {"digest": digest, "has_nan": any(bool(each.isnan().any()) for each in tensors)}


def main() -> None:
    """Do what the arguments say."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    what, rank, size, path, *words = sys.argv[1:]
    late.lateness.is_torn = "torn" in words
    backend = "gloo" if "gloo" in words else "late"
    dist.init_process_group(backend, store=dist.FileStore(path, int(size)), rank=int(rank), world_size=int(size))
    with late.StreamOrder() if "stream" in words else contextlib.nullcontext():
        if what == "operations":
            print(json.dumps(operations(int(rank), int(size))), flush=True)
        else:
            print(json.dumps(train(int(rank), words[0], aborts="abort" in words)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
