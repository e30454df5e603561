"""Train the GPT of gpt.py with FSDP2, each rank holding a shard of it, and restart from memory.

No rank has another's shard, so when one is lost all have to restart. But they do not have to read a checkpoint: after
every step the launcher's memory has each rank's shards of the weights and of the optimizer's state, and they go on from
there. ``--checkpoint-dir`` is for the day when that memory is lost too; what is written there can be read by any number
of ranks. It runs the same under each of these:

    python train_fsdp2.py
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 train_fsdp2.py
    unicron-run --standalone --nproc-per-node=2 --max-restarts=3 train_fsdp2.py

To watch a recovery: ``unicron-run ... --unicron-chaos kill:rank=1,step=150,phase=backward train_fsdp2.py``. A rank that
dies in the backward pass has told of the step before, as all have, by what it gathered in the forward pass.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, read_corpus, windows
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import unicron_elastic

WARM_UP_STEPS = 50
HELD_OUT_WINDOWS = 64


def sharded_gpt(device: torch.device) -> GPT:
    """Return the model, of which each rank keeps its part of every layer."""
    model = GPT().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def join_world() -> torch.device:
    """Join the launcher's world, or make a world of one without a launcher; return this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def batch_of(text: Tensor, context: int, args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Draw this rank's batch of a step, by nothing but (seed, step, rank)."""
    generator = torch.Generator().manual_seed(hash((args.seed, step, dist.get_rank())))
    starts = torch.randint(len(text) - context - 1, (args.batch_size,), generator=generator)
    return windows(text, starts, context, torch.device("cpu"))


@torch.no_grad()
def evaluate(model: GPT, text: Tensor, device: torch.device) -> float:
    """Return the loss on windows of the held-out text, each rank with its share."""
    starts = torch.linspace(0, len(text) - model.context - 1, HELD_OUT_WINDOWS * dist.get_world_size()).long()
    total = model(*windows(text, starts[dist.get_rank() :: dist.get_world_size()], model.context, device))
    dist.all_reduce(total)
    return float(total.item() / dist.get_world_size())


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train from the newest state there is to the last step, and report the loss on the held-out text."""
    first = dist.get_rank() == 0
    training_text, held_out_text = read_corpus()
    torch.manual_seed(args.seed)
    model = sharded_gpt(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM_UP_STEPS, total_iters=WARM_UP_STEPS)
    run = unicron_elastic.Run(model=model, optimizer=optimizer, scheduler=scheduler)
    done = run.restore(args.checkpoint_dir)
    if first:
        own = sum(parameter.to_local().numel() for parameter in model.parameters())
        whole = sum(parameter.numel() for parameter in model.parameters())
        print(f"{own:,} of {whole:,} parameters on rank 0  {device.type}  from step {done}", flush=True)

    since, counted = time.perf_counter(), 0
    for step in range(done + 1, args.steps + 1):
        tokens, targets = batch_of(training_text, model.context, args, step)
        loss = model(tokens.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        run.snapshot(step, every=args.snapshot_every)
        counted += 1
        if step % args.log_every == 0 or step in (1, args.steps):
            value, now = loss.item(), time.perf_counter()
            if first:
                print(f"step {step}  loss {value:.3f}  {(now - since) / counted * 1e3:.0f} ms/step", flush=True)
            since, counted = now, 0
        if args.checkpoint_dir and (step % args.checkpoint_every == 0 or step == args.steps):
            run.save(args.checkpoint_dir, step)
    loss_at_end = evaluate(model, held_out_text, device)
    if first:
        print(f"done: step {max(done, args.steps)}  eval loss {loss_at_end:.3f} nats per byte")
    run.wait_saved()  # which needs the process group


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT with FSDP2 on Python's own source code.")
    parser.add_argument("--steps", type=int, default=500, help="train until this step (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--snapshot-every", type=int, default=1, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="a folder all ranks see (default: none)")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS", help="(default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Join, train, leave."""
    args = parse_arguments()
    train(args, join_world())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
