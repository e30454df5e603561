"""A part of an optimizer's state: fp32 main parameters with Adam's two moments, as flat ranges of parameters.

It is either that of Megatron-Core's distributed optimizer itself, or a copy with an optimizer of the same kind.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.engine.protocol.replica_layout import Cut
from unicron_elastic.megatron.part_transfer import Range

_MOMENTS = ("exp_avg", "exp_avg_sq")


def like(optimizer: Any) -> Any:
    """An optimizer of the same kind, with nothing to optimise yet."""
    known = inspect.signature(type(optimizer).__init__).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in known}
    return type(optimizer)([{"params": [torch.empty(0)]}], **options)


def begin_state(inner: Any, main: Tensor) -> dict[str, Any]:
    """What ``inner`` keeps of a parameter; if it has made no step with it yet, as Adam itself begins."""
    state: dict[str, Any] = inner.state[main]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        for name in _MOMENTS:
            state[name] = torch.zeros_like(main)
    return state


class StatePart:
    """Part ``cut``: ``mains[i]``, of shape (end - begin,), is what ``inner`` optimises for ``ranges[i]``."""

    def __init__(self, cut: Cut, ranges: Sequence[Range], mains: Sequence[Tensor], inner: Any) -> None:
        self.cut = cut
        self.ranges = tuple(ranges)
        self.mains = tuple(mains)
        self.inner = inner
        self.is_good = True  # whether it has the state of the step that its process is in
        self._gradients: Tensor | None = None
        self._of = {each[0]: (each[1], main) for each, main in zip(ranges, mains, strict=True)}
        for main in mains:
            begin_state(inner, main)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.mains[0].device if self.mains else torch.device("cpu")

    @property
    def steps(self) -> float:
        """How many steps its optimizer has made."""
        return float(self.inner.state[self.mains[0]]["step"]) if self.mains else 0.0

    def rows(self, ranges: Sequence[Range]) -> Tensor:
        """Main parameters and both moments of some ranges, one range after another; and the steps, at the end."""
        found = [row for each in ranges for row in self._rows(each)]
        return torch.cat([*found, torch.tensor([self.steps], device=self.device)])

    def take(self, ranges: Sequence[Range], data: Tensor) -> None:
        """Takes over what ``rows`` gave for these ranges."""
        at = 0
        with torch.no_grad():
            for each in ranges:
                for row in self._rows(each):
                    row.copy_(data[at : at + row.numel()])
                    at += row.numel()
                self.inner.state[self._of[each[0]][1]]["step"].fill_(float(data[-1]))

    @staticmethod
    def length(ranges: Sequence[Range]) -> int:
        """Return the length of what ``rows`` gives."""
        return (1 + len(_MOMENTS)) * sum(end - begin for _, begin, end in ranges) + 1

    def _rows(self, each: Range) -> list[Tensor]:
        number, begin, end = each
        first, main = self._of[number]
        state = self.inner.state[main]
        return [tensor.detach()[begin - first : end - first] for tensor in (main, *(state[name] for name in _MOMENTS))]

    def detached(self) -> StatePart:
        """The same state in other tensors, which no other optimizer steps."""
        mains = [main.detach().clone() for main in self.mains]
        inner = like(self.inner)
        for main, before in zip(mains, self.mains, strict=True):
            inner.state[main] = {key: value.clone() for key, value in self.inner.state[before].items()}
        return StatePart(self.cut, self.ranges, mains, inner)

    # -- gradients of a copy ------------------------------------------------------------------------------------------

    def take_gradients(self, gradients: Tensor) -> None:
        """Those of all its ranges, one after another."""
        self._gradients = gradients

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiplies them."""
        if self._gradients is not None:
            self._gradients *= factor

    def lay_gradients(self, factor: Tensor | None = None) -> None:
        """Where the optimizer looks for them, times ``factor``, in fp32."""
        assert self._gradients is not None
        gradients = self._gradients if factor is None else self._gradients * factor
        at = 0
        for main in self.mains:
            main.grad = gradients[at : at + main.numel()].float()
            at += main.numel()

    def follow(self, other: StatePart) -> None:
        """Takes over the learning rates and what else is set for each group of parameters."""
        for mine, theirs in zip(self.inner.param_groups, other.inner.param_groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})

    def gradients_for_norm(self, optimizer: Any) -> list[Tensor]:
        """Those that Megatron-Core counts: of no parameter twice. ``optimizer``: the distributed one."""
        known = optimizer.get_parameters
        optimizer.get_parameters = lambda: list(self.mains)
        try:
            found: list[Tensor] = optimizer.get_main_grads_for_grad_norm()
        finally:
            optimizer.get_parameters = known
        return found
