"""The parameters that a registered optimizer changes and no registered module has.

Such are the masters in fp32 of a model in bf16, a loss's own weights, or the outer parameters of two nested optimizers.
No ``state_dict`` has them: that of an optimizer has what it keeps of each parameter, and not the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def loose_parameters(objects: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Return them by the name of the optimizer that comes first to them, each once, in the order of its groups."""
    seen = {id(each) for module in objects.values() if isinstance(module, nn.Module) for each in module.parameters()}
    found: dict[str, list[Tensor]] = {}
    for name, optimizer in objects.items():
        for parameter in _parameters(optimizer):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found.setdefault(name, []).append(parameter)
    return found


def loose_state(objects: Mapping[str, Any]) -> dict[str, list[Tensor]]:
    """Return their numbers, for a state."""
    return {name: [each.detach() for each in some] for name, some in loose_parameters(objects).items()}


def take_loose(objects: Mapping[str, Any], state: Mapping[str, list[Tensor]]) -> None:
    """Change those of the optimizers that the ``state`` names to what it has.

    Raises ValueError that names the optimizer whose parameters are others here, before any is changed.
    """
    here = loose_parameters(objects)
    for name, taken in state.items():
        if (mine := _kinds(here.get(name, []))) != (theirs := _kinds(taken)):
            raise ValueError(
                f"{name} has other parameters than the state besides those of registered modules: "
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
