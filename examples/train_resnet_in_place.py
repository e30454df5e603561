"""Train a ResNet as PyTorch's ImageNet example does, and go on in the step in which a rank is lost."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from resnet import Pictures, resnet
from torch.utils.data import DataLoader, Subset

import unicron_elastic
from unicron_elastic.training.data import MicroBatches


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train from the newest checkpoint to the last epoch, and look after each at the held-out pictures."""
    torch.manual_seed(args.seed)
    pictures, held_out = (Pictures(args.pictures, is_held_out=each) for each in (False, True))
    model = resnet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.decay_epochs, gamma=0.1)
    best = {"accuracy": 0.0}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "best": best}
    batch_size = args.batch_size // args.micro_batches
    batches = MicroBatches(pictures, batch_size, args.micro_batches, seed=args.seed, whole_steps=True)
    loader = batches.loader(num_workers=args.workers)
    run = unicron_elastic.Run(**state, reproducible=True, snapshot_every=10)
    done = run.restore(args.checkpoint_dir)

    def say(text: str) -> None:
        if run.rank == 0:
            print(text, flush=True)

    @torch.no_grad()
    def accuracy() -> float:
        model.eval()
        counts = torch.zeros(2, device=device)  # right ones, all
        share = Subset(held_out, range(run.rank, len(held_out), run.world_size))
        for images, labels in DataLoader(share, args.batch_size, num_workers=args.workers):
            right = model(images.to(device)).argmax(1) == labels.to(device)
            counts += torch.stack([right.sum(), torch.tensor(len(labels), device=device)])
        counts = run.mean(counts)
        model.train()
        return (counts[0] / counts[1]).item()

    for epoch in range(done // batches.steps_per_epoch, args.epochs):
        for step in run.steps((epoch + 1) * batches.steps_per_epoch, args.micro_batches):
            for index in step:
                images, labels = loader(step.number, index)
                step.backward(F.cross_entropy(model(images.to(device)), labels.to(device)))
            optimizer.step()
            if (step.number + 1) % args.log_every == 0:
                say(f"step {step.number + 1}  loss {step.loss:.4f}")
        if run.is_passing:
            continue  # a replacement, whose script begins with epoch 0: the others have this one behind them
        right = accuracy()
        say(f"epoch {epoch}  accuracy {right:.2%}  learning rate {scheduler.get_last_lr()[0]:.4f}")
        scheduler.step()
        is_best = right > best["accuracy"] and not run.is_partial
        if is_best:
            best["accuracy"] = right
        if args.checkpoint_dir:
            run.save(args.checkpoint_dir, run.step)
            if is_best:
                run.save(args.checkpoint_dir / "best", run.step)
    say(f"done: {args.epochs} epochs  best accuracy {best['accuracy']:.2%}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Learn of what kind a file is from 1,024 bytes of it.")
    parser.add_argument("--epochs", type=int, default=6, help="train until behind this one (default: %(default)s)")
    parser.add_argument("--pictures", type=int, default=1000, help="of each kind (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="pictures per step, of all ranks (%(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="of the first epochs (default: %(default)s)")
    parser.add_argument("--decay-epochs", type=int, default=2, help="so many have one (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="that read pictures for a rank (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS", help="(default: %(default)s)")
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
