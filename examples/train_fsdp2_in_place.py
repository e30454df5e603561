"""Train the GPT of gpt.py with FSDP2 in replicas of several ranks, and go on in the step in which a rank is lost.

Each replica has the model once, each of its ranks a shard, as with FSDP2 over a mesh of two dimensions (HSDP). When a
rank is lost, the ranks of its replica end with it, the other replicas finish the step, and a new replica joins:

    unicron-run --standalone --nproc-per-node=4 --max-restarts=3 train_fsdp2_in_place.py --shard 2

What is another line in plain HSDP stands behind ``# HSDP:``.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from gpt import GPT, read_corpus, windows
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import unicron_elastic

EVALUATION_WINDOWS = 96


def sharded_gpt(mesh: DeviceMesh) -> GPT:
    """Return the model, of which each rank of a replica keeps its part of every layer."""
    model = GPT()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(args: argparse.Namespace) -> None:
    """Train from the newest state there is to the last step, and report the loss on the held-out text."""
    training_text, held_out_text = read_corpus()
    mesh = unicron_elastic.replica_mesh(shard=args.shard)  # HSDP: init_device_mesh("cpu", (replicas, args.shard))
    torch.manual_seed(args.seed)
    model = sharded_gpt(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)
    run = unicron_elastic.Run(model=model, optimizer=optimizer, scheduler=scheduler, snapshot_every=10)
    done = run.restore(args.checkpoint_dir)

    def batch() -> tuple[Tensor, Tensor]:
        """Draw this rank's part of a micro-batch: seeded by the run, by step, index and place in the replica."""
        starts = torch.randint(len(training_text) - model.context - 1, (args.batch_size,))
        return windows(training_text, starts, model.context, torch.device("cpu"))

    @torch.no_grad()
    def evaluate() -> float:
        starts = torch.linspace(0, len(held_out_text) - model.context - 1, EVALUATION_WINDOWS).long()
        own = starts.tensor_split(run.world_size)[run.rank]
        return run.mean(model(*windows(held_out_text, own, model.context, torch.device("cpu")))).item()

    def say(text: str) -> None:
        if run.rank == 0:
            print(text, flush=True)

    own = sum(parameter.to_local().numel() for parameter in model.parameters())
    say(f"{own:,} of {sum(each.numel() for each in model.parameters()):,} parameters on rank 0  from step {done}")
    since = time.perf_counter()
    for step in run.steps(args.steps, args.micro_batches):  # HSDP: for step in range(steps)
        for _ in step:  # HSDP: for index in its share, with set_requires_all_reduce(index is the last)
            step.backward(model(*batch()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step.number + 1) % args.log_every == 0:
            took, since = time.perf_counter() - since, time.perf_counter()
            say(f"step {step.number + 1}  loss {step.loss:.4f}  {took / args.log_every * 1e3:.0f} ms/step")
        if args.checkpoint_dir and (step.number + 1) % 100 == 0:
            run.save(args.checkpoint_dir, step.number + 1)
    say(f"done: step {args.steps}  eval loss {evaluate():.4f} nats per byte")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT on Python's own source code.")
    parser.add_argument("--shard", type=int, default=2, help="ranks of a replica (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="train until this step (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=2, help="per rank and micro-batch (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=8, help="per step, of all replicas (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at its highest (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="a folder all ranks see (default: none)")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
