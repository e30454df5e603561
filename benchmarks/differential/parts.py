"""What a case registers with its run: model, optimizers, scheduler, scaler and averaged weights."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from differential.case import Case
from differential.features import Net

__all__ = ["OPTIMIZERS", "SCHEDULERS", "Parts", "flat", "make"]

Parameters = list[Any]


class Master(torch.optim.Optimizer):
    """SGD with momentum whose moments and copies of the weights are of a wider type than the weights."""

    def __init__(self, parameters: Parameters, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                wide = torch.float64 if parameter.dtype is torch.float64 else torch.float32
                if not state:
                    state["master"] = parameter.detach().to(wide)
                    state["moment"] = torch.zeros_like(state["master"])
                    state["count"] = 0
                state["moment"].mul_(0.9).add_(parameter.grad.to(wide))
                state["master"].add_(state["moment"], alpha=-group["lr"])
                state["count"] += 1
                parameter.copy_(state["master"])


optim = torch.optim
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "sgd-nesterov": lambda p: optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "sgd-bare": lambda p: optim.SGD(p, lr=0.05),
    "adam": lambda p: optim.Adam(p, lr=0.01, eps=1e-6),
    "adam-amsgrad": lambda p: optim.Adam(p, lr=0.01, eps=1e-6, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, eps=1e-6, weight_decay=0.1),
    "adamw-fused": lambda p: optim.AdamW(p, lr=0.01, eps=1e-6, fused=True),
    "adamw-foreach": lambda p: optim.AdamW(p, lr=0.01, eps=1e-6, foreach=True),
    "adamw-tensor-lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), eps=1e-6, foreach=False),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.02, eps=1e-6),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "adamax": lambda p: optim.Adamax(p, lr=0.01, eps=1e-6),
    "nadam": lambda p: optim.NAdam(p, lr=0.01, eps=1e-6),
    "radam": lambda p: optim.RAdam(p, lr=0.01, eps=1e-6),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.005, centered=True, momentum=0.5, eps=1e-5),
    "rprop": lambda p: optim.Rprop(p, lr=0.005),
    "asgd": lambda p: optim.ASGD(p, lr=0.02, t0=2.0),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.1, max_iter=1, history_size=3),
    "master": Master,
    "muon": lambda p: optim.Muon(p, lr=0.01),
    "two": lambda p: optim.Adam(p, lr=0.01, eps=1e-6),
}
SCHEDULERS: dict[str, Callable[[Any, int], Any]] = {
    "step": lambda o, steps: StepLR(o, max(1, steps // 4), 0.7),
    "one-cycle": lambda o, steps: OneCycleLR(o, 0.02, total_steps=steps + 2, cycle_momentum=False),
    "cosine": lambda o, steps: CosineAnnealingLR(o, T_max=steps),
    "plateau": lambda o, _steps: ReduceLROnPlateau(o, patience=1, factor=0.5),
}


@dataclass
class Parts:
    """All that a run is given."""

    model: Net
    optimizers: list[torch.optim.Optimizer]
    scheduler: Any = None
    scaler: Any = None
    ema: AveragedModel | None = None
    shadow: nn.Module | None = None
    odd: Any = None
    is_plateau_of_mean: bool = False
    call: Callable[..., Tensor] = field(default=None)  # type: ignore[assignment]

    def registered(self) -> dict[str, Any]:
        """By name, as ``Run`` takes it."""
        named: dict[str, Any] = {"model": self.model, "optimizer": self.optimizers[0]}
        if len(self.optimizers) > 1:
            named["second"] = self.optimizers[1]
        for name in ("scheduler", "scaler", "ema", "shadow", "odd"):
            if (each := getattr(self, name)) is not None:
                named[name] = each
        return named

    def step(self, loss: float) -> None:
        """Makes the optimizer step and what belongs to it; ``loss`` is that of the global batch."""
        for optimizer in self.optimizers:
            if self.scaler is not None:
                self.scaler.step(optimizer)
            elif isinstance(optimizer, optim.LBFGS):
                optimizer.step(lambda: torch.tensor(loss))
            else:
                optimizer.step()
        if self.scaler is not None:
            self.scaler.update()
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if not self.is_plateau_of_mean:
                self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        if self.shadow is not None:
            average(self.shadow, self.model)
        if self.odd is not None:
            self.odd.step(loss)

    @contextlib.contextmanager
    def perturbed(self) -> Iterator[None]:
        """Within it all weights are others, as in sharpness-aware minimization."""
        with self._others(lambda parameter: parameter * 1.05):
            yield

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Within it the averaged weights are in place."""
        averaged = iter(self.ema.module.parameters() if self.ema is not None else [])
        with self._others(lambda parameter: next(averaged, parameter).clone()):
            yield

    @contextlib.contextmanager
    def _others(self, of: Callable[[Tensor], Tensor]) -> Iterator[None]:
        parameters = list(self.model.parameters())
        kept = [each.detach().clone() for each in parameters]
        with torch.no_grad():
            for each in parameters:
                each.copy_(of(each))
        yield
        with torch.no_grad():
            for each, value in zip(parameters, kept, strict=True):
                each.copy_(value)

    def rates(self) -> list[float]:
        """The learning rates of all groups."""
        return [float(group["lr"]) for optimizer in self.optimizers for group in optimizer.param_groups]


