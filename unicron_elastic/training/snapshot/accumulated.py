"""Gradients that are accumulated over iterations, where a script's snapshot stands between two optimizer steps.

They are state there: the next step is made of them. Behind a step they are used, and a snapshot need not have them
where the script makes others for each step, as it has done each time so far. A gradient is used if its optimizer has
stepped with it, and it has not been changed since. One that outlives a step, as it is set to zero in place or not reset
at all, may count in the next one, and is always kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unicron_elastic.compat.tensors import changes_of, has_unreduced, is_plain, local_of
from unicron_elastic.compat.watching.optimizers import watch_after_steps
from unicron_elastic.state.snapshot.gather import own_rank

_ZEROS = "zeros"  # what a snapshot has of a gradient of zeros, which is not the same as none


class _Seen:
    """`_Seen` are the gradients of ``parameters`` as they were. It is made in each step, in as few calls as can be."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        gradients = [each.grad for each in parameters]
        self._gradients = [None if each is None else ref(each) for each in gradients]
        self._changes = [0 if each is None else changes_of(each) for each in gradients]

    def is_any_there(self) -> bool:
        """Return whether one of the parameters has the same gradient, changed or not."""
        pairs = zip(self._parameters, self._gradients, strict=True)
        return any(gradient is not None and gradient() is each.grad is not None for each, gradient in pairs)

    def unchanged(self) -> Iterator[Tensor]:
        """Yield the parameters whose gradients are the same, or none as they were."""
        for each, gradient, changes in zip(self._parameters, self._gradients, self._changes, strict=True):
            now = each.grad
            if now is None or gradient is None:
                if now is gradient:
                    yield each
            elif gradient() is now and changes_of(now) == changes:
                yield each

    def is_unchanged(self) -> bool:
        """Return whether all are."""
        return sum(1 for _ in self.unchanged()) == len(self._parameters)


