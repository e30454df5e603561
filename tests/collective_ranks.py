"""One of several ranks that try a back end: what each collective operation gives, and what it trains.

    python collective_ranks.py BACKEND operations|train RANK SIZE STORE [KIND] [stream|torn|abort|without OPERATION ...]

Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import unicron_elastic.engine.group  # noqa: F401 - makes a back end known
from unicron_elastic.testing import late

STEPS = 4
Operation = Callable[[], Any]


def digest(tensors: Iterable[Tensor]) -> str:
    """Make one word of the bytes of all."""
    found = hashlib.sha256()
    for each in locals_of(tensors):
        found.update(each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """List what this rank has of each."""
    return [each.to_local() if hasattr(each, "to_local") else each for each in tensors]


def operations(rank: int, size: int) -> dict[str, Operation]:  # noqa: PLR0915 - a list of operations
    """Each begins a collective, waits for it as scripts do, and returns the tensors that it has filled."""
    world: Any = dist.group.WORLD
    sub: Any = dist.new_group(list(range(size)))
    fewer: Any = dist.new_group([0, size - 1])

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(100 * rank + sum(shape)))
        return numbers.to(dtype) if dtype.is_floating_point else (100 * numbers).to(dtype)

    def into(begin: Callable[..., Any], filled: Any, *others: Any, **named: Any) -> Any:
        work = begin(filled, *others, **named)
        if named.get("async_op"):
            work.wait()
        return filled

    def empty(count: int, *shape: int) -> list[Tensor]:
        return [torch.zeros(shape) for _ in range(count)]

    def gather(begin: Callable[..., Any]) -> Any:
        filled = empty(size, 3) if rank == 1 else None
        begin(draw(3), filled, dst=1)
        return filled or []

    def scatter() -> Tensor:
        filled = torch.zeros(3)
        dist.scatter(filled, [draw(3) + n for n in range(size)] if rank == 1 else None, src=1)
        return filled

    def one_way(*, is_from_any: bool) -> Any:
        filled = torch.zeros(3)
        if rank == 0:
            dist.send(draw(3), 1)
        elif rank == 1:
            assert dist.recv(filled, None if is_from_any else 0) == 0
        return filled

    def to_neighbour() -> Any:
        filled = torch.zeros(50_000)
        pair = [
            dist.P2POp(dist.isend, draw(50_000), (rank + 1) % size),
            dist.P2POp(dist.irecv, filled, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        return filled

    def coalesced(begin: Callable[..., Any], sizes: list[tuple[int, int]], *, is_asynchronous: bool = False) -> Any:
        filled = [(torch.zeros(to), draw(given)) if given else (draw(to),) for to, given in sizes]
        with dist._coalescing_manager(async_ops=is_asynchronous) as manager:
            for each in filled:
                begin(*each)
        if is_asynchronous:
            manager.wait()
        return [each[0] for each in filled]

    def uneven() -> Any:
        counts = [[1 + (a + b) % 3 for b in range(size)] for a in range(size)]
        mine, theirs = counts[rank], [row[rank] for row in counts]
        filled = torch.zeros(sum(theirs))
        dist.all_to_all_single(filled, draw(sum(mine)), theirs, mine)
        return filled

    def objects(operation: str) -> Any:
        given: list[Any] = [None] * (1 if operation == "scatter" else size)
        if operation == "all_gather":
            dist.all_gather_object(given, {"rank": rank})
        elif operation == "gather":
            dist.gather_object({"rank": rank}, given if rank == 1 else None, dst=1)
        elif operation == "broadcast":
            given = [{"rank": rank}, "x" * rank]
            dist.broadcast_object_list(given, src=1)
        else:
            dist.scatter_object_list(given, list(range(size)) if rank == 1 else None, src=1)
        return torch.tensor(list(repr(given).encode()))

    def waited(begin: Operation) -> Operation:
        return lambda: functional.wait_tensor(begin())

    def barrier() -> Any:
        dist.barrier()
        return []

    reduce_ops = {
        f"all_reduce, {name} of {dtype}": lambda op=op, dtype=dtype: into(dist.all_reduce, draw(5, dtype=dtype), op=op)
        for name, op in (("sum", dist.ReduceOp.SUM), ("largest", dist.ReduceOp.MAX), ("product", dist.ReduceOp.PRODUCT))
        for dtype in (torch.float64, torch.bfloat16, torch.int64)
    }
    return {
        "all_reduce": lambda: into(dist.all_reduce, draw(5)),
        "all_reduce, mean": lambda: into(dist.all_reduce, draw(5), op=dist.ReduceOp.AVG),
        "all_reduce, asynchronous": lambda: into(dist.all_reduce, draw(5), async_op=True),
        "all_reduce, another group": lambda: into(dist.all_reduce, draw(5), group=sub),
        "all_reduce, some ranks": lambda: into(dist.all_reduce, draw(5), group=fewer) if rank in (0, size - 1) else [],
        **reduce_ops,
        "broadcast": lambda: into(dist.broadcast, draw(5), 1),
        "broadcast, some ranks": lambda: (
            into(dist.broadcast, draw(5), size - 1, group=fewer) if rank in (0, size - 1) else []
        ),
        "reduce": lambda: into(dist.reduce, draw(5), 1) if rank == 1 else (dist.reduce(draw(5), 1), [])[1],
        "all_gather_into_tensor": lambda: into(dist.all_gather_into_tensor, torch.zeros(2 * size), draw(2)),
        "all_gather": lambda: into(dist.all_gather, empty(size, 2), draw(2)),
        "gather": lambda: gather(dist.gather),
        "scatter": scatter,
        "reduce_scatter": lambda: into(dist.reduce_scatter, torch.zeros(2), [draw(2) + n for n in range(size)]),
        "reduce_scatter_tensor": lambda: into(dist.reduce_scatter_tensor, torch.zeros(2), draw(2 * size)),
        "reduce_scatter_tensor, mean": lambda: into(
            dist.reduce_scatter_tensor, torch.zeros(2, 3), draw(2 * size, 3), op=dist.ReduceOp.AVG
        ),
        "reduce_scatter_tensor, asynchronous": lambda: into(
            dist.reduce_scatter_tensor, torch.zeros(2), draw(2 * size), async_op=True
        ),
        "all_to_all_single": lambda: into(dist.all_to_all_single, torch.zeros(2 * size), draw(2 * size)),
        "all_to_all_single, uneven": uneven,
        "all_to_all": lambda: into(dist.all_to_all, empty(size, 2), [draw(2) + n for n in range(size)]),
        "barrier": barrier,
        "send and recv": lambda: one_way(is_from_any=False),
        "send and recv from any": lambda: one_way(is_from_any=True),
        "batch_isend_irecv": to_neighbour,
        "all_reduce, coalesced": lambda: coalesced(dist.all_reduce, [(2, 0), (3, 0)]),
        "all_reduce, coalesced, asynchronous": lambda: coalesced(
            dist.all_reduce, [(2, 0), (3, 0)], is_asynchronous=True
        ),
        "all_gather_into_tensor, coalesced": lambda: coalesced(dist.all_gather_into_tensor, [(2 * size, 2), (size, 1)]),
        "reduce_scatter_tensor, coalesced": lambda: coalesced(dist.reduce_scatter_tensor, [(2, 2 * size), (1, size)]),
        "functional all_reduce": waited(lambda: functional.all_reduce(draw(2), "sum", world)),
        "functional all_gather": waited(lambda: functional.all_gather_tensor(draw(2), 0, world)),
        "functional reduce_scatter": waited(lambda: functional.reduce_scatter_tensor(draw(2 * size), "sum", 0, world)),
        "functional all_to_all": waited(lambda: functional.all_to_all_single(draw(2 * size), None, None, world)),
        "functional broadcast": waited(lambda: functional.broadcast(draw(2), 1, world)),
        "functional all_reduce, coalesced": lambda: [
            functional.wait_tensor(each) for each in functional.all_reduce_coalesced([draw(2), draw(3)], "sum", world)
        ],
        "functional all_gather, coalesced": lambda: [
            functional.wait_tensor(each)
            for each in functional.all_gather_into_tensor_coalesced([draw(2), draw(3)], world)
        ],
        "functional reduce_scatter, coalesced": lambda: [
            functional.wait_tensor(each)
            for each in functional.reduce_scatter_tensor_coalesced([draw(2 * size), draw(size)], "sum", [0, 0], world)
        ],
        **{
            name: lambda name=name: objects(name.removesuffix(" of objects"))
            for name in ("all_gather of objects", "gather of objects", "broadcast of objects", "scatter of objects")
        },
    }


def flat(given: Any) -> list[Tensor]:
    """List the tensors."""
    return [given] if isinstance(given, Tensor) else list(given)


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a small model, in one of torch's wrappers."""
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
        model = DistributedDataParallel(net, bucket_cap_mb=0.01, gradient_as_bucket_view=kind == "ddp with views")
        if kind == "ddp with a hook":
            model.register_comm_hook(None, allreduce_hook)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: Iterable[int],
    *,
    abort_at: int | None = None,
) -> None:
    """Make these steps. ``abort_at``: in which one the group is aborted while its last gradients are reduced."""
    world: Any = dist.group.WORLD
    counts = [0]
    for step in steps:
        if step == abort_at:
            late.lateness.abort_in(counts[-1] - counts[-2])
        backward(model, rank, step)
        counts.append(world.begun if abort_at is not None else 0)
        if abort_at is None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # of DTensors, whose norms are reduced within operations
        optimizer.step()
        optimizer.zero_grad()


