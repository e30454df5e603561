"""What DeepSpeed's engine has, as a Run takes it: what is inside its wrappers, and how far it has come.

The optimizer that the engine has wrapped has the state and, as its parameters, the masters in fp32: with ZeRO those
that are this rank's. What the wrappers have besides none of them loads alone, and it is made anew from these. Written
against DeepSpeed 0.19.8.
"""

from __future__ import annotations

import inspect
from typing import Any

from unicron_elastic.training.step.wrong_use import WrongUseError

NO_STEPS = (
    "the model must not be in DeepSpeed's engine for run.steps(), which reduces its gradients: with Run.of(engine) the "
    "script's loop is its own, with run.restore() before it and run.snapshot(engine.global_steps) behind engine.step()"
)
_COUNTS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALES = ("loss_scaler", "loss_scale_config")  # where its optimizers for fp16 keep how losses are scaled
_PARTS = ("module", "basic_optimizer", "lr_scheduler", "zero_optimization_stage", "gradient_accumulation_steps")


def is_engine(wrapped: Any) -> bool:
    """Return whether this is an engine of DeepSpeed's."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(wrapped).__mro__)


def loads_all_ranks(optimizer: Any) -> bool:
    """Return whether it is one of DeepSpeed's that no rank can load with its own state."""
    if not type(optimizer).__module__.startswith("deepspeed."):
        return False
    return "state_dict_list" in inspect.signature(optimizer.load_state_dict).parameters


class EngineProgress:
    """`EngineProgress` is how far an engine has come, and how it scales losses."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def is_between_steps(self) -> bool:
        """Return whether the engine has gradients of some micro-batches of a step, where no state has them."""
        return bool(self._engine.micro_steps % self._engine.gradient_accumulation_steps())

    def state_dict(self) -> dict[str, Any]:
        """Return it, as numbers."""
        scales = {name: _numbers(each) for name, each in self._scales().items()}
        return {"counts": {name: getattr(self._engine, name) for name in _COUNTS}, "scales": scales}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the engine go on from there."""
        for name, count in state_dict["counts"].items():
            setattr(self._engine, name, count)
        scales = self._scales()
        for name, numbers in state_dict["scales"].items():
            for each, number in numbers.items():
                setattr(scales[name], each, number)

    def _scales(self) -> dict[str, Any]:
        optimizer = self._engine.optimizer
        return {name: getattr(optimizer, name) for name in _SCALES if getattr(optimizer, name, None) is not None}


def parts_of_engine(engine: Any) -> dict[str, Any]:
    """Return the state of an engine by the names that a Run has for it.

    Raises WrongUseError for what no snapshot of this rank has, and TypeError for an engine without an optimizer.
    """
    if missing := [name for name in (*_PARTS, *_COUNTS) if not hasattr(engine, name)]:
        raise WrongUseError(f"DeepSpeed's engine has no {', '.join(missing)} here: this version of it is not known")
    if why := _refusal(engine):
        raise WrongUseError(f"Run.of() cannot keep the state of this engine of DeepSpeed's: {why}")
    if engine.basic_optimizer is None:
        raise TypeError("Run.of() was given an engine of DeepSpeed's without an optimizer")
    parts = {"model": engine.module, "optimizer": engine.basic_optimizer, "engine": EngineProgress(engine)}
    if engine.lr_scheduler is not None:
        parts["scheduler"] = engine.lr_scheduler
    return parts


def check_options(engine: Any, options: dict[str, Any]) -> None:
    """Raise WrongUseError for options of the Run of an engine that cannot be right with it."""
    stage = engine.zero_optimization_stage()
    if options.get("replicated") and stage:
        raise WrongUseError(
            f"replicated=True says that one rank's state will do for another, and with ZeRO {stage} each rank has a "
            "part of the optimizer's: leave it out"
        )


def _refusal(engine: Any) -> str:
    """Say why its state cannot be kept; "" if it can."""
    stage = engine.zero_optimization_stage()
    if stage > 2:
        return f"ZeRO {stage} divides the parameters, and each rank's part has no state of its own; use ZeRO 0, 1 or 2"
    if any(kind.__name__ == "PipelineEngine" for kind in type(engine).__mro__):
        return "with pipeline parallelism gradients and batches are elsewhere, which was not tried"
    if getattr(engine, "has_moe_layers", False):
        return "with experts the optimizers' parts are divided otherwise, which was not tried"
    return ""


def _numbers(scale: Any) -> dict[str, Any]:
    """Return what of it is a number."""
    return {name: each for name, each in vars(scale).items() if each is None or type(each) in (bool, int, float)}
