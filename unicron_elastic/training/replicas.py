"""This rank's state, as far as it must be that of all ranks: its digests, every so many steps and after newcomers."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unicron_elastic.state.digest import digests
from unicron_elastic.state.exact import tensors_of
from unicron_elastic.training.comparison import Told

__all__ = ["Replicas"]

_SCALER = ("_scale", "_growth_tracker")


class Replicas:
    """Of one run: ``model``, and of what is ``registered`` the optimizers of its parameters and the scaler.

    ``every``: in so many steps they are compared once, and in the first step with newcomers; 0: never. Raises
    ValueError for a number below 0.
    """

    def __init__(self, model: nn.Module, registered: Mapping[str, Any], every: int) -> None:
        if every < 0:
            raise ValueError(f"compare_every must be 0 or more, got {every}")
        self.every = every
        self.buffers: Callable[[], Mapping[str, Tensor]] = dict  # of the model, as the step began
        self._model = model
        self._registered = registered
        self._step = 0
        self._is_anyone_new = True
        self._digest: int | None = None
        self._told: Told | None = None

    def begin(self, step: int) -> None:
        """Step ``step`` begins; until its optimizer step the state stays as it is."""
        self._step = step
        self._digest = self._told = None

    def meet(self) -> None:
        """Newcomers have joined."""
        self._is_anyone_new = True

    def end(self, *, is_compared: bool) -> None:
        """The step is over."""
        self._is_anyone_new = self._is_anyone_new and not is_compared

    def give_up(self, sentence: str) -> None:
        """The ranks differ, and may: they are not compared any more. ``sentence`` is said."""
        self.every = 0
        if sentence:
            sys.stderr.write(f"unicron: {sentence}.\n")

    def digest(self) -> int | None:
        """That of the state, in 64 bits, computed once a step; None if it is not to be compared in this one."""
        if self._digest is None and self.every and (self._is_anyone_new or self._step % self.every == 0):
            self._digest = _combined(self.told().tensors)
        return self._digest

    def told(self) -> Told:
        """What the others are told if the digests differ."""
        if self._told is None:
            named = {name: tensor for name, tensor in self._tensors() if _is_plain(tensor)}
            found = zip(named.items(), digests(list(named.values())), strict=True)
            tensors = {name: (_what(tensor), digest) for (name, tensor), digest in found}
            self._told = Told(tensors=tensors, caches=frozenset(self._caches()), kind=_kind(self._model))
        return self._told

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((f"model.{name}", parameter) for name, parameter in self._model.named_parameters())
        yield from ((f"model.{name}", buffer) for name, buffer in self.buffers().items())
        own = set(self._model.parameters())
        for name, each in self._registered.items():
            optimizer = each if isinstance(each, torch.optim.Optimizer) else getattr(each, "optimizer", None)
            if isinstance(optimizer, torch.optim.Optimizer):
                yield from _of_optimizer(name, optimizer, own)
        scaler = self._registered.get("scaler")
        for leaf in _SCALER:
            if isinstance(tensor := getattr(scaler, leaf, None), Tensor):
                yield f"scaler.{leaf}", tensor

    def _caches(self) -> Iterator[str]:
        for path, module in self._model.named_modules():
            for leaf in module._non_persistent_buffers_set:
                yield f"model.{path}.{leaf}" if path else f"model.{leaf}"


def _of_optimizer(name: str, optimizer: torch.optim.Optimizer, own: set[nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    """Its state of the parameters in ``own``; nothing of one that has a part of the state on each rank."""
    if hasattr(optimizer, "consolidate_state_dict"):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        if parameter in own and parameter in optimizer.state:
            yield from tensors_of(optimizer.state[parameter], f"{name}.state[{number}]")


def _combined(tensors: Mapping[str, tuple[str, int]]) -> int:
    return sum(digest * _factor(name, what) + _factor(what, name) for name, (what, digest) in tensors.items()) % 2**64


@lru_cache(maxsize=100_000)
def _factor(one: str, other: str) -> int:
    """An odd number."""
    return int.from_bytes(hashlib.sha256(f"{one} {other}".encode()).digest()[:8], "big") | 1


def _what(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is numbers in memory of its own."""
    is_known = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    return is_known and not tensor.is_quantized and not tensor.is_meta


def _kind(model: nn.Module) -> str:
    """On what the rounding of an optimizer step may depend."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


@lru_cache(maxsize=1)
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "some processor"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "some processor")
