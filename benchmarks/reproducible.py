"""What a sum with the same bits for every world costs, beside the plain sum and two other ways to the same end.

    python benchmarks/reproducible.py

Each step computes the gradients of M micro-batches on W ranks and reduces them over gloo; the optimizer is left out.
The schemes take turns step by step, in an order drawn for each round, so each is compared with the plain sum beside it.
CPU time is that of all threads of one rank: where others use the machine, it says more than the time that passes.

- plain: autograd accumulates in fp32, one all-reduce. The bits depend on who computed what.
- tree: ``unicron_elastic.training.step.tree_sum``.
- fp64: each gradient is added to a sum in fp64, which is all-reduced and rounded once. Not exact, but nearly always.
- virtual: one fp32 sum for each rank that the job was launched with, computed in order, and added in order of rank.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing
from _exit_when_told import exit_when_told
from torch import Tensor

from unicron_elastic.engine.protocol.tree import maximal, shares
from unicron_elastic.engine.transport.transport import Transport
from unicron_elastic.training.step.tree_sum import TreeSum

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from gpt import GPT

# Arguments of the GPT, and sequences of 64 bytes in a micro-batch: few, or what is compared would be lost in the rest.
MODELS: dict[str, tuple[dict[str, int], int]] = {
    "0.8 M": ({}, 4),
    "10.8 M": ({"width": 384, "layers": 6, "heads": 6}, 1),
}
VIRTUAL_RANKS = 4  # of the comparison of bits; in what is timed as many as ranks
BUCKET_BYTES = 25 * 2**20


class Scheme(Protocol):
    """One way to sum the gradients of a step; ``reduce`` returns one flat fp32 tensor for each bucket."""

    def begin(self) -> None: ...
    def add(self, index: int, /) -> None: ...
    def reduce(self) -> list[Tensor]: ...


class Flat:
    """Gradients as views of one flat tensor for each bucket, into which autograd accumulates."""

    def __init__(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        self.buckets = buckets
        self.flats = [torch.zeros(sum(parameter.numel() for parameter in bucket)) for bucket in buckets]

    def begin(self) -> None:
        for bucket, flat in zip(self.buckets, self.flats, strict=True):
            flat.zero_()
            sizes = [parameter.numel() for parameter in bucket]
            for parameter, view in zip(bucket, flat.split(sizes), strict=True):
                parameter.grad = view.view_as(parameter)


class Plain(Flat):
    """fp32, out of place, as a reduction that may fail has to be."""

    def add(self, _index: int) -> None:
        """Nothing: autograd has added it."""

    def reduce(self) -> list[Tensor]:
        copies = [flat.clone() for flat in self.flats]
        for copy in copies:
            dist.all_reduce(copy)
        return copies


class Tree:
    """The fixed tree."""

    def __init__(self, buckets: Sequence[Sequence[Tensor]], micro_batches: int) -> None:
        self.buckets = buckets
        parameters = [parameter for bucket in buckets for parameter in bucket]
        self.tree_sum = TreeSum(parameters, micro_batches)
        blocks = shares(micro_batches, dist.get_world_size())
        self.held = {rank: maximal(block, micro_batches) for rank, block in enumerate(blocks)}
        self.world = Transport("", lambda: False)

    def begin(self) -> None:
        self.tree_sum.drop()
        for parameter in self.tree_sum.parameters:
            parameter.grad = None

    def add(self, index: int) -> None:
        self.tree_sum.add(index)

    def reduce(self) -> list[Tensor]:
        return [self.tree_sum.reduce(b, self.world, self.held, dist.get_rank()) for b in self.buckets]


class Double:
    """An accumulator in fp64."""

    def __init__(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        self.parameters = [parameter for bucket in buckets for parameter in bucket]
        self.flats = [torch.zeros(sum(p.numel() for p in bucket), dtype=torch.float64) for bucket in buckets]
        self.views = [
            view.view_as(parameter)
            for bucket, flat in zip(buckets, self.flats, strict=True)
            for parameter, view in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True)
        ]

    def begin(self) -> None:
        torch._foreach_zero_(self.flats)
        for parameter in self.parameters:
            parameter.grad = None

    def add(self, _index: int) -> None:
        torch._foreach_add_(self.views, [parameter.grad for parameter in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None

    def reduce(self) -> list[Tensor]:
        """All-reduce a copy of twice the bytes, and round."""
        copies = [flat.clone() for flat in self.flats]
        for copy in copies:
            dist.all_reduce(copy)
        return [copy.float() for copy in copies]


class Virtual:
    """One fp32 sum for each virtual rank; a rank has the same number of them as the others."""

    def __init__(self, buckets: Sequence[Sequence[Tensor]], micro_batches: int, virtual_ranks: int) -> None:
        blocks = shares(micro_batches, virtual_ranks)
        mine = virtual_ranks // dist.get_world_size()
        first = dist.get_rank() * mine
        self.sums = [Flat(buckets) for _ in range(mine)]
        self.begins = {block.start: each for block, each in zip(blocks[first : first + mine], self.sums, strict=True)}
        self.next: dict[int, Flat] = {block.stop: self.begins.get(block.stop) for block in blocks}  # type: ignore[misc]

    def begin(self) -> None:
        for each in reversed(self.sums):
            each.begin()

    def add(self, index: int) -> None:
        """Autograd has added it; where a virtual rank ends, the next begins."""
        following = self.next.get(index + 1)
        if following is not None:
            following.begin()

    def reduce(self) -> list[Tensor]:
        """Each rank adds its segment in order of virtual rank."""
        return [in_order([each.flats[i] for each in self.sums]) for i in range(len(self.sums[0].flats))]


def in_order(flats: Sequence[Tensor]) -> Tensor:
    """The sum of what all ranks have, one after the other; all-to-all and gather, as the tree does it."""
    world_size = dist.get_world_size()
    count, pieces = flats[0].numel(), len(flats)
    segment = -(-count // world_size)
    width = world_size * segment
    sent, received = scratch("sent", pieces * width), scratch("received", pieces * width)
    copies = scratch("copies", width)
    for place, flat in enumerate(flats):
        padded = torch.nn.functional.pad(flat, (0, width - count)) if width > count else flat
        sent.view(world_size, pieces, segment)[:, place].copy_(padded.view(world_size, segment))
    group: Any = dist.group.WORLD
    group.alltoall_base(received, sent, [], []).wait()
    total, *others = received.view(-1, segment).unbind()
    for other in others:
        total.add_(other)
    copies.view(world_size, segment).copy_(total)
    whole = torch.empty(width)
    group.alltoall_base(whole, copies, [], []).wait()
    return whole[:count]


@lru_cache
def scratch(_use: str, count: int) -> Tensor:
    """Memory that is kept: new one costs more than the sum."""
    return torch.empty(count)


def into_buckets(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Consecutive parameters of about BUCKET_BYTES together."""
    buckets: list[list[Tensor]] = [[]]
    filled = 0
    for parameter in parameters:
        if buckets[-1] and filled + 4 * parameter.numel() > BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(parameter)
        filled += 4 * parameter.numel()
    return buckets


