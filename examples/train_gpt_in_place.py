"""Train a small GPT as nanoGPT does, and go on in the step in which a rank is lost."""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path

import torch
from gpt import GPT, read_corpus, windows
from torch import Tensor, nn

import unicron_elastic

EVALUATION_WINDOWS = 96
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return that of a step: it rises, then falls to a tenth along a cosine."""
    if step < args.warm_up:
        return float(args.learning_rate * (step + 1) / args.warm_up)
    done = min(1.0, (step - args.warm_up) / max(1, args.steps - args.warm_up))
    return float(args.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done))))


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train from the newest state there is to the last step, and report the loss on the held-out text."""
    torch.manual_seed(args.seed)
    training_text, held_out_text = read_corpus()
    model = GPT(args.width, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "float16")
    autocast = torch.autocast(device.type, PRECISIONS[args.precision], enabled=args.precision != "float32")
    run = unicron_elastic.Run(model=model, optimizer=optimizer, scaler=scaler, reproducible=True, snapshot_every=10)
    done = run.restore(args.checkpoint_dir)

    def say(text: str) -> None:
        if run.rank == 0:
            print(text, flush=True)

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(training_text) - model.context - 1, (args.batch_size,))
        return windows(training_text, starts, model.context, device)

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        rank, ranks = run.rank, run.world_size
        starts = torch.linspace(0, len(held_out_text) - model.context - 1, EVALUATION_WINDOWS).long()[rank::ranks]
        with autocast:
            losses = [
                model(*windows(held_out_text, part, model.context, device)) for part in starts.split(args.batch_size)
            ]
        model.train()
        return run.mean(torch.stack(losses).mean()).item()

    say(f"{sum(each.numel() for each in model.parameters()):,} parameters  {device.type}  from step {done}")
    since = time.perf_counter()
    for step in run.steps(args.steps, args.micro_batches):
        number = step.number
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(number, args)
        if number and number % args.evaluate_every == 0:
            say(f"step {number}  eval loss {evaluate():.4f}")
            if args.checkpoint_dir:
                run.save(args.checkpoint_dir, number)
        for _ in step:
            with autocast:
                loss = model(*batch())
            step.backward(loss)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if (number + 1) % args.log_every == 0:
            took, since = time.perf_counter() - since, time.perf_counter()
            say(f"step {number + 1}  loss {step.loss:.4f}  {took / args.log_every * 1e3:.0f} ms/step")
    say(f"done: step {args.steps}  eval loss {evaluate():.4f} nats per byte")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT on Python's own source code.")
    parser.add_argument("--steps", type=int, default=500, help="train until this step (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=6, help="sequences per micro-batch (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=6, help="per step, of all ranks (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at its highest (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=50, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="of autocast (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--evaluate-every", type=int, default=100, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="a folder all ranks see (default: none)")
    return parser.parse_args()


def main() -> None:
    """Train on this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    train(parse_arguments(), device)


if __name__ == "__main__":
    main()
