"""The training script of all cases: written once, run with plain torch and with ``unicron_elastic.Run``."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from differential.case import Case
from differential.churn import churn
from differential.features import batch
from differential.parts import Parts, flat

__all__ = ["HELD_OUT", "LOOPS", "MEANS", "Script", "Watcher", "digest"]

LOOPS = (
    "plain", "epochs", "epochs-scheduler", "evaluation", "own-collective", "caught-forward", "caught-backward",
    "caught-and-left", "zero-grad-inside", "early", "more", "number-early", "save",
)  # fmt: skip
HELD_OUT = 12
EVALUATE_EVERY = 3
SAVE_AT = 3
MEANS: dict[str, tuple[float, torch.dtype]] = {
    "bool": (1, torch.bool), "uint8": (200, torch.uint8), "int8": (100, torch.int8), "int16": (30_000, torch.int16),
    "int64": (7, torch.int64), "fp16": (60_000.0, torch.float16), "bf16": (3.0, torch.bfloat16),
}  # fmt: skip
OWN_SUMS = 8  # so many that a newcomer is likely to come beside one


class Watcher(Protocol):
    """Sees what a script does: it writes it down, and strikes where the case wants that."""

    def at(self, phase: str, step: int) -> None:
        """The script is there."""

    def log(self, what: str, **values: Any) -> None:
        """Something to be compared."""


class Breaks(torch.autograd.Function):
    """Raises in the backward pass, when part of the gradients have been added already."""

    @staticmethod
    def forward(_context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: Tensor) -> Tensor:
        raise ArithmeticError("broken on purpose")


class Script:
    """One process's training.

    ``is_reference``: no backward pass is broken off, as plain torch could not take it back.
    """

    def __init__(self, case: Case, parts: Parts, run: Any, watcher: Watcher, folder: Path, *, reference: bool) -> None:
        self.case, self.parts, self.run, self.watcher, self.folder = case, parts, run, watcher, folder
        self.is_reference = reference
        self.broken: set[tuple[int, int]] = set()

    def main(self) -> None:
        """All of it."""
        case = self.case
        restored = 0
        if case.loop == "save" or case.snapshot_every:
            restored = self.run.restore(self.folder / "saved" if case.loop == "save" else None)
        for total in self._totals():
            if 0 < total <= restored:
                continue  # the epoch is over, and what ends it is in the state
            for step in self.run.steps(total=total, micro_batches=case.micro_batches):
                self._step(step)
            self.watcher.at("epoch", self.run.step)
            if case.loop.startswith("epochs"):
                self._end_epoch(total)
        self.watcher.at("end", self.run.step)

    def _totals(self) -> list[int]:
        steps = self.case.steps
        match self.case.loop:
            case "epochs" | "epochs-scheduler":
                each = max(1, steps // 3)
                return [*range(each, steps, each), steps]
            case "early":
                return [steps - 3, steps - 5, steps]
            case "more":
                return [steps - 3, steps]
        return [steps]

    def _end_epoch(self, total: int) -> None:
        if self.case.loop == "epochs-scheduler":
            self.parts.optimizers[0].param_groups[0]["lr"] *= 0.8
        else:
            self._evaluate(total)

    # -- a step -------------------------------------------------------------------------------------------------------

    def _step(self, step: Any) -> None:
        case, parts, watcher = self.case, self.parts, self.watcher
        early = step.number if case.loop == "number-early" else None
        watcher.at("begin", self.run.step)
        if case.evaluate == "top":
            self._evaluate_and_go_on()
        for done, index in enumerate(step):
            number = step.number if early is None else early
            self._freeze(step.number)
            if done == 0:
                self._trace(step.number)
            watcher.at("forward", self.run.step)
            self._micro_batch(step, number, index)
            watcher.log("micro", step=self.run.step, index=index, drawn=number)
            if case.loop == "zero-grad-inside" and done == 0 and not self.is_reference:
                parts.optimizers[0].zero_grad(set_to_none=False)
            watcher.at("between", self.run.step)
        watcher.at("reduced", self.run.step)
        number = step.number
        if parts.scaler is not None:
            for optimizer in parts.optimizers:
                parts.scaler.unscale_(optimizer)
        if "sparse" not in case.blocks:  # which clipping cannot take
            nn.utils.clip_grad_norm_(parts.model.parameters(), 5.0)
        parts.step(step.loss)
        watcher.log("step", step=number, loss=step.loss, digest=digest(flat(parts)), world=self.run.world_size)
        self._freeze(number + 1)
        churn(case, parts.model, number + 1)
        watcher.at("optimized", number)
        if case.loop == "evaluation" and number % EVALUATE_EVERY == 1:
            self._evaluate(number)
        if case.evaluate == "end":
            self._evaluate_and_go_on()
        if case.loop == "own-collective":
            self._own_collective(number)
        if case.loop == "save" and number + 1 == SAVE_AT:
            self.run.save(self.folder / "saved", number + 1)
            watcher.log("saved", step=number + 1)

    def _micro_batch(self, step: Any, number: int, index: int) -> None:
        loop = "" if (self.run.step, index) in self.broken else self.case.loop
        if self.is_reference and loop != "caught-forward":  # which has moved buffers, with plain torch as well
            loop = ""
        is_chosen = self.run.step % 3 == 1 and index % 2 == 1
        if loop.startswith("caught") and is_chosen:
            self.broken.add((self.run.step, index))
            is_taken_back = self._breaks(step, number, index, loop)
            if not is_taken_back:
                return
        if not self.case.perturb:
            step.backward(self._loss(number, index))
            return
        with self.parts.perturbed():
            self.watcher.at("perturbed", self.run.step)
            step.backward(self._loss(number, index))

    def _trace(self, number: int) -> None:
        """What the state is when a step begins to be computed, by what is registered."""
        self.watcher.log("span", step=number, rates=self.parts.rates(), digests=digests(flat(self.parts)))

    def _breaks(self, step: Any, number: int, index: int, loop: str) -> bool:
        """Whether the micro-batch is computed once more then."""
        with contextlib.suppress(ArithmeticError):
            if loop == "caught-forward":
                self._loss(number, index)
                raise ArithmeticError("broken on purpose")
            step.backward(self._loss(number, index, through=Breaks.apply))
        return loop != "caught-and-left"

    def _loss(self, number: int, index: int, through: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        x, y = batch(number, index)
        found = self.parts.call(x, index) if through is None else self.parts.model(x, index, through)
        loss = nn.functional.mse_loss(found, y)
        if self.case.scaler == "overflow" and number == 2 and index == 1:
            loss = loss * torch.inf
        return loss

    def _freeze(self, number: int) -> None:
        """As of the step that begins."""
        for how, wanted in (("freeze", number < self.case.change_at), ("unfreeze", number >= self.case.change_at)):
            if how in self.case.hows:
                for parameter in self.parts.model.late():
                    if parameter.requires_grad != wanted:
                        parameter.requires_grad_(wanted)

    # -- between steps ------------------------------------------------------------------------------------------------

    def _evaluate(self, number: int, place: str = "loop") -> float:
        """The mean loss on held-out data, of which each rank computes its share."""
        run, model = self.run, self.parts.model
        self.watcher.at("evaluation", number)
        model.eval()
        with torch.no_grad():
            rank, size = run.rank, run.world_size
            losses = [nn.functional.mse_loss(model(x, index), y) for index, x, y in _held_out(rank, size)]
            mine = torch.stack(losses).sum() * size / HELD_OUT if losses else torch.zeros(())
            mean = run.mean(mine)
        model.train()
        self.watcher.log("evaluated", step=number, place=place, at=run.step, value=float(mean), partial=run.is_partial)
        return float(mean)

    def _whole_mean(self) -> float:
        """The same, computed by this rank alone."""
        model = self.parts.model
        model.eval()
        with torch.no_grad():
            losses = [nn.functional.mse_loss(model(x, index), y) for index, x, y in _held_out(0, 1)]
        model.train()
        return float(torch.stack(losses).sum() / HELD_OUT)

    def _evaluate_and_go_on(self) -> None:
        parts, follows = self.parts, self.case.follows
        with parts.swapped() if follows == "swap" else contextlib.nullcontext():
            mean = self._evaluate(self.run.step, self.case.evaluate)
            if follows == "plateau" and self.run.is_partial:  # what is decided must not go by who was lost
                mean = self._whole_mean()
        if self.case.mean_type:
            self._mean_of_type(self.case.mean_type)
        self.watcher.at("evaluated", self.run.step)
        if follows == "rate":
            parts.optimizers[0].param_groups[0]["lr"] *= 0.9
        elif follows == "plateau":
            parts.scheduler.step(round(mean, 9))  # its last bits go by the number of ranks

    def _mean_of_type(self, name: str) -> None:
        """A mean that each rank's value is: so it is known."""
        value, dtype = MEANS[name]
        with contextlib.suppress(TypeError):  # which refuses it
            mean = self.run.mean(torch.full((3,), value, dtype=dtype))
            self.watcher.log("meant", name=name, value=float(mean[0]), wanted=float(value))

    def _own_collective(self, number: int) -> None:
        if not dist.is_initialized() or self.is_reference:
            return
        size = self.run.world_size
        for _ in range(OWN_SUMS):
            found = torch.full((50_000,), float(self.run.rank + 1))
            dist.all_reduce(found)
        self.watcher.log("summed", step=number, value=float(found[0]), wanted=size * (size + 1) / 2)


def _held_out(rank: int, size: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    for index in range(rank, HELD_OUT, size):
        yield (index, *batch(-1, index))


def digests(state: dict[str, Any]) -> dict[str, str]:
    """By what is registered: parameters, buffers, and each other thing by its name."""
    groups: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        groups.setdefault(re.split("[ .]", name, maxsplit=1)[0], {})[name] = value
    return {group: digest(values) for group, values in groups.items()}


def digest(state: dict[str, Any]) -> str:
    """Of names, types, shapes and bits."""
    total = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        total.update(f"{name}:".encode())
        if isinstance(value, Tensor):
            total.update(f"{value.dtype} {tuple(value.shape)}".encode())
            total.update(
                value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
            )
        else:
            total.update(repr(value).encode())
    return total.hexdigest()[:16]