def step(
    scheme: Scheme, model: GPT, micro_batches: int, size: int, share: Sequence[int]
) -> tuple[tuple[float, float, float], list[Tensor]]:
    """Milliseconds of a step, those of the reduction in it, those of CPU time; and the sums."""
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    scheme.begin()
    for index in share:
        text = torch.randint(256, (size, 65), generator=torch.Generator().manual_seed(index))
        (model(text[:, :-1], text[:, 1:]) / micro_batches).backward()
        scheme.add(index)
    dist.barrier()  # waiting for the slowest is no part of reducing
    computed = time.perf_counter()
    sums = scheme.reduce()
    dist.barrier()
    ended = time.perf_counter()
    return ((ended - began) * 1e3, (ended - computed) * 1e3, (time.process_time() - used) * 1e3), sums


def rank_main(rank: int, world_size: int, folder: str, name: str, work: tuple[Sequence[int], int]) -> None:
    """One rank of one model and world; ``work`` is the numbers of micro-batches, and the rounds of each."""
    micro_batches, rounds = work
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    arguments, size = MODELS[name]
    torch.manual_seed(0)
    model = GPT(**arguments)
    buckets = into_buckets(list(model.parameters()))
    results = {}
    for count in micro_batches:
        makers: dict[str, Callable[[], Scheme]] = {
            "plain": lambda: Plain(buckets),
            "tree": lambda count=count: Tree(buckets, count),  # type: ignore[misc]
            "fp64": lambda: Double(buckets),
            "virtual": lambda count=count: Virtual(buckets, count, world_size),  # type: ignore[misc]
        }
        share = shares(count, world_size)[rank]
        schemes = {key: make() for key, make in makers.items()}
        times: dict[str, list[tuple[float, float, float]]] = {key: [] for key in schemes}
        order = list(schemes)
        draw = random.Random(0)
        for number in range(rounds + 1):  # the first warms up
            draw.shuffle(order)
            for key in order:
                times[key] += [step(schemes[key], model, count, size, share)[0]] * (number > 0)
        schemes["virtual"] = Virtual(buckets, count, VIRTUAL_RANKS)
        sums = {key: step(each, model, count, size, share)[1] for key, each in schemes.items()}
        words = {key: [hash(tuple(flat.view(torch.int32).tolist())) for flat in flats] for key, flats in sums.items()}
        results[str(count)] = {"times": times, "words": words}
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def measure(name: str, world_size: int, micro_batches: Sequence[int], rounds: int) -> dict[str, Any]:
    """The results of rank 0, by number of micro-batches."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (world_size, folder, name, (micro_batches, rounds)), world_size)
        return dict(json.loads(Path(folder, "results.json").read_text(encoding="utf-8")))


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, and the middle half."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):.{digits}f} [{low:.{digits}f} to {high:.{digits}f}]"


def main() -> None:
    """Measure and print."""
    exit_when_told()
    parser = argparse.ArgumentParser(description="Cost of reproducible sums of gradients.")
    parser.add_argument("--rounds", type=int, default=12, help="steps of each scheme (default: %(default)s)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], choices=[1, 2, 4])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[16, 12])
    args = parser.parse_args()
    print(
        "| model | ranks | micro-batches | scheme | step, ms | reducing, ms | CPU, ms | more CPU than plain, % | bits |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in args.models:
        worlds = {ranks: measure(name, ranks, args.micro_batches, args.rounds) for ranks in args.ranks}
        first = worlds[args.ranks[0]]
        for ranks, results in worlds.items():
            for count, result in results.items():
                plain = [cpu for _, _, cpu in result["times"]["plain"]]
                for key, times in result["times"].items():
                    wall, reducing, cpu = zip(*times, strict=True)
                    more = [(mine / base - 1) * 100 for mine, base in zip(cpu, plain, strict=True)]
                    cells = " | ".join(map(spread, (wall, reducing, cpu, more)))
                    bits = "same" if result["words"][key] == first[count]["words"][key] else "differ"
                    print(f"| {name} | {ranks} | {count} | {key} | {cells} | {bits} |", flush=True)
    print(f"\nMedians and middle halves of {args.rounds}; bits: beside those of {args.ranks[0]} ranks.")


if __name__ == "__main__":
    main()
