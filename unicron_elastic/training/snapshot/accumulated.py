"""Gradients that are accumulated over iterations, where a script's snapshot stands between two optimizer steps.

They are state there: the next step is made of them. Behind a step they are used, whether the script has reset them yet
or not, and a snapshot need not have them. Which of both it is, a few gradients of each optimizer tell, that have been
changed since its last step or have not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unicron_elastic.compat.tensors import changes_of, has_unreduced, is_plain
from unicron_elastic.compat.watching.optimizers import watch_after_steps
from unicron_elastic.state.snapshot.gather import own_rank

_PROBES = 8  # of each optimizer: as many gradients are looked at in each step


@dataclass(frozen=True)
class _Seen:
    """A parameter's gradient as it was."""

    parameter: Tensor
    gradient: ref[Tensor] | None
    changes: int

    @classmethod
    def now(cls, parameter: Tensor) -> _Seen:
        """Return it as it is."""
        gradient = parameter.grad
        return cls(parameter, None, 0) if gradient is None else cls(parameter, ref(gradient), _changes(gradient))

    def is_still(self) -> bool:
        """Return whether it is, unchanged."""
        gradient, before = self.parameter.grad, self.gradient and self.gradient()
        return gradient is before and (gradient is None or _changes(gradient) == self.changes)


class AccumulatedGradients:
    """`AccumulatedGradients` are those of the parameters of what is registered, until an optimizer has used them."""

    def __init__(self, registered: Iterable[Any]) -> None:
        self._registered = [each for each in registered if isinstance(each, nn.Module | Optimizer)]
        self._probes: WeakKeyDictionary[Optimizer, list[Tensor]] = WeakKeyDictionary()
        self._used: WeakKeyDictionary[Optimizer, list[_Seen]] = WeakKeyDictionary()
        self._taken: list[_Seen] = []  # all, as they were when a state was taken over
        self._is_told = False
        self._are_told_elsewhere = False
        self.is_off = False  # nobody asks for them any more
        watch_after_steps(self)

    def after_step(self, optimizer: Optimizer) -> None:
        """Notes that the optimizer has used its gradients, as they are now."""
        if self.is_off:
            return
        self._taken = []
        probes = self._probes.get(optimizer)
        if not probes:  # none have been chosen since the last snapshot
            found = [each for each in _of(optimizer) if each.grad is not None]
            self._probes[optimizer] = probes = found[:: -(-len(found) // _PROBES) or 1]
        self._used[optimizer] = [_Seen.now(each) for each in probes]

    def state_dict(self) -> dict[int, Any]:
        """Return them, by the place of the parameter; nothing where all are used, or are zero."""
        used = {
            id(parameter)
            for optimizer, seen in self._used.items()
            if seen and all(each.is_still() for each in seen)
            for parameter in _of(optimizer)
        }
        self._probes.clear()
        found = {
            place: parameter.grad
            for place, parameter in enumerate(self._parameters())
            if parameter.grad is not None and id(parameter) not in used
        }
        if not any(_is_something(each) for each in found.values()):
            return {}
        kept = {place: _kept(gradient) for place, gradient in found.items()}
        if any(each is None for each in kept.values()) and not self._is_told:
            self._is_told = True
            _tell("a gradient that is accumulated is of a kind that no snapshot has: it begins with nothing again")
        return {place: each for place, each in kept.items() if each is not None}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Gives the parameters these gradients."""
        parameters = self._parameters()
        for place, kept in state.items():
            if place < len(parameters):
                parameters[place].grad = _made(kept, parameters[place].device)
        self._taken = [_Seen.now(each) for each in parameters]

    def has_new(self) -> bool:
        """Return whether the script has computed some since it took over a state, before its first step."""
        return not all(each.is_still() for each in self._taken)

    @property
    def are_elsewhere(self) -> bool:
        """Return whether some are where no state has them, as FSDP2 keeps those that it has not reduced."""
        return any(has_unreduced(each) for each in self._registered if isinstance(each, nn.Module))

    def can_be_kept(self) -> bool:
        """Return whether a snapshot would have them all; tells once where it would not."""
        if not self.are_elsewhere:
            return True
        if not self._are_told_elsewhere:
            self._are_told_elsewhere = True
            _tell(
                "no snapshot is made while FSDP2 has gradients that are not reduced, as in set_requires_gradient_sync("
                "False): who went on from there would lack them. One is made where snapshot() is called behind the "
                "optimizer's step"
            )
        return False

    def _parameters(self) -> list[Tensor]:
        """Return all parameters, each once, in the same order in each process of the same script."""
        found: dict[int, Tensor] = {}
        for each in self._registered:
            for parameter in each.parameters() if isinstance(each, nn.Module) else _of(each):
                found.setdefault(id(parameter), parameter)
        return list(found.values())


def without_gradients(state: dict[str, Any]) -> None:
    """Take them out of a run's ``state``, which is for storage, and say so if there are any."""
    if state.pop("gradients", None):
        tell_of_save()


def tell_of_save() -> None:
    """Say that what is saved lacks the gradients that are accumulated."""
    _tell(
        "run.save() was called between two optimizer steps, and what it writes has none of the gradients that are "
        "accumulated: who goes on from there lacks them. Call it behind a step"
    )


def _of(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _changes(gradient: Tensor) -> int:
    return changes_of(_local(gradient))


def _local(tensor: Tensor) -> Any:
    """Return the tensor, or this rank's part of a sharded one, whose changes are not its own."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _is_something(gradient: Tensor) -> bool:
    local = _local(gradient)
    return bool(local.any()) if is_plain(local) else True


def _kept(gradient: Tensor) -> Any:
    """Return what a snapshot has of it; None of a kind that none has."""
    if gradient.layout == torch.sparse_coo:
        merged = gradient.detach().coalesce()
        return {"indices": merged.indices(), "values": merged.values(), "shape": list(merged.shape)}
    is_known = type(gradient) is Tensor or hasattr(gradient, "device_mesh")
    return gradient.detach() if is_known and is_plain(_local(gradient)) else None


def _made(kept: Any, device: torch.device) -> Tensor:
    if not isinstance(kept, dict):
        gradient: Tensor = kept.detach().to(device, copy=True)
        return gradient
    indices, values = (kept[name].to(device, copy=True) for name in ("indices", "values"))
    return torch.sparse_coo_tensor(indices, values, kept["shape"], is_coalesced=True, check_invariants=True)


def _tell(why: str) -> None:
    if own_rank()[0] == 0:
        sys.stderr.write(f"unicron: {why}.\n")
