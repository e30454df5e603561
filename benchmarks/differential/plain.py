"""Plain torch in one process, with the words of ``unicron_elastic.Run``: what each case is compared with.

The gradients of all micro-batches are accumulated by autograd itself. Buffers have the semantics that the documentation
promises: each micro-batch begins with those that the step began with; running statistics end moved by the mean of what
the micro-batches would have moved them (cumulative ones, and the number of batches, as if these had come one after the
other), and other buffers as micro-batch 0 left them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unicron_elastic.training.step.randomness import OF_SCRIPT, Randomness  # how the documented seeding is done

__all__ = ["PlainRun"]


class PlainRun:
    """One process, no launcher, nothing that can be lost."""

    rank, world_size, is_partial = 0, 1, False

    def __init__(
        self, *, model: nn.Module, scaler: Any = None, seed: int | str | None = OF_SCRIPT, **registered: Any
    ) -> None:
        self.model, self.scaler = model, scaler
        self.optimizers = [each for each in registered.values() if isinstance(each, torch.optim.Optimizer)]
        self.step = 0
        self.random = Randomness(seed, torch.device("cpu"))

    def steps(self, total: int, micro_batches: int) -> Iterator[PlainStep]:
        """As ``Run.steps``."""
        self.random.take_seeds()
        while self.step < total:
            step = PlainStep(self, micro_batches)
            yield step
            self.step += 1

    def mean(self, value: Tensor) -> Tensor:
        """Of one rank."""
        return value.clone()

    def restore(self, _folder: Any = None) -> int:
        """There is nothing."""
        return 0

    def save(self, *_: Any, **__: Any) -> None:
        """Not needed."""

    def wait_saved(self) -> None:
        """Nothing to wait for."""


class PlainStep:
    """As ``Step``."""

    def __init__(self, run: PlainRun, micro_batches: int) -> None:
        self.run, self.micro_batches = run, micro_batches
        self.number = run.step
        self.losses: list[float] = []

    @property
    def loss(self) -> float:
        """The mean over the global batch."""
        return sum(self.losses) / len(self.losses)

    def __iter__(self) -> Iterator[int]:
        """All indices."""
        run = self.run
        run.model.zero_grad()
        for optimizer in run.optimizers:  # which may have parameters that are no longer in the model
            optimizer.zero_grad()
        run.random.keep()
        buffers = Buffers(run.model)
        for index in range(self.micro_batches):
            buffers.put_back()
            run.random.seed(self.number, index)
            yield index
            buffers.note()
        buffers.settle()
        run.random.give_back()

    def backward(self, loss: Tensor) -> None:
        """Accumulates."""
        mean = loss / self.micro_batches
        (mean if self.run.scaler is None else self.run.scaler.scale(mean)).backward()
        self.losses.append(float(torch.as_tensor(loss.detach(), dtype=torch.float64)))


class Buffers:
    """Of one step."""

    def __init__(self, model: nn.Module) -> None:
        self.places = [(module, name) for module in model.modules() for name in _names(module)]
        self.before = [copy.deepcopy(module._buffers[name]) for module, name in self.places]
        self.objects = [module._buffers[name] for module, name in self.places]
        self.after: list[list[Tensor]] = []

    def put_back(self) -> None:
        """As the step began."""
        for (module, name), thing, value in zip(self.places, self.objects, self.before, strict=True):
            module._buffers[name] = thing
            if thing is not None:
                with torch.no_grad():
                    thing.copy_(value)

    def note(self) -> None:
        """What a micro-batch made of them."""
        self.after.append([copy.deepcopy(module._buffers[name]) for module, name in self.places])

    def settle(self) -> None:
        """As the step ends."""
        self.put_back()
        for number, (module, name) in enumerate(self.places):
            made = [each[number] for each in self.after]
            thing, before = self.objects[number], self.before[number]
            if thing is None or not made:
                continue
            with torch.no_grad():
                if not isinstance(module, _NormBase):
                    thing.copy_(made[0])
                elif name == "num_batches_tracked":
                    thing.fill_(int(before) + sum(int(each - before) for each in made))
                else:
                    moved = torch.stack([(each - before) / len(made) for each in made]).sum(0)
                    thing.copy_(before + moved * self.share(module, len(made)))

    def share(self, module: nn.Module, count: int) -> float:
        """Cumulative averages: each micro-batch counted as the next one after the step before."""
        numbers = [number for number, place in enumerate(self.places) if place == (module, "num_batches_tracked")]
        if module.momentum is not None or not numbers:
            return 1.0
        before = int(self.before[numbers[0]])
        used = sum(int(each[numbers[0]]) - before for each in self.after)
        return count * (before + 1) / max(1, before + used)


def _names(module: nn.Module) -> list[str]:
    return [name for name, buffer in module._buffers.items() if buffer is not None]
