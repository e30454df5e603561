"""Train the GPT of gpt.py with Accelerate, and go on in the step in which a rank is lost.

    pip install -e '.[transformers]'
    unicron-run --standalone --nproc-per-node=2 --max-restarts=3 train_accelerate_in_place.py

A script of Accelerate's keeps what it prepares, clips, saves and prints. Its loop over batches becomes one over the
steps of a run, which deals their batches to ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from gpt import GPT, read_corpus
from torch.utils.data import DataLoader, TensorDataset

from unicron_elastic import Run
from unicron_elastic.accelerate import InPlaceAccelerator


def loaders(context: int, samples: int, batch_size: int) -> list[DataLoader[tuple[torch.Tensor, ...]]]:
    """Return what is trained with, and what is held out."""
    found = []
    for text, count in zip(read_corpus(), (samples, max(samples // 10, 1)), strict=True):
        cut = text[: count * context + 1]
        data = TensorDataset(cut[:-1].view(-1, context).long(), cut[1:].view(-1, context).long())
        found.append(DataLoader(data, batch_size, shuffle=not found))
    return found


def train(args: argparse.Namespace) -> None:
    """Train some epochs, with an evaluation behind each."""
    accelerator = InPlaceAccelerator(gradient_accumulation_steps=args.accumulate)
    torch.manual_seed(args.seed)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)
    training, held_out = loaders(model.context, args.samples, args.batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(training) * args.epochs // args.accumulate)
    model, optimizer, training, held_out, scheduler = accelerator.prepare(
        model, optimizer, training, held_out, scheduler
    )
    batches = accelerator.batches(training)
    run = Run.of(accelerator)
    for epoch in range(args.epochs):
        for step in batches.steps(epoch):
            for index in step:
                step.backward(model(*batches(step.number, index)))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            if (step.number + 1) % args.log_every == 0:
                accelerator.print(f"step {step.number + 1}  loss {step.loss:.6f} nats per byte", flush=True)
        if run.is_passing:  # a replacement, whose epoch is a later one
            continue
        model.eval()
        with torch.no_grad():
            losses = [float(model(*batch)) for batch in held_out]
        model.train()
        accelerator.print(f"epoch {epoch}  eval loss {sum(losses) / len(losses):.6f}", flush=True)
        if args.folder is not None and accelerator.is_main_process:
            accelerator.save_model(model, str(args.folder))
    accelerator.end_training()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT on Python's own source with Accelerate.")
    parser.add_argument("--folder", type=Path, help="of the weights (default: they are not saved)")
    parser.add_argument("--epochs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--samples", type=int, default=2000, help="in an epoch (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=4, help="of a rank (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="batches of a rank in a step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at its highest (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS", help="(default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    train(parse_arguments())
