"""Trains a model of bf16 with fp32 master weights and buffers of all kinds, and breaks ranks as ``train_in_place.py``.

At the end each rank writes the digest of each tensor of its state to ``PROBE/final-RANK.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from train_in_place import Strikes, arm, batch, wait_for_world, wrapped

import unicron_elastic
from unicron_elastic.state.exact import bits, tensors_of
from unicron_elastic.training.group import arrival
from unicron_elastic.training.step import gradients, tree_gradients

FOLDER = Path(os.environ["PROBE"])
RANK = int(os.environ.get("RANK", "0"))


class MasterWeights(torch.optim.Optimizer):
    """SGD with momentum on fp32 copies of the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(master=parameter.float().clone(), moment=torch.zeros(parameter.shape))
                state["moment"].mul_(0.9).add_(parameter.grad.float())
                state["master"].sub_(state["moment"], alpha=group["lr"])
                parameter.copy_(state["master"])


class Rounds(MasterWeights):
    """Loads something else than it gets."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """By way of the parameters' type, as torch casts; then back to fp32."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["master"] = state["master"].float()


class Book(nn.Module):
    """A codebook that follows its inputs, through ``.data`` as is the custom, and other buffers that it changes."""

    moving: torch.Tensor
    codes: torch.Tensor
    uses: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, width))
        self.register_buffer("uses", torch.zeros(5, dtype=torch.int64))
        self.register_buffer("moving", torch.zeros(width, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        quantized = self.codes[nearest] + self.moving
        self.codes.data.index_add_(0, nearest, 0.1 * (x.detach() - self.codes[nearest]))
        self.uses += nearest.bincount(minlength=5)
        self.moving = 0.9 * self.moving + 0.1 * x.detach().mean(0).bfloat16()
        self.cache = torch.zeros(len(self.cache) + RANK + 1)
        return x + 0.1 * quantized


class Net(nn.Module):
    """Its output is scaled and masked by buffers that ``state_dict`` does not have and the script changes."""

    scale: torch.Tensor
    mask: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width).bfloat16()
        self.norm = nn.BatchNorm1d(width)
        self.cumulative = nn.BatchNorm1d(width, momentum=None)
        self.book = Book(width)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(width, width))
        self.last = nn.Linear(width, 1).bfloat16()
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("mask", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x.bfloat16())).float())
        x = self.spectral(self.book(self.cumulative(x)))
        x = x * self.scale * nn.functional.pad(self.mask, (0, x.shape[1] - len(self.mask)))
        result: torch.Tensor = self.last(x.bfloat16())
        return result.float()


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--strike", action="append", default=[])
    parser.add_argument("--wait-for-worlds", type=int, default=1)
    parser.add_argument("--in-group", action="store_true", help="newcomers get the state in the group")
    parser.add_argument("--rounds", action="store_true", help="newcomers load something else than they get")
    parser.add_argument("--spoil", default="0:-1:", help="RANK:STEP:WHAT, parameter, moment or buffer, once")
    parser.add_argument("--compare-every", type=int, default=100)
    parser.add_argument("--plain", action="store_true", help="not reproducible")
    return parser.parse_args()


def spoil(asked: argparse.Namespace, step: int, model: Net, optimizer: torch.optim.Optimizer) -> None:
    """Changes the lowest bit of a number, as faulty memory does."""
    rank, when, what = asked.spoil.split(":")
    if (int(rank), int(when)) != (RANK, step) or (FOLDER / "spoiled").exists():
        return
    (FOLDER / "spoiled").touch()
    first = model.first.weight
    whole = {"parameter": first, "buffer": model.book.codes, "moment": optimizer.state[first].get("moment")}[what]
    assert whole is not None
    bits(whole).view(-1)[3] ^= 1


def main() -> None:
    """Trains."""
    asked = options()
    strikes = Strikes(asked.strike)
    arm(strikes)
    wrapped(gradients.Gradients, "_share_made", lambda *_: strikes.at("share"), lambda *_: strikes.at("shared"))
    if asked.in_group:
        arrival.fetch_state = lambda *_: None
    for owner in (gradients.Gradients, tree_gradients.TreeGradients):
        owner.__init__.__kwdefaults__["bucket_bytes"] = 200
    torch.set_num_threads(1)
    torch.manual_seed(RANK)
    model = Net(16)
    optimizer = (Rounds if asked.rounds else MasterWeights)(model.parameters())
    run = unicron_elastic.Run(
        model=model, optimizer=optimizer, reproducible=not asked.plain, compare_every=asked.compare_every
    )
    for step in run.steps(total=asked.steps, micro_batches=8):
        strikes.step = step.number
        spoil(asked, step.number, model, optimizer)
        for done, index in enumerate(step):
            if step.number == asked.steps - 1:
                wait_for_world(run, asked.wait_for_worlds)
            x, y = batch(step.number, index)
            step.backward(nn.functional.mse_loss(model(x), y))
            if done == 0:
                strikes.at("accumulate")
        optimizer.step()
        model.scale.mul_(0.9)
        model.mask = torch.ones(len(model.mask) + 1)
        strikes.at("between")
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "buffers": dict(model.named_buffers()),
        "optimizer": optimizer.state_dict(),
    }
    state["buffers"].pop("book.cache")  # each process's own
    found = {
        f"{place} {tensor.dtype} {list(tensor.shape)}": hashlib.sha256(bits(tensor).numpy().tobytes()).hexdigest()[:8]
        for place, tensor in tensors_of(state, "")
    }
    (FOLDER / f"written-{RANK}").write_text(json.dumps(found))
    (FOLDER / f"written-{RANK}").rename(FOLDER / f"final-{RANK}.json")


if __name__ == "__main__":
    main()
