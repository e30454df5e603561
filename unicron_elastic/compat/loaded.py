"""What a worker asks of the torch that its script has imported. Imports none: who has no torch has no groups."""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

__all__ = [
    "C10D",
    "C10D_FILE",
    "DISTRIBUTED_NN",
    "DYNAMO",
    "all_groups",
    "compiled_graphs",
    "default_group",
    "first_registering",
    "forbids_cuda",
    "has_other_default_type",
    "has_other_than_gloo",
    "is_initialising",
    "recorded",
    "recorded_status",
    "recorders",
    "sequence_number",
    "watch_default_group",
]

C10D = "torch.distributed.distributed_c10d"
C10D_FILE = f"/{C10D.replace('.', '/')}.py"  # with which the name of its file ends
# What their first import does depends on when it happens: see worker/start/late.py
DYNAMO = "torch._dynamo"
DISTRIBUTED_NN = "torch.distributed.nn"

_C10D_IN_C = "torch._C._distributed_c10d"
_RECORDERS = ("_dump_fr_trace", "_dump_nccl_trace")  # torch/distributed/debug/_debug_handlers.py
# All that makes a group ends in the first of these that there is: torch 2.13 has both, an older one the second.
_REGISTERING = ("_register_pg_in_world", "_register_process_group")

_STATE_DICT = "torch.distributed.checkpoint.state_dict"
_FRAMES_MAX = 8  # between its function and a hook of the optimizer's step: wrappers of profilers and of schedulers

_GLOO = "gloo"


def all_groups() -> list[Any]:
    """Return this process's groups, the whole job's first. Raises what comes of a torch that keeps them elsewhere.

    A list that changes meanwhile, as the main thread makes or destroys groups, raises RuntimeError.
    """
    module: Any = sys.modules.get(C10D)
    return [] if module is None else list(module._world.pg_map)


def default_group() -> Any:
    """Return the group of the whole job; None without one. Raises AttributeError where it is kept elsewhere."""
    module: Any = sys.modules.get(C10D)
    return None if module is None else module._world.default_pg


@contextlib.contextmanager
def watch_default_group() -> Iterator[list[str]]:
    """Give a list that is empty as long as nobody has asked for the group of the whole job, its rank or its size."""
    asked: list[str] = []
    kind: Any = type(sys.modules[C10D]._world) if C10D in sys.modules else None
    known = None if kind is None else vars(kind).get("default_pg")
    if not isinstance(known, property):
        yield asked
        return

    def noted(world: Any) -> Any:
        asked.append("default_pg")
        return known.fget(world)  # type: ignore[misc]

    kind.default_pg = property(noted, known.fset)
    try:
        yield asked
    finally:
        kind.default_pg = known


def has_other_default_type() -> bool:
    """Return whether tensors are made of another type than float32 where nobody says which."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.get_default_dtype() != torch.float32


def first_registering(c10d: ModuleType) -> str | None:
    """Return the name of the function of ``c10d`` in which all that makes a group ends; None if there is none."""
    return next((name for name in _REGISTERING if hasattr(c10d, name)), None)


def has_other_than_gloo(group: Any) -> bool:
    """Return whether one of the group's back ends is not gloo. Raises AttributeError where they are kept elsewhere."""
    return any(group._get_backend(device).name() != _GLOO for device in group._device_types)


def sequence_number(group: Any) -> int:
    """Return how many collectives the group has begun, as its back end counts. Raises if it counts none."""
    return int(group._get_sequence_number_for_group())


def is_initialising(optimizer: Any) -> bool:
    """Return whether torch makes the step that just ended, to have a state to save or to load into.

    ``get_state_dict`` and ``set_state_dict`` do, of zero gradients at a learning rate of zero, if there is none yet.
    """
    try:
        if any("lr" in group and _is_above_zero(group["lr"]) for group in optimizer.param_groups):
            return False
    except Exception:  # an optimizer of the script's own, whose groups or rates are something else
        return False
    made_by = getattr(getattr(sys.modules.get(_STATE_DICT), "_init_optim_state", None), "__code__", None)
    frame = sys._getframe(1)
    for _ in range(_FRAMES_MAX if made_by is not None else 0):
        if frame.f_code is made_by:
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _is_above_zero(rate: Any) -> bool:
    """Return whether a learning rate is; of one on a device, which would have to wait for it, that it is."""
    is_known = isinstance(rate, int | float) or getattr(rate, "is_cpu", False)
    return not is_known or float(rate) > 0.0


def forbids_cuda(torch: Any) -> bool:
    """Return whether this process was forked from one that had opened CUDA, so that it cannot open it."""
    return bool(torch.cuda._is_in_bad_fork())


def recorders() -> list[str]:
    """Return the names of those that this torch has."""
    return [name for name in _RECORDERS if _dump(name) is not None and _dump(f"{name}_json") is not None]


def recorded_status(recorder: str) -> dict[str, Any]:
    """Return what a recorder knows of each group, by the number that it gave the group. Raises what torch raises."""
    dump = _dump(f"{recorder}_json")
    assert dump is not None
    found: dict[str, Any] = json.loads(dump(includeCollectives=False, onlyActive=False)).get("pg_status", {})
    return found


def recorded(recorder: str) -> Sequence[dict[str, Any]]:
    """Return the collectives that a recorder has, the oldest first; 2,000 take 5 ms. Raises what torch raises."""
    dump = _dump(recorder)
    assert dump is not None
    # Pickled in this very process, and faster than JSON.
    text = dump(includeCollectives=True, includeStackTraces=False, onlyActive=False)
    found: Sequence[dict[str, Any]] = pickle.loads(text).get("entries", ())
    return found


def _dump(name: str) -> Callable[..., Any] | None:
    return getattr(sys.modules.get(_C10D_IN_C), name, None)


def compiled_graphs() -> int:
    """Return how many graphs ``torch.compile`` has made in this process; 0 also if that is not known."""
    counters = getattr(sys.modules.get(f"{DYNAMO}.utils"), "counters", {})
    return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0