def backward(model: nn.Module, rank: int, step: int) -> None:
    """Make the gradients of a step."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    inputs, labels = torch.randn(16, 32, generator=draw), torch.randint(5, (16,), generator=draw)
    nn.functional.cross_entropy(model(inputs), labels).backward()


def tried(operation: Operation) -> dict[str, Any]:
    """What an operation gives once all has landed, and whether that was not there when its wait had ended."""
    try:
        tensors = flat(operation())
        early = digest(tensors)
        late.synchronize()
        return {"digest": digest(tensors), "is_late": digest(tensors) != early}
    except Exception as error:
        late.synchronize()
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Do what the arguments say."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    backend, what, rank, size, path, *words = sys.argv[1:]
    late.lateness.is_torn = "torn" in words
    if what == "operations" and "stream" not in words:
        late.lateness.delay_s = 0.1  # who looks for garbage does so before that, on a slow machine as well
    dist.init_process_group(backend, store=dist.FileStore(path, int(size)), rank=int(rank), world_size=int(size))
    with late.StreamOrder() if "stream" in words else contextlib.nullcontext():
        if what == "operations":
            begins = operations(int(rank), int(size))
            if torch.__version__ < "2.12":
                del begins["all_to_all"]  # which gloo has not
            if "without" in words:
                del begins[words[words.index("without") + 1]]
            found = {name: tried(begin) for name, begin in begins.items()}
            print(json.dumps(found), flush=True)
        else:
            model, optimizer = build(words[0])
            train(model, optimizer, int(rank), range(STEPS), abort_at=STEPS - 1 if "abort" in words else None)
            late.synchronize()
            has_nan = any(bool(each.isnan().any()) for each in locals_of(model.parameters()))
            print(json.dumps({"digest": digest(model.parameters()), "has_nan": has_nan}), flush=True)
    if "abort" not in words:
        dist.barrier()
        late.synchronize()
    os._exit(0)


if __name__ == "__main__":
    main()
