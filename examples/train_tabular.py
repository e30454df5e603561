"""Train a classifier on a table, with everything that belongs into a training loop, and go on when a rank is lost.

The table is Python's own copy of the Unicode database, so there is nothing to download: from the words in the name of a
character ("GREEK SMALL LETTER ALPHA") a network learns its general category ("Ll", a lower-case letter). There are some
thirty thousand characters in 26 categories; one of these, "other letter", has nearly half of them.

    python train_tabular.py
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 train_tabular.py
    unicron-run --standalone --nproc-per-node=2 --max-restarts=3 train_tabular.py

``--kill 1:100`` makes rank 1 kill itself at step 100: the other one goes on. With ``--kill 0:100 --kill 1:100`` nobody
is left, and all restart from the newest snapshot in memory. In both cases the last line is the same as without, down to
the last bit of every parameter, because the run is ``reproducible``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
import unicodedata
import zlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import unicron_elastic
from unicron_elastic.training.data import MicroBatches

COLUMNS = 1024  # a word counts in the column that its hash names
HELD_OUT = 10  # one row in ten
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def named_characters() -> list[tuple[str, str]]:
    """Return (name, category) of all characters but those, most of them ideographs, whose name is made by a rule."""
    found = []
    for code in range(sys.maxunicode + 1):
        name = unicodedata.name(chr(code), "")
        if name and not name.endswith(f"{code:X}") and not name.startswith("HANGUL SYLLABLE"):
            found.append((name, unicodedata.category(chr(code))))
    return found


def read_table() -> tuple[TensorDataset, TensorDataset, list[str]]:
    """Return the rows to learn from, the held-out rows, and the names of the categories.

    A row is how often each word is in the name, (COLUMNS,) uint8, and the number of the category.
    """
    characters = named_characters()
    categories = sorted({category for _, category in characters})
    words = [(row, word) for row, (name, _) in enumerate(characters) for word in name.replace("-", " ").split()]
    places = torch.tensor([(row, zlib.crc32(word.encode()) % COLUMNS) for row, word in words])
    counts = torch.zeros(len(characters), COLUMNS, dtype=torch.uint8)
    counts.index_put_(tuple(places.T), torch.ones((), dtype=torch.uint8), accumulate=True)
    labels = torch.tensor([categories.index(category) for _, category in characters])
    is_held_out = torch.tensor([zlib.crc32(name.encode()) % HELD_OUT == 0 for name, _ in characters])
    learned = TensorDataset(counts[~is_held_out], labels[~is_held_out])
    return learned, TensorDataset(counts[is_held_out], labels[is_held_out]), categories


def classifier(categories: int) -> nn.Module:
    """Return a network from (rows, COLUMNS) to (rows, categories)."""
    return nn.Sequential(
        nn.Linear(COLUMNS, 128), nn.LayerNorm(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, categories)
    )


@torch.no_grad()
def accuracy(model: nn.Module, rows: TensorDataset, device: torch.device) -> float:
    """Return the share of rows whose category the model names; whoever asks does all the work."""
    counts, labels = (tensor.to(device) for tensor in rows.tensors)
    model.eval()
    right = (model(counts.float()).argmax(1) == labels).float().mean().item()
    model.train()
    return right


def digest(model: nn.Module) -> str:
    """Return a few digits that are other ones if one bit of one parameter is another one."""
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().cpu().numpy().tobytes())
    return whole.hexdigest()[:12]


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train from the newest state there is to the last step, and report the accuracy on the held-out rows."""
    rank = int(os.environ.get("RANK", "0"))  # the launcher's; run.rank is smaller when one below it is lost
    table, held_out, categories = read_table()
    batches = MicroBatches(table, args.batch_size, args.micro_batches, seed=args.seed)
    torch.manual_seed(args.seed)
    model = classifier(len(categories)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.learning_rate, total_steps=args.steps)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    run = unicron_elastic.Run(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        seed=args.seed,
        reproducible=True,
        snapshot_every=args.snapshot_every,
        on_regroup=lambda: print(f"rank {rank} is {run.rank} of {run.world_size}  from step {run.step}", flush=True),
    )
    run.restore()

    since, counted = time.perf_counter(), 0
    for step in run.steps(total=args.steps, micro_batches=args.micro_batches):
        if (rank, step.number + 1) in args.kill and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        for index in step:
            counts, labels = (tensor.to(device) for tensor in batches(step.number, index))
            with torch.autocast(device.type, PRECISIONS[args.precision], enabled=args.precision != "fp32"):
                loss = F.cross_entropy(model(counts.float()), labels)
            step.backward(loss)
        # From here on the gradients are those of the whole step, the same on all ranks.
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        counted += 1
        if (step.number + 1) % args.log_every == 0 and run.rank == 0:
            now = time.perf_counter()
            print(
                f"step {step.number + 1}  loss {step.loss:.4f}  {(now - since) / counted * 1e3:.0f} ms/step", flush=True
            )
            since, counted = now, 0
    if run.rank == 0:
        right = accuracy(model, held_out, device)
        print(f"done: step {run.step}  {right:.1%} of {len(held_out):,} held-out rows  parameters {digest(model)}")


def rank_and_step(text: str) -> tuple[int, int]:
    """Parse ``RANK:STEP``."""
    rank, _, step = text.partition(":")
    return int(rank), int(step)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Learn the category of a character from its name.")
    parser.add_argument("--steps", type=int, default=300, help="train until this step (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="rows per micro-batch (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=8, help="per step, of all ranks (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="(default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="of autocast (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, rows and dropout (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--snapshot-every", type=int, default=10, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument(
        "--kill", type=rank_and_step, action="append", default=[], metavar="RANK:STEP", help="it dies there, once"
    )
    return parser.parse_args()


def main() -> None:
    """Train."""
    torch.set_num_threads(1)  # sums depend on how they are split among threads
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    train(parse_arguments(), device)


if __name__ == "__main__":
    main()
