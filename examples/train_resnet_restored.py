"""Train a ResNet as PyTorch's ImageNet example does, and restart from memory, ten steps back at most."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # DDP imports it too, but after the group exists, which it would then keep alive for ever
import torch.nn.functional as F
from checkpoint import load_checkpoint, save_checkpoint
from resnet import Pictures, resnet
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

import unicron_elastic


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train from the newest checkpoint to the last epoch, and look after each at the held-out pictures."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(args.seed)
    pictures, held_out = (Pictures(args.pictures, is_held_out=each) for each in (False, True))
    model = resnet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, args.decay_epochs, gamma=0.1)
    best = {"accuracy": 0.0}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "best": best}
    sampler = DistributedSampler(pictures, seed=args.seed, drop_last=True)
    batch_size = args.batch_size // dist.get_world_size()
    loader = DataLoader(pictures, batch_size, sampler=sampler, num_workers=args.workers, drop_last=True)
    newest = args.checkpoint_dir / "newest.pt" if args.checkpoint_dir else None
    parallel = DistributedDataParallel(model)
    run = unicron_elastic.Run(**{**state, "model": parallel})
    done = run.restore() or len(loader) * (load_checkpoint(newest, **state) if newest else 0)

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    @torch.no_grad()
    def accuracy() -> float:
        model.eval()
        counts = torch.zeros(2, device=device)  # right ones, all
        share = Subset(held_out, range(dist.get_rank(), len(held_out), dist.get_world_size()))
        for images, labels in DataLoader(share, args.batch_size, num_workers=args.workers):
            right = model(images.to(device)).argmax(1) == labels.to(device)
            counts += torch.stack([right.sum(), torch.tensor(len(labels), device=device)])
        dist.all_reduce(counts)
        model.train()
        return (counts[0] / counts[1]).item()

    for epoch in range(done // len(loader), args.epochs):
        sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader, epoch * len(loader)):
            if number < done:
                continue  # of the epoch that was interrupted: these are learned
            run.snapshot(number, every=10)  # here, where all is done that belongs to the epoch before
            loss = F.cross_entropy(parallel(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (number + 1) % args.log_every == 0:
                say(f"step {number + 1}  loss {loss.item():.4f}")
        right = accuracy()
        say(f"epoch {epoch}  accuracy {right:.2%}  learning rate {scheduler.get_last_lr()[0]:.4f}")
        scheduler.step()
        is_best = right > best["accuracy"]
        if is_best:
            best["accuracy"] = right
        if newest and dist.get_rank() == 0:
            save_checkpoint(newest, epoch + 1, **state)
            if is_best:
                save_checkpoint(newest.with_name("best.pt"), epoch + 1, **state)
    say(f"done: {args.epochs} epochs  best accuracy {best['accuracy']:.2%}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Learn of what kind a file is from 1,024 bytes of it.")
    parser.add_argument("--epochs", type=int, default=6, help="train until behind this one (default: %(default)s)")
    parser.add_argument("--pictures", type=int, default=1000, help="of each kind (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="pictures per step, of all ranks (%(default)s)")
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
    dist.destroy_process_group()  # behind train: DDP, which is gone with its locals, must not outlive the group


if __name__ == "__main__":
    main()