class AccumulatedGradients:
    """`AccumulatedGradients` are those of the parameters of what is registered, until an optimizer has used them."""

    def __init__(self, registered: Iterable[Any]) -> None:
        registered = list(registered)
        self._registered = [each for each in registered if isinstance(each, nn.Module | Optimizer)]
        self._engines = [each for each in registered if hasattr(each, "is_between_steps")]
        self._used: WeakKeyDictionary[Optimizer, _Seen] = WeakKeyDictionary()  # in its last step
        self._is_reset: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()  # whether none has outlived a step
        self._taken = _Seen([])  # all, as they were when a state was taken over
        self._is_told = False
        self._are_told_elsewhere = False
        self.is_off = False  # nobody asks for them any more
        watch_after_steps(self)

    def after_step(self, optimizer: Optimizer) -> None:
        """Notes that the optimizer has used its gradients, as they are now; takes half a microsecond for each."""
        self._taken = _Seen([])
        if self.is_off:
            return
        if before := self._used.get(optimizer):
            self._is_reset[optimizer] = self._is_reset.get(optimizer, True) and not before.is_any_there()
        self._used[optimizer] = _Seen(_of(optimizer))

    def state_dict(self) -> dict[int, Any]:
        """Return them, by the place of the parameter; nothing of those that are used and will not count again."""
        left_out = self._unchanged(opt for opt in self._used if self._is_reset.get(opt))
        found = {
            place: (parameter, parameter.grad)
            for place, parameter in enumerate(self._parameters())
            if parameter.grad is not None and id(parameter) not in left_out
        }
        something = _are_something([gradient for _, gradient in found.values()])
        kept = {
            place: _kept(gradient) if is_something or not _is_like(gradient, parameter) else _ZEROS
            for (place, (parameter, gradient)), is_something in zip(found.items(), something, strict=True)
        }
        if any(each is None for each in kept.values()) and not self._is_told:
            self._is_told = True
            _tell("a gradient that is accumulated is of a kind that no snapshot has: it begins with nothing again")
        return {place: each for place, each in kept.items() if each is not None}

    def are_there(self) -> bool:
        """Return whether there are some that no optimizer has used yet."""
        used = self._unchanged(self._used)
        others = [each.grad for each in self._parameters() if each.grad is not None and id(each) not in used]
        return any(_are_something(others)) or self._is_between_steps

    def _unchanged(self, optimizers: Iterable[Optimizer]) -> set[int]:
        """Return the parameters whose gradients are those that these optimizers have used, by identity."""
        return {id(each) for optimizer in optimizers for each in self._used[optimizer].unchanged()}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Gives the parameters these gradients."""
        parameters = self._parameters()
        for place, kept in state.items():
            if place < len(parameters):
                parameters[place].grad = _made(kept, parameters[place])
        self._used.clear()
        self._is_reset.clear()
        self._taken = _Seen(parameters)

    def has_new(self) -> bool:
        """Return whether the script has computed some since it took over a state, before its first step."""
        return not self._taken.is_unchanged() or self._is_between_steps

    @property
    def are_elsewhere(self) -> bool:
        """Return whether some are where no state has them, as FSDP keeps those that it has not reduced."""
        return self._is_between_steps or self._are_unreduced

    @property
    def _are_unreduced(self) -> bool:
        return any(has_unreduced(each) for each in self._registered if isinstance(each, nn.Module))

    @property
    def _is_between_steps(self) -> bool:
        """Return whether an engine that counts micro-batches itself has had some of the next step."""
        return any(each.is_between_steps for each in self._engines)

    def can_be_kept(self) -> bool:
        """Return whether a snapshot would have them all; tells once where it would not.

        An engine's loop may well ask behind each micro-batch, and has its snapshot behind the first of a step.
        """
        if not self._are_unreduced:
            return not self._is_between_steps
        if not self._are_told_elsewhere:
            self._are_told_elsewhere = True
            _tell(
                "no snapshot is made while FSDP has gradients that are not reduced, as in no_sync() or "
                "set_requires_gradient_sync(False): who went on from there would lack them. One is made where "
                "snapshot() is called behind the optimizer's step"
            )
        return False

    def _parameters(self) -> list[Tensor]:
        """Return all parameters, each once, in the same order in each process of the same script."""
        found: dict[int, Tensor] = {}
        for each in self._registered:
            for parameter in each.parameters() if isinstance(each, nn.Module) else _of(each):
                found.setdefault(id(parameter), parameter)
        return list(found.values())


def tell_of_save() -> None:
    """Say that what is saved lacks the gradients that are accumulated."""
    _tell(
        "run.save() was called between two optimizer steps, and what it writes has none of the gradients that are "
        "accumulated: who goes on from there lacks them. Call it behind a step"
    )


def _of(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _are_something(gradients: Sequence[Tensor]) -> list[bool]:
    """Return of each whether it is more than zeros, or may be, with one look at each device."""
    found = [True] * len(gradients)
    places: dict[torch.device, list[int]] = {}
    local = [local_of(each) for each in gradients]
    for place, each in enumerate(local):
        if is_plain(each):
            places.setdefault(each.device, []).append(place)
    for some in places.values():
        for place, is_something in zip(some, torch.stack([local[place].any() for place in some]).tolist(), strict=True):
            found[place] = bool(is_something)
    return found


def _is_like(gradient: Tensor, parameter: Tensor) -> bool:
    """Return whether zeros like the parameter are of the gradient's kind."""
    return type(gradient) is Tensor and gradient.dtype == parameter.dtype and is_plain(parameter)


def _kept(gradient: Tensor) -> Any:
    """Return what a snapshot has of it; None of a kind that none has."""
    if gradient.layout == torch.sparse_coo:
        merged = gradient.detach().coalesce()
        return {"indices": merged.indices(), "values": merged.values(), "shape": list(merged.shape)}
    is_known = type(gradient) is Tensor or hasattr(gradient, "device_mesh")
    return gradient.detach() if is_known and is_plain(local_of(gradient)) else None


def _made(kept: Any, parameter: Tensor) -> Tensor:
    device = parameter.device
    if isinstance(kept, str):  # _ZEROS
        return torch.zeros_like(parameter, requires_grad=False)
    if not isinstance(kept, dict):
        gradient: Tensor = kept.detach().to(device, copy=True)
        return gradient
    indices, values = (kept[name].to(device, copy=True) for name in ("indices", "values"))
    return torch.sparse_coo_tensor(indices, values, kept["shape"], is_coalesced=True, check_invariants=True)


def _tell(why: str) -> None:
    if own_rank()[0] == 0:
        sys.stderr.write(f"unicron: {why}.\n")
