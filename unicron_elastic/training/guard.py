"""Watches optimizers inside of a step, where they must not do anything: its gradients are not whole, nor reduced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from unicron_elastic.compat.tensors import unscaled_by

__all__ = ["Guard"]


class Guard:
    """Of the registered ``optimizers`` and GradScaler (or None) of a run."""

    def __init__(self, optimizers: Iterable[Optimizer], scaler: Any) -> None:
        self._scaler = scaler
        self._is_inside = False
        self._unscaled: set[int] = set()
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_optimizer)

    def begin(self) -> None:
        """A step begins."""
        self._is_inside = True
        self._unscaled = unscaled_by(self._scaler)

    def check(self) -> None:
        """Raises RuntimeError if gradients were unscaled since the step began: that counts as no change of theirs."""
        if unscaled_by(self._scaler) - self._unscaled:
            raise RuntimeError(
                "the gradients were unscaled while micro-batches were being summed up: scaler.unscale_(optimizer) "
                "belongs behind 'for index in step'"
            )

    def end(self) -> None:
        """The step's gradients are reduced, or it was given up."""
        self._is_inside = False

    def _before_optimizer(self, *_: Any) -> None:
        if self._is_inside:
            raise RuntimeError(
                "optimizer.step() belongs behind 'for index in step': within, the gradients are those of some "
                "micro-batches of this rank alone"
            )
