"""Trains with DeepSpeed, and writes what each rank has come to.

train_deepspeed.py STAGE PRECISION [--kill RANK:STEP] [--every STEPS] [--folder FOLDER] [--steps STEPS]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_optimizer_state
from torch import nn

from unicron_elastic import Run

ACCUMULATED, WIDTH = 2, 13


def made(stage: int, precision: str) -> Any:
    """Return an engine, which every rank makes alike."""
    deepspeed.ops.__compatible_ops__ = {}  # else it compiles one of its parts for CPUs, for minutes
    torch.manual_seed(1)
    deepspeed.init_distributed("gloo")
    model = nn.Sequential(nn.Linear(WIDTH, 33), nn.ReLU(), nn.Dropout(0.1), nn.Linear(33, 7))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATED,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "gradient_clipping": 1.0,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def loss_of(engine: Any, step: int, index: int, rank: int) -> Any:
    """Return the loss of a micro-batch, which is by number."""
    drawn = torch.Generator().manual_seed(step * 100 + rank * 10 + index)
    samples, targets = torch.randn(4, WIDTH, generator=drawn), torch.randn(4, 7, generator=drawn)
    return (engine(samples.to(engine.module[0].weight.dtype)).float() - targets).square().mean()


def train(asked: argparse.Namespace) -> None:
    """Train, from what is kept, to the last step."""
    engine = made(asked.stage, asked.precision)
    run = Run.of(engine)
    rank = int(os.environ["RANK"])
    torch.manual_seed(10 + rank)
    begun = run.restore(asked.folder)
    while engine.global_steps < asked.steps:
        loss = loss_of(engine, engine.global_steps, engine.micro_steps % ACCUMULATED, rank)
        engine.backward(loss)
        strike(asked.kill, engine, rank)
        engine.step()
        run.snapshot(engine.global_steps, every=asked.every)
    if asked.folder:
        run.save(asked.folder, engine.global_steps)
    run.wait_saved()
    weight = engine.module[0].weight
    found = {
        "begun": begun,
        "model": [each.detach().double().flatten().tolist() for each in engine.module.parameters()],
        "masters": [
            each.double().tolist() for group in engine.basic_optimizer.param_groups for each in group["params"]
        ],
        "moments": [each["exp_avg_sq"].tolist() for each in engine.basic_optimizer.state.values()],
        "linked": safe_get_full_optimizer_state(weight, "exp_avg").tolist() if asked.stage else None,
        "rate": engine.get_lr(),
        "counts": [engine.global_steps, engine.micro_steps, engine.global_samples],
    }
    Path(os.environ["PROBE"], f"final-{rank}.json").write_text(json.dumps(found))


def strike(asked: str, engine: Any, rank: int) -> None:
    """Kill this process, once, in the last micro-batch of the step that was asked for, if it is that rank."""
    if asked == f"{rank}:{engine.global_steps}" and engine.micro_steps % ACCUMULATED == ACCUMULATED - 1:
        done = Path(os.environ["PROBE"], "struck")
        if not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", type=int)
    parser.add_argument("precision")
    parser.add_argument("--kill", default="")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--folder")
    parser.add_argument("--steps", type=int, default=20)
    torch.set_num_threads(1)
    train(parser.parse_args())
