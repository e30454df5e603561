"""What runs in modules and cannot be sent: their classes, hooks, functions that a script has put there, torch's flags.

A script that changes one in one step alone, as by ``if step.number == 5:``, has a replacement without it, which
comes in a later step. What one rank has of its own, as hooks that log on rank 0, is there from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from unicron_elastic.compat.tensors import hooks_of

_OURS = "unicron_elastic."


def code_of(path: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Name what runs in a module, and in the gradients of its own parameters, by places that begin with ``path``."""
    yield f"{path}class", _name(type(module))
    yield f"{path}forward", _name(vars(module).get("forward"))
    yield f"{path}hooks", _listed(hooks_of(module))
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield f"{path}{name}.hooks", _listed(hooks_of(parameter))


def flags() -> Iterator[tuple[str, str]]:
    """Name what a script has set for all that torch computes in this process."""
    yield "torch.get_default_dtype()", str(torch.get_default_dtype())
    backends: Any = torch.backends  # torch.get_float32_matmul_precision() raises where a script has set these
    yield "torch.backends.cuda.matmul.fp32_precision", str(backends.cuda.matmul.fp32_precision)
    yield "torch.backends.mkldnn.matmul.fp32_precision", str(backends.mkldnn.matmul.fp32_precision)
    yield "torch.are_deterministic_algorithms_enabled()", str(torch.are_deterministic_algorithms_enabled())


def _listed(hooks: Iterable[Any]) -> str:
    return ", ".join(sorted(name for each in hooks if (name := _name(each))))


def _name(called: Any) -> str:
    """Return that of a function or class; of what is there for this package, or written in C, nothing."""
    while isinstance(called, partial):
        called = called.func
    if called is None:
        return ""
    if not hasattr(called, "__qualname__"):
        called = type(called)
    module = getattr(called, "__module__", None)
    return f"{module}.{called.__qualname__}" if module and not module.startswith(_OURS) else ""
