"""What of an Accelerator cannot go on in place, or would not train with the same numbers: each in one sentence."""

from __future__ import annotations

from typing import NamedTuple

BACKWARD = "step.backward(loss), within `for index in step`, stands for accelerator.backward(loss)"
NO_RUN = "its run is not there: call Run.of(accelerator) before batches.steps(epoch)"
ACCUMULATE = "`for step in batches.steps(epoch)` and `for index in step` stand for accelerator.accumulate(model)"
LATE_BATCHES = "accelerator.batches(loader) has to stand before Run.of(accelerator), which compares their order"
_BETWEEN = "which would be this rank's own here: use run.mean(value) or run.all_reduce(value) between steps"
APART = {
    "gather": f"accelerator.gather() is of one process, {_BETWEEN}; in an evaluation each rank has all of the data",
    "reduce": f"accelerator.reduce() is of one process, {_BETWEEN}",
    "check_trigger": f"accelerator.check_trigger() is of one process, {_BETWEEN}",
}


class AcceleratorFacts(NamedTuple):
    """`AcceleratorFacts` are what matters of an Accelerator's arguments, and of what has been made before it."""

    has_begun: bool = False
    divided_by: str = ""
    mixed_precision: str = "no"
    dynamo: str = "NO"
    splits_batches: bool = False
    dispatches_batches: bool = False


def refusal_of_accelerator(facts: AcceleratorFacts) -> str:
    """Return why an Accelerator cannot go on in place; "" if it can."""
    if facts.has_begun:
        return (
            "an Accelerator or TrainingArguments are there already, with a process group of their own: leave them out"
        )
    if facts.divided_by:
        return f"{facts.divided_by} divides the model among ranks, and each must have the whole of it; leave it out"
    if facts.mixed_precision not in ("no", "bf16"):
        return f"{facts.mixed_precision} needs a gradient scaler, which is not handed on here; use bf16"
    if facts.dynamo != "NO":
        return f"the dynamo backend {facts.dynamo} wraps the model, which was not tried; leave it out"
    if facts.splits_batches or facts.dispatches_batches:
        which = "split_batches" if facts.splits_batches else "dispatch_batches"
        return f"with {which} a batch is not one rank's; leave it out"
    return ""


def refused(why: str) -> str:
    """Return the whole sentence."""
    return f"unicron_elastic.accelerate: this Accelerator cannot go on in place: {why}"
