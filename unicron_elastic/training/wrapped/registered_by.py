"""What an ``accelerate.Accelerator`` has prepared and registered, or DeepSpeed has wrapped, as a Run takes it."""

from __future__ import annotations

from typing import Any

from torch import nn

from unicron_elastic.training.wrapped.engine_progress import is_engine, parts_of_engine

_ACCUMULATION = "accumulation_of_accelerate"
OF_LOOP = frozenset({_ACCUMULATION})  # what one kind of loop counts, and another one has not
_PARTS = ("_models", "_optimizers", "_schedulers", "_custom_objects")


class Accumulation:
    """`Accumulation` is how many batches ``accelerator.accumulate()`` has counted, which tells where steps are."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"step": self._accelerator.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have it go on from there."""
        self._accelerator.step = state_dict["step"]


def engine_of(wrapped: Any) -> Any:
    """Return the engine of DeepSpeed's that this is, or that an Accelerator has made; None if there is none."""
    models = getattr(wrapped, "_models", None)
    inner = models[0] if isinstance(models, list) and len(models) == 1 else wrapped
    return inner if is_engine(inner) else None


def registered_by(accelerator: Any) -> dict[str, Any]:
    """Return the state of an Accelerator by the names that a Run has for it, with what is inside accelerate's wrappers.

    Several models are one, as a list. An engine of DeepSpeed's may stand for the Accelerator. Raises TypeError for what
    is neither, or has prepared no model, and what ``parts_of_engine`` raises.
    """
    if (engine := engine_of(accelerator)) is not None:
        others = () if engine is accelerator else accelerator._custom_objects
        return parts_of_engine(engine) | {f"registered_{number}": each for number, each in enumerate(others)}
    if not all(isinstance(getattr(accelerator, name, None), list) for name in _PARTS):
        raise TypeError(
            f"Run.of() takes an accelerate.Accelerator or DeepSpeed's engine, and not a {type(accelerator).__name__}"
        )
    models, optimizers, schedulers, others = (getattr(accelerator, name) for name in _PARTS)
    if not models:
        raise TypeError("Run.of() was given an Accelerator without a model: call accelerator.prepare(model) before")
    found: dict[str, Any] = {"model": models[0] if len(models) == 1 else nn.ModuleList(models)}
    found |= _named("optimizer", [getattr(each, "optimizer", each) for each in optimizers])
    found |= _named("scheduler", [getattr(each, "scheduler", each) for each in schedulers])
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    if not hasattr(accelerator, "options_of_run"):  # in place each rank counts its own
        found[_ACCUMULATION] = Accumulation(accelerator)
    return found | {f"registered_{number}": each for number, each in enumerate(others)}


def _named(name: str, objects: list[Any]) -> dict[str, Any]:
    """Name the first one so, and those that follow with a number."""
    return {name if not number else f"{name}_{number}": each for number, each in enumerate(objects)}
