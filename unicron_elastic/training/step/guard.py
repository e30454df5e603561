"""Watches optimizers inside of a step, where they must not do anything: its gradients are not whole, nor reduced."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer, SparseAdam

from unicron_elastic.compat.tensors import changes_of, unscaled_by
from unicron_elastic.compat.watching.optimizers import watch_after_steps
from unicron_elastic.compat.watching.scalers import watch_scaling
from unicron_elastic.training.step.wrong_use import WrongUseError

_PARTS_MAX = 1000  # of what may have an optimizer inside; what has more is data


class Guard:
    """`Guard` watches the registered ``optimizers`` and GradScalers of a run; ``scaler`` (or None) is the run's own.

    ``others`` is what is registered besides, and ``tell`` is given what people should hear. Raises TypeError for an
    optimizer that cannot do with a run's gradients.
    """

    def __init__(
        self,
        optimizers: Iterable[Optimizer] = (),
        scaler: Any = None,
        *,
        others: Iterable[Any] = (),
        tell: Callable[[str], object] = str,
    ) -> None:
        self._optimizers = list(optimizers)
        self._others = list(others)
        self._tell = tell
        self._is_right = WeakSet(self._optimizers)  # to step over the model
        self._has_stepped = True  # any optimizer, since the gradients were reduced
        self._is_dropped_told = self._is_unknown_told = False
        self._changes = 0  # of the parameters, by then
        self._scaler = scaler
        self._is_inside = False
        self._why_left = ""  # the step before its micro-batches were over
        self._is_ours = False  # what is scaled now
        self._thread = 0
        self._unscaled: set[int] = set()
        self._not_reduced: list[Tensor] = []  # parameters of an optimizer, not of the model, that got a gradient
        self._known: frozenset[int] = frozenset()  # parameters of the model
        self._seen: list[int] = []  # parameters of the optimizers
        self._hooks: dict[Tensor, Any] = {}
        self.is_in_backward = False  # of a micro-batch's loss
        for optimizer in self._optimizers:
            if isinstance(optimizer, SparseAdam):
                raise TypeError("SparseAdam takes sparse gradients alone, and those of a run are dense: take Adam")
            optimizer.register_step_pre_hook(self._before_optimizer)
        if self._optimizers:
            watch_after_steps(self)
        for kind in {GradScaler, type(scaler)} - {type(None)}:
            watch_scaling(kind, self)

    def look(self, parameters: Iterable[Tensor]) -> None:
        """Looks which parameters the model has now, and which the optimizers have that it has not."""
        trained = [
            each for optimizer in self._optimizers for group in optimizer.param_groups for each in group["params"]
        ]
        known, seen = frozenset(map(id, parameters)), list(map(id, trained))
        if (known, seen) == (self._known, self._seen):
            return
        self._known, self._seen = known, seen
        others = {each for each in trained if each.requires_grad and each.is_leaf and id(each) not in known}
        for parameter in self._hooks.keys() - others:
            self._hooks.pop(parameter).remove()
        for parameter in others - self._hooks.keys():
            self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._not_reduced.append)

    def begin(self) -> None:
        """A step begins."""
        self._is_inside, self._why_left, self._thread = True, "", threading.get_ident()
        self._unscaled = unscaled_by(self._scaler)
        self._not_reduced.clear()

    @property
    def is_inside(self) -> bool:
        """Whether a step's micro-batches are being computed, or were left before their end."""
        return self._is_inside

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as the run's GradScaler scales it."""
        if self._scaler is None:
            return loss
        self._is_ours = True
        try:
            scaled: Tensor = self._scaler.scale(loss)
        finally:
            self._is_ours = False
        return scaled

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss, as the run's GradScaler scales it."""
        scaled = self.scaled(loss)
        self.is_in_backward = True
        try:
            scaled.backward()
        finally:
            self.is_in_backward = False

    def is_scaling(self, scaler: Any) -> None:
        """Raises RuntimeError if the script scales a loss in a step itself. A disabled scaler scales nothing."""
        is_inside = self._is_inside and not self._why_left
        is_of_script = is_inside and not self._is_ours and self._thread == threading.get_ident()
        if not is_of_script or (hasattr(scaler, "is_enabled") and not scaler.is_enabled()):
            return
        if scaler is self._scaler:
            raise WrongUseError(
                "step.backward(loss) scales the loss itself: give it the loss, and not scaler.scale(loss), which would "
                "be scaled twice"
            )
        raise WrongUseError(
            "a GradScaler that is not the run's scales a loss within 'for index in step': register it, with "
            "Run(scaler=scaler), and give step.backward(loss) the loss as it is, which is scaled there"
        )

    def check(self) -> None:
        """Raises RuntimeError for what does not show in the gradients of the model, since the step began.

        Unscaling counts as no change of theirs. A copy of a parameter, as in fp32, is welcome to be an optimizer's: the
        script gives it the gradient that was reduced, and autograd none.
        """
        if unscaled_by(self._scaler) - self._unscaled:
            raise WrongUseError(
                "the gradients were unscaled while micro-batches were being summed up: scaler.unscale_(optimizer) "
                "belongs behind 'for index in step'"
            )
        for parameter in (each for each in self._not_reduced if id(each) not in self._known):
            raise WrongUseError(
                f"a parameter of shape {tuple(parameter.shape)} got a gradient that is not reduced: an optimizer has "
                "it, and the model of this run has not. Give Run one module that has all of them, as a ModuleList"
            )

    def end(self) -> None:
        """The step's gradients are reduced, or an exception has come out of it."""
        self._is_inside = bool(self._why_left)

    def is_reduced(self, trained: Sequence[Tensor]) -> None:
        """Note that the gradients of these parameters wait for an optimizer."""
        self._has_stepped = False
        if self._may_tell_dropped():
            self._changes = sum(map(changes_of, trained))

    def drop(self, step: int, trained: Sequence[Tensor]) -> None:
        """Tell once if no optimizer has made ``step``, whose gradients are about to be dropped."""
        if not self._has_stepped and self._may_tell_dropped() and sum(map(changes_of, trained)) == self._changes:
            self._is_dropped_told = True
            self._tell(
                f"step {step} ended without an optimizer.step(): its gradients are dropped, as the next step begins "
                "with zeros. To accumulate more, have more micro-batches in a step"
            )

    def _may_tell_dropped(self) -> bool:
        """Return False with a GradScaler, which may leave a step out, and without a registered optimizer."""
        return bool(self._optimizers) and self._scaler is None and not self._is_dropped_told

    def leave(self, step: int, taken: int) -> None:
        """The script has left the micro-batches of ``step`` after it was given so many: they never come to an end."""
        given = f"{taken} micro-batch{'es' * (taken > 1)}"
        self._why_left = (
            f"'for index in step' was left by break, return or an exception after {given} of step {step}, whose "
            "gradients are not reduced: let that loop come to its end by itself; to stop early, give run.steps() a "
            "smaller total"
        )

    def check_outside(self, why: str) -> None:
        """Raises RuntimeError, which says ``why``, in a step whose gradients are not reduced."""
        if self._is_inside:
            raise WrongUseError(self._why_left or why)

    def after_step(self, optimizer: Optimizer) -> None:
        """Tell once of one that steps over the model and is not registered: who comes later has not its state."""
        self._has_stepped = True
        if (
            optimizer in self._is_right or self._thread != threading.get_ident()
        ):  # another run's may step in another one
            return
        self._is_right.add(optimizer)
        if any(holds(optimizer, each) for each in self._optimizers):
            return  # its state is that of the one inside
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._watch([each for each in parameters if id(each) not in self._known])
        is_of_model = any(id(each) in self._known for each in parameters)
        if is_of_model and not self._is_unknown_told and not any(holds(each, optimizer) for each in self._others):
            self._tell(
                f"{type(optimizer).__name__}, an optimizer that is not registered, has stepped over parameters of the "
                "model: its state is neither kept nor given to a rank that takes a lost one's place. Make it before "
                "Run, and register it, too, by a name of its own"
            )
            self._is_unknown_told = True

    def _watch(self, others: Iterable[Tensor]) -> None:
        """Notice when parameters that the model has not get a gradient of a step's loss: they are in no rank's sum."""
        of_this = weakref.ref(self)  # parameters may live longer than a run, which holds all of its own

        def note(parameter: Tensor) -> None:
            guard = of_this()
            if guard is not None and guard.is_in_backward:
                guard._not_reduced.append(parameter)

        for parameter in others:
            if parameter.requires_grad and parameter.is_leaf and parameter not in self._hooks:
                parameter.register_post_accumulate_grad_hook(note)

    def _before_optimizer(self, *_: Any) -> None:
        self.check_outside(
            "optimizer.step() belongs behind 'for index in step': within, the gradients are those of some "
            "micro-batches of this rank alone"
        )


def holds(registered: Any, optimizer: Optimizer, levels: int = 3) -> bool:
    """Return whether it is, or has, the optimizer: a wrapper of the script's own gives its state."""
    if registered is optimizer:
        return True
    if not levels or isinstance(registered, Tensor | nn.Module | str | bytes):
        return False
    match registered:
        case Mapping():
            parts = list(registered.values())
        case list() | tuple() | set():
            parts = list(registered)
        case _:
            parts = list(getattr(registered, "__dict__", {}).values())
    return len(parts) <= _PARTS_MAX and any(holds(each, optimizer, levels - 1) for each in parts)
