"""The training script of the soak: small, mostly waiting, bitwise the same for any number of ranks.

Each process writes ``TIME STEP LOSS [DIGEST]`` for each step that it made: the loss of the global batch, exact, and now
and then a digest of the parameters. Signals break it in ways for which a signal alone does not do: SIGUSR1 raises,
SIGUSR2 makes it slow for a while, SIGRTMIN+1 makes it stand still. ``--follow FOLDER`` makes the undisturbed run:
alone, without waiting for a device, as far as the job in FOLDER has come.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import torch
import torch.nn.functional as F
from _soak_steps import last_step
from torch import Tensor, nn

import unicron_elastic

CONTEXT, WIDTH, HIDDEN, BATCH = 16, 16, 64, 4
VOCABULARY = 64
SLICE_S = 0.02  # of waiting: a rank that is told to stop does so soon, and a slice costs little
SLOW_FACTOR, SLOW_S = 1.6, 20.0
DIGEST_EVERY = 50
SNAPSHOT_EVERY, PEER_SNAPSHOT_EVERY, SAVE_EVERY = 10, 50, 500
LOOK_S = 0.5
AHEAD = 100  # steps that the undisturbed run looks ahead at a time


def corpus() -> Tensor:
    """A text that nobody has to have: a walk over the vocabulary that a model can learn."""
    generator = torch.Generator().manual_seed(11)
    jumps = torch.randint(0, 5, (20_000,), generator=generator) ** 2
    return torch.cumsum(jumps, 0) % VOCABULARY


def guesser() -> nn.Module:
    """A model of 24,000 parameters."""
    flat = nn.Linear(CONTEXT * WIDTH, HIDDEN)
    layers = [nn.Embedding(VOCABULARY, WIDTH), nn.Flatten(), flat, nn.GELU(), nn.Linear(HIDDEN, VOCABULARY)]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, text: Tensor, step: int, index: int) -> Tensor:
    """Of one micro-batch: the same whoever computes it."""
    generator = torch.Generator().manual_seed(hash((step, index)))
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator)
    cut = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(cut[:, :-1]), cut[:, -1])


def digest(model: nn.Module) -> str:
    """Of all parameters, bit for bit."""
    found = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    return found.hexdigest()


class Device:
    """Takes as long as an accelerator would, and does what signals say."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.slow_until = 0.0
        signal.signal(signal.SIGUSR1, self._raise)
        signal.signal(signal.SIGUSR2, self._slow)
        signal.signal(signal.SIGRTMIN + 1, self._stand)

    def wait(self) -> None:
        """For one micro-batch."""
        now = time.monotonic()
        end = now + self.seconds * (SLOW_FACTOR if now < self.slow_until else 1.0)
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, SLICE_S))

    def _raise(self, _number: int, _frame: FrameType | None) -> None:
        raise ValueError("a batch has no samples")

    def _slow(self, _number: int, _frame: FrameType | None) -> None:
        self.slow_until = time.monotonic() + SLOW_S

    def _stand(self, _number: int, _frame: FrameType | None) -> None:
        print("stands still", file=sys.stderr, flush=True)
        while True:
            time.sleep(3600.0)


def wait_for(step: int, folder: Path) -> None:
    """Until the job in ``folder`` has made this step; ends this process when that job is over."""
    while last_step(folder) < step:
        if (folder / "over").exists():
            sys.exit(0)
        time.sleep(LOOK_S)


def main() -> None:
    """Train until somebody ends it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the steps, and what is saved")
    parser.add_argument("--micro-batches", type=int, required=True, help="of a step, over all ranks")
    parser.add_argument("--device-ms", type=float, default=0.0, help="that an accelerator takes for one of them")
    parser.add_argument("--steps", type=int, default=10**7)
    parser.add_argument("--follow", type=Path, help="be the undisturbed run of the job whose steps are there")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    text, model, device = corpus(), guesser(), Device(args.device_ms / 1e3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    is_alone = args.follow is not None
    every = {} if is_alone else {"snapshot_every": SNAPSHOT_EVERY, "peer_snapshot_every": PEER_SNAPSHOT_EVERY}
    run = unicron_elastic.Run(model=model, optimizer=optimizer, reproducible=True, **every)
    if not is_alone:
        run.restore(args.folder / "saved")
    host = "alone" if is_alone else os.environ["UNICRON_NODE_NAME"]
    made = (args.folder / f"{host}-{os.getpid()}.steps").open("a")

    for step in run.steps(total=args.steps, micro_batches=args.micro_batches):
        if is_alone and step.number % AHEAD == 0:
            wait_for(step.number, args.follow)
        for index in step:
            step.backward(loss_of(model, text, step.number, index))
            device.wait()
        optimizer.step()
        words = [f"{time.time():.3f}", str(step.number), step.loss.hex()]
        words += [digest(model)] if step.number % DIGEST_EVERY == 0 else []
        print(*words, file=made, flush=True)
        if not is_alone and (step.number + 1) % SAVE_EVERY == 0:
            run.save(args.folder / "saved", step.number + 1)


if __name__ == "__main__":
    main()
