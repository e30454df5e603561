"""Watches optimizers inside of a step, where they must not do anything: its gradients are not whole, nor reduced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, SparseAdam

from unicron_elastic.compat.tensors import unscaled_by


class Guard:
    """Of the registered ``optimizers`` and GradScaler (or None) of a run that trains these parameters of its model.

    Raises TypeError for an optimizer that cannot do with a run's gradients.
    """

    def __init__(
        self, optimizers: Iterable[Optimizer] = (), scaler: Any = None, parameters: Iterable[Tensor] = ()
    ) -> None:
        self._scaler = scaler
        self._is_inside = False
        self._unscaled: set[int] = set()
        self._not_reduced: list[Tensor] = []  # parameters of an optimizer, not of the model, that got a gradient
        known = set(map(id, parameters))
        for optimizer in optimizers:
            if isinstance(optimizer, SparseAdam):
                raise TypeError("SparseAdam takes sparse gradients alone, and those of a run are dense: take Adam")
            optimizer.register_step_pre_hook(self._before_optimizer)
            for parameter in (each for group in optimizer.param_groups for each in group["params"]):
                if parameter.requires_grad and parameter.is_leaf and id(parameter) not in known:
                    parameter.register_post_accumulate_grad_hook(self._not_reduced.append)

    def begin(self) -> None:
        """A step begins."""
        self._is_inside = True
        self._unscaled = unscaled_by(self._scaler)
        self._not_reduced.clear()

    def check(self) -> None:
        """Raises RuntimeError for what does not show in the gradients of the model, since the step began.

        Unscaling counts as no change of theirs. A copy of a parameter, as in fp32, is welcome to be an optimizer's: the
        script gives it the gradient that was reduced, and autograd none.
        """
        if unscaled_by(self._scaler) - self._unscaled:
            raise RuntimeError(
                "the gradients were unscaled while micro-batches were being summed up: scaler.unscale_(optimizer) "
                "belongs behind 'for index in step'"
            )
        for parameter in self._not_reduced:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient that is not reduced: an optimizer has "
                "it, and the model of this run has not. Give Run one module that has all of them, as a ModuleList"
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
