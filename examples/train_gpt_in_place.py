"""Train a small byte-level GPT, and go on in the step in which a rank is lost.

This is train_gpt.py with ``unicron_elastic.Run`` in place of DistributedDataParallel and of its checkpoints:
``diff train_gpt.py train_gpt_in_place.py`` shows what that takes. It runs the same under each of these:

    python train_gpt_in_place.py
    torchrun --standalone --nproc-per-node=2 --max-restarts=3 train_gpt_in_place.py
    unicron-run --standalone --nproc-per-node=2 --max-restarts=3 train_gpt_in_place.py

To watch a recovery, let a rank die on the way: ``--kill 1:150`` makes rank 1 kill itself when it reaches step 150. The
other goes on with that step, without a checkpoint. If both die, they restart from memory, ten steps back at most.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unicron_elastic

VOCABULARY = 256  # the tokens are bytes
CORPUS_BYTES = 2_000_000
HELD_OUT_BYTES = 100_000
EVALUATION_BATCHES = 8
WARM_UP_STEPS = 50


class Block(nn.Module):
    """One transformer layer: causal self-attention, then a feed-forward network, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, length, width = x.shape
        projected = self.attention_in(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(x)


class GPT(nn.Module):
    """A decoder-only language model over bytes; 0.8 million parameters as it stands."""

    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token_embedding.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats per byte."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_corpus() -> tuple[Tensor, Tensor]:
    """Return the training text and the held-out text, one byte per element."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    if len(text) < 2 * HELD_OUT_BYTES:
        raise SystemExit("this Python has no source files of its standard library to learn from")
    tokens = torch.frombuffer(text, dtype=torch.uint8)
    return tokens[:-HELD_OUT_BYTES], tokens[-HELD_OUT_BYTES:]


def windows(text: Tensor, starts: Tensor, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cut one window at each start; the targets are the same windows, one byte later."""
    cut = text[starts[:, None] + torch.arange(context + 1)].to(device, torch.long)
    return cut[:, :-1], cut[:, 1:]


def training_batch(
    text: Tensor, context: int, device: torch.device, args: argparse.Namespace, *, step: int, index: int
) -> tuple[Tensor, Tensor]:
    """Draw a micro-batch of this step.

    It depends on nothing but (seed, step, index), so it does not matter which rank draws it.
    """
    generator = torch.Generator().manual_seed(hash((args.seed, step, index)))
    starts = torch.randint(len(text) - context - 1, (args.batch_size,), generator=generator)
    return windows(text, starts, context, device)


@torch.no_grad()
def evaluate(run: unicron_elastic.Run, model: GPT, text: Tensor, device: torch.device, batch_size: int) -> float:
    """Return the loss on windows spread evenly over the held-out text; the ranks share the work."""
    count = EVALUATION_BATCHES * batch_size * run.world_size
    starts = torch.linspace(0, len(text) - model.context - 1, count).long()[run.rank :: run.world_size]
    losses = [model(*windows(text, part, model.context, device)) for part in starts.split(batch_size)]
    return run.mean(torch.stack(losses).mean()).item()


def own_device() -> torch.device:
    """Return this rank's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    return device


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Train from the newest state there is to the last step, and report the loss on the held-out text."""
    rank = int(os.environ.get("RANK", "0"))  # the launcher's; run.rank is smaller when one below it is lost
    training_text, held_out_text = read_corpus()
    torch.manual_seed(args.seed)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)

    def tell() -> None:
        if run.rank == 0:
            parameters = sum(parameter.numel() for parameter in model.parameters())
            print(f"{parameters:,} parameters  {run.world_size} ranks  {device.type}  from step {run.step}", flush=True)

    run = unicron_elastic.Run(model=model, optimizer=optimizer, snapshot_every=10, on_regroup=tell)
    run.restore(args.checkpoint_dir)

    since, counted = time.perf_counter(), 0
    for each in run.steps(args.steps, args.micro_batches):
        step = each.number + 1
        if args.kill == (rank, step) and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, step / WARM_UP_STEPS)
        for index in each:
            loss = model(*training_batch(training_text, model.context, device, args, step=step, index=index))
            each.backward(loss)
        optimizer.step()
        counted += 1
        if step % args.log_every == 0 or step in (1, args.steps):
            now = time.perf_counter()
            if run.rank == 0:
                print(f"step {step}  loss {each.loss:.3f}  {(now - since) / counted * 1e3:.0f} ms/step", flush=True)
            since, counted = now, 0
        if args.checkpoint_dir and (step % args.checkpoint_every == 0 or step == args.steps):
            run.save(args.checkpoint_dir, step)
        if args.evaluate_every and step % args.evaluate_every == 0 and step != args.steps:
            held_out_loss = evaluate(run, model, held_out_text, device, args.batch_size)
            if run.rank == 0:
                print(f"step {step}  eval loss {held_out_loss:.3f}", flush=True)
            since, counted = time.perf_counter(), 0
    loss_at_end = evaluate(run, model, held_out_text, device, args.batch_size)
    if run.rank == 0:
        bits = loss_at_end / math.log(2)
        print(f"done: step {run.step}  eval loss {loss_at_end:.3f} nats ({bits:.2f} bits) per byte")


def rank_and_step(text: str) -> tuple[int, int]:
    """Parse ``RANK:STEP``."""
    rank, _, step = text.partition(":")
    return int(rank), int(step)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT on Python's own source code.")
    parser.add_argument("--steps", type=int, default=500, help="train until this step (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per micro-batch (default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, help="per step, of all ranks (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: %(default)s)")
    parser.add_argument("--log-every", type=int, default=20, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--checkpoint-dir", type=Path, metavar="DIR", help="a folder all ranks see (default: none)")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--evaluate-every", type=int, default=0, metavar="STEPS", help="(default: only at the end)")
    parser.add_argument("--kill", type=rank_and_step, metavar="RANK:STEP", help="this rank dies there, the first time")
    return parser.parse_args()


def main() -> None:
    """Train."""
    train(parse_arguments(), own_device())


if __name__ == "__main__":
    main()
