"""Train the GPT of gpt.py on paragraphs of different length, each byte counting alike, in replicas of two dimensions.

A micro-batch has as many paragraphs as another, and not as many bytes. So the mean over micro-batches would have the
bytes of short ones count for more; ``step.backward(loss_sum, weight=bytes)`` divides the sum of all gradients by the
number of all bytes, whoever computes what. A replica's weights are sharded over ``--shard`` ranks, and those of the
feed-forward networks over ``--tensor`` ranks as well:

    unicron-run --standalone --nproc-per-node=4 --max-restarts=3 train_paragraphs_in_place.py --shard 1 --tensor 2
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable

import torch
from gpt import GPT, read_corpus
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import unicron_elastic

PLAN = {"feed_forward.1": ColwiseParallel(), "feed_forward.3": RowwiseParallel()}
IGNORED = -100  # as the target of what is behind a paragraph


def paragraphs(context: int) -> list[Tensor]:
    """Return what stands between empty lines of the training text, cut where the model sees no further."""
    text = bytes(read_corpus()[0].tolist())
    found = (each.strip(b"\n")[: context + 1] for each in text.split(b"\n\n"))
    return [torch.tensor(list(each)) for each in found if len(each) > 1]


def padded(chosen: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the bytes and their targets, (paragraphs, the longest)."""
    tokens = nn.utils.rnn.pad_sequence([each[:-1] for each in chosen], batch_first=True)
    targets = nn.utils.rnn.pad_sequence([each[1:] for each in chosen], batch_first=True, padding_value=IGNORED)
    return tokens, targets


def divided_gpt(mesh: DeviceMesh, tensor: int) -> GPT:
    """Return the model, of which each rank of a replica keeps its part."""
    model = GPT()
    for block in model.blocks:
        if tensor > 1:
            parallelize_module(block, mesh["tensor"], PLAN)
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model


def clip(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Clip the norm of all gradients: torch has one over each mesh, and none over parameters of different meshes."""
    by_dimensions = sorted(
        (each for each in parameters if each.grad is not None), key=lambda each: each.device_mesh.ndim
    )
    groups = [list(group) for _, group in itertools.groupby(by_dimensions, key=lambda each: each.device_mesh.ndim)]
    norms = [nn.utils.get_total_norm([each.grad for each in group]).full_tensor() for group in groups]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, most, norm)


def train(args: argparse.Namespace) -> None:
    """Train, and say the mean loss of a byte."""
    mesh = unicron_elastic.replica_mesh(shard=args.shard, tensor=args.tensor)
    torch.manual_seed(args.seed)
    model = divided_gpt(mesh, args.tensor)
    corpus = paragraphs(model.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    run = unicron_elastic.Run(model=model, optimizer=optimizer, scheduler=scheduler, snapshot_every=10)
    run.restore()
    for step in run.steps(args.steps, args.micro_batches):
        for _ in step:  # random numbers are those of the micro-batch, the same for all ranks of a tensor group
            chosen = torch.randint(len(corpus), (args.batch_size,)).tolist()
            tokens, targets = padded([corpus[each] for each in chosen])
            count = int((targets != IGNORED).sum())
            step.backward(model(tokens, targets) * count, weight=count)
        clip(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step.number + 1) % args.log_every == 0 and run.rank == 0:
            print(f"step {step.number + 1}  loss {step.loss:.4f} nats per byte", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT on paragraphs of Python's own source.")
    parser.add_argument("--shard", type=int, default=1, help="the first dimension of a replica (default: %(default)s)")
    parser.add_argument("--tensor", type=int, default=2, help="the second (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="train until this step (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="paragraphs per part (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=8, help="per step, of all replicas (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at its highest (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS", help="(default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
