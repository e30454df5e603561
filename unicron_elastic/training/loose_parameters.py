"""The parameters that a registered optimizer changes and the state of no registered module has.

Such are the masters in fp32 of a model in bf16, a loss's own weights, the outer parameters of nested optimizers, and
what the ``state_dict`` of a module's class leaves out, as of all but an adapter. An optimizer's has what it keeps of
each parameter, and not the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unicron_elastic.compat.tensors import local_of


def loose_parameters(objects: Mapping[str, Any], states: Mapping[str, Any] | None = None) -> dict[str, list[Tensor]]:
    """Return them by the name of the optimizer that comes first to them, each once, in the order of its groups.

    ``states`` are those of the objects, by name, as far as they were asked for already.
    """
    known = states or {}
    modules = {name: each for name, each in objects.items() if isinstance(each, nn.Module)}
    states = {name: known[name] if name in known else each.state_dict() for name, each in modules.items()}
    seen = {id(parameter) for name, each in modules.items() for parameter in _kept(each, states[name])}
    found: dict[str, list[Tensor]] = {}
    for name, optimizer in objects.items():
        for parameter in _parameters(optimizer):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.setdefault(name, []).append(parameter)
    return found


def _kept(module: nn.Module, state: Mapping[str, Any]) -> Iterable[Tensor]:
    """Return those of a module's parameters that are in its state, by any of their names or by where they lie."""
    addresses = {_address(each) for each in state.values()} - {None}
    named = module.named_parameters(remove_duplicate=False)
    return [each for name, each in named if name in state or _address(each) in addresses]


def _address(value: Any) -> int | None:
    """Return where the numbers of a tensor lie; None of one that has none, and of what is none."""
    try:
        return local_of(value).data_ptr() or None if isinstance(value, Tensor) else None
    except (RuntimeError, NotImplementedError):  # sparse, say
        return None


def loose_state(objects: Mapping[str, Any], states: Mapping[str, Any] | None = None) -> dict[str, list[Tensor]]:
    """Return their numbers, for a state."""
    return {name: [each.detach() for each in some] for name, some in loose_parameters(objects, states).items()}


def take_loose(objects: Mapping[str, Any], state: Mapping[str, list[Tensor]]) -> None:
    """Change those of the optimizers that the ``state`` names to what it has.

    Raises ValueError that names the optimizer whose parameters are others here, before any is changed.
    """
    if not state:
        return
    here = loose_parameters(objects)
    for name, taken in state.items():
        if (mine := _kinds(here.get(name, []))) != (theirs := _kinds(taken)):
            raise ValueError(
                f"{name} has other parameters than the state besides those that registered modules keep: "
                f"{_listed(mine)} here, and {_listed(theirs)} there"
            )
    with torch.no_grad():
        for name, taken in state.items():
            for parameter, numbers in zip(here[name], taken, strict=True):
                parameter.copy_(numbers)


def _parameters(optimizer: Any) -> Iterable[Tensor]:
    """Return those of an optimizer, or of what wraps one; of anything else none."""
    groups = getattr(optimizer, "param_groups", None)
    if isinstance(optimizer, nn.Module) or not isinstance(groups, list):
        return ()
    of_groups = [group.get("params", ()) for group in groups if isinstance(group, dict)]
    return [each for some in of_groups for each in some if isinstance(each, Tensor)]


def _kinds(parameters: Iterable[Tensor]) -> list[str]:
    return [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in parameters]


def _listed(kinds: list[str]) -> str:
    return ", ".join(kinds) or "none"
