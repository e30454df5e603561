"""Trains in epochs, each of them a call of ``run.steps()``, with an evaluation after it and collectives of its own.

    train_in_epochs.py --epochs 3 --per-epoch 4 --strike RANK:STEP:POINT:HOW ...

Strikes and models are those of train_in_place.py. At the end each rank writes what it saw to ``PROBE/final-RANK.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from train_in_place import FOLDER, RANK, Net, Strikes, arm, await_moment, batch, digest_of

import unicron_elastic


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--per-epoch", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--strike", action="append", default=[])
    parser.add_argument("--step-s", type=float, default=0.0, help="how long a micro-batch takes at least")
    parser.add_argument("--own", action="store_true", help="all_reduce of its own between the steps")
    parser.add_argument("--await-world", default="", help="RANK:STEP:NUMBER: waits before that all_reduce")
    parser.add_argument("--say-steps", action="store_true", help="prints when each step is done")
    return parser.parse_args()


def await_world(run: unicron_elastic.Run, wanted: str, step: int) -> None:
    """Waits between two steps until this rank has heard of a world, which it has not adopted yet."""
    if not wanted:
        return
    rank, at, number = map(int, wanted.split(":"))
    if (rank, at) == (RANK, step):
        await_moment(lambda: run._engine._membership._link._world.number >= number, f"world {number}")


def main() -> None:
    """Trains."""
    asked = options()
    strikes = Strikes(asked.strike)
    arm(strikes)
    (FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    torch.manual_seed(RANK)
    model = Net(16, is_rare=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    run = unicron_elastic.Run(model=model, optimizer=optimizer, reproducible=True)
    strikes.at("made")
    seen: dict[str, Any] = {"losses": {}, "means": {}, "partial": {}, "sizes": {}}
    for epoch in range(asked.epochs):
        total = (epoch + 1) * asked.per_epoch
        for step in run.steps(total=total, micro_batches=asked.micro_batches):
            strikes.step = step.number
            for index in step:
                x, y = batch(step.number, index)
                loss = nn.functional.mse_loss(model(x), y)
                if asked.step_s:
                    time.sleep(asked.step_s)
                step.backward(loss)
                strikes.at("accumulate")
            optimizer.step()
            seen["losses"][step.number] = step.loss
            if asked.say_steps:
                os.write(1, f"STEP {step.number} pid {os.getpid()} at {time.monotonic():.6f}\n".encode())
            strikes.at("between")
            if asked.own:
                await_world(run, asked.await_world, step.number)
                total_of_ones = torch.ones(1)
                dist.all_reduce(total_of_ones)
                seen["sizes"][step.number] = int(total_of_ones)
        strikes.at("evaluate")
    seen["parameters"] = digest_of(model)
    seen["world_size"] = run.world_size
    (FOLDER / f"written-{RANK}").write_text(json.dumps(seen))
    (FOLDER / f"written-{RANK}").rename(FOLDER / f"final-{RANK}.json")


if __name__ == "__main__":
    main()