@torch.no_grad()
def average(shadow: nn.Module, model: nn.Module) -> None:
    """Moves ``shadow`` towards ``model``."""
    for mine, other in zip(shadow.parameters(), model.parameters(), strict=True):
        if mine.is_floating_point():
            mine.lerp_(other, 0.1)


class OddState:
    """Registered state of counters, nested containers, a NumPy scalar, and an array that is changed in place."""

    def __init__(self) -> None:
        self.count, self.last = 0, np.float64(0.0)
        self.recent: deque[int] = deque(maxlen=3)
        self.seen = np.zeros(5, dtype=np.int64)

    def step(self, _loss: float) -> None:
        """Counts."""
        self.count += 1
        self.seen += 1
        self.last = np.float64(self.count / 3)
        self.recent.append(self.count)

    def state_dict(self) -> dict[str, Any]:
        """As others write theirs."""
        nested = {"recent": list(self.recent), "none": None, "seen": self.seen}
        return {"count": self.count, "last": self.last, "nested": nested}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back again."""
        self.count, self.last = state["count"], state["last"]
        self.recent = deque(state["nested"]["recent"], maxlen=3)
        self.seen[:] = state["nested"]["seen"]


def make(case: Case, seed: int) -> Parts:
    """What ``case`` trains, with the weights of ``seed``."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = Net(case.blocks, case.hows)
    if "unfreeze" in case.hows:
        for parameter in model.late():
            parameter.requires_grad_(False)
    optimizers = _optimizers(case, model)
    parts = Parts(model, optimizers, call=model)
    if case.scheduler:
        parts.scheduler = SCHEDULERS[case.scheduler](optimizers[0], case.steps)
    if case.scaler:
        parts.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    if case.ema:
        parts.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    if case.shadow:
        parts.shadow = copy.deepcopy(model).requires_grad_(False)
    if case.odd_state:
        parts.odd = OddState()
    parts.is_plateau_of_mean = case.follows == "plateau"
    if "compiled" in case.hows:
        parts.call = torch.compile(model, backend="aot_eager", dynamic=False)
    return parts


def _optimizers(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    kind = OPTIMIZERS[case.optimizer]
    rest: list[nn.Parameter] = []
    if case.optimizer == "muon":
        rest = [each for each in parameters if each.ndim != 2 or not each.numel()]
    elif case.optimizer == "two":
        rest = parameters[1::2]
    chosen = _without(parameters, rest)
    if "groups" in case.hows and case.optimizer != "lbfgs":
        made = [kind([{"params": chosen[:2]}, {"params": chosen[2:], "lr": 0.004}])]
    else:
        made = [kind(chosen)]
    return [*made, optim.SGD(rest, lr=0.03, momentum=0.5)] if rest else made


def _without(parameters: Iterable[nn.Parameter], rest: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    left_out = {id(each) for each in rest}
    return [each for each in parameters if id(each) not in left_out]


def flat(parts: Parts) -> dict[str, Any]:
    """Everything that training changes, by name, as copies: parameters, all buffers, and what else is registered."""
    found: dict[str, Any] = {}
    for name, parameter in parts.model.named_parameters():
        found[f"parameter {name}"] = parameter.detach().clone()
    for name, buffer in parts.model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    for name, each in parts.registered().items():
        if name not in ("model", "scaler"):
            _flatten(name, each.state_dict(), found)
    if parts.scaler is not None:
        _flatten("scaler", {k: v for k, v in parts.scaler.state_dict().items() if not k.startswith("_")}, found)
    return found


def _flatten(name: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _flatten(f"{name}.{key}", each, found)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            _flatten(f"{name}.{number}", each, found)
    elif isinstance(value, np.ndarray):
        found[name] = value.tolist()
    elif isinstance(value, Tensor):
        found[name] = value.detach().clone()
    elif isinstance(value, (int, float, str, bool)) or value is None:
        found[name] = value
