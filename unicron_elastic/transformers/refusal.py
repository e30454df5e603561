"""What of a Trainer cannot go on in place, or would not train with the same numbers: each in one sentence."""

from __future__ import annotations

from typing import NamedTuple

# Of trl: what they learn from is gathered from all processes, and a Trainer in place sees one.
GATHERS = (
    "GRPOTrainer",
    "RLOOTrainer",
    "PPOTrainer",
    "OnlineDPOTrainer",
    "NashMDTrainer",
    "XPOTrainer",
    "AsyncGRPOTrainer",
    "DistillationTrainer",
)
SAMPLINGS = ("random", "sequential", "group_by_length")
OTHER_LOSS = (
    "its loss is not a sum that is divided by num_items_in_batch, as with an auxiliary loss or a mean, so it cannot be "
    "divided later by what all ranks have together: if it is the mean of a batch, set "
    "trainer.loss_is_scaled_for_ga = False"
)


class ArgumentFacts(NamedTuple):
    """`ArgumentFacts` are what matters of TrainingArguments before devices are set up."""

    has_deepspeed: bool = False
    has_fsdp: bool = False
    has_parallelism: bool = False


class TrainerFacts(NamedTuple):
    """`TrainerFacts` are what matters of a Trainer, its arguments, its data and its model when it begins to train."""

    kind: str = "Trainer"
    bases: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    ranks: int = 1
    has_trained: bool = False
    is_search: bool = False
    has_index: bool = True
    wrapped_in: str = ""
    is_divided: bool = False
    mixed_precision: str = "no"
    is_compiled: bool = False
    optimizer: str = "adamw_torch"
    sampling: str = "random"
    splits_batches: bool = False
    dispatches_batches: bool = False
    finds_batch_size: bool = False
    skips_no_data: bool = False
    averages_tokens: bool = True


def refusal_of_arguments(facts: ArgumentFacts) -> str:
    """Return why a Trainer with these arguments cannot go on in place; "" if it can."""
    if facts.has_deepspeed:
        return "DeepSpeed divides the model among ranks, and needs process groups of its own; leave deepspeed out"
    if facts.has_fsdp:
        return "FSDP divides the model among ranks; leave fsdp out, or leave out patch() and restart"
    if facts.has_parallelism:
        return "parallelism_config divides the model or its sequences among ranks; leave it out"
    return ""


def refusal_of_trainer(facts: TrainerFacts) -> str:
    """Return why this Trainer cannot go on in place; "" if it can."""
    return _of_kind(facts) or _of_model(facts) or _of_data(facts)


def _of_kind(facts: TrainerFacts) -> str:
    if found := next((each for each in facts.bases if each in GATHERS), ""):
        return f"{found} learns from what is gathered from all processes, and would see one"
    if facts.overrides:
        return f"{facts.kind} has a {', '.join(facts.overrides)} of its own, which decides what a batch or a step is"
    if facts.is_search:
        return "a search of hyperparameters trains many models in one process, and a process has one run"
    if facts.has_trained:
        return "train() was called before in this process, and a process has one run: launch once for each training"
    return ""


def _of_model(facts: TrainerFacts) -> str:
    if facts.wrapped_in:
        return f"the model is wrapped in {facts.wrapped_in} already: give the Trainer the model that is inside"
    if facts.is_divided:
        return "the model is divided among devices or ranks, and each rank must have the whole of it on one device"
    if facts.mixed_precision not in ("no", "bf16"):
        return f"{facts.mixed_precision} needs a gradient scaler, which is not handed on here; use bf16"
    if facts.is_compiled:
        return "torch_compile wraps the model, which was not tried; leave it out"
    if "lomo" in facts.optimizer or "layerwise" in facts.optimizer:
        return f"optim={facts.optimizer} steps within the backward pass, before the gradients of all ranks are there"
    return ""


def _of_data(facts: TrainerFacts) -> str:
    if not facts.has_index:
        return (
            "train_dataset can only be iterated: what a lost rank has read of it nobody could read again; "
            "give it __getitem__ and __len__"
        )
    if facts.sampling not in SAMPLINGS:
        return f"train_sampling_strategy={facts.sampling} gives each rank batches of its own"
    if facts.splits_batches or facts.dispatches_batches:
        which = "split_batches" if facts.splits_batches else "dispatch_batches"
        return f"accelerator_config has {which}, with which a batch is not one rank's; leave it out"
    if facts.finds_batch_size:
        return "auto_find_batch_size changes the batches of one rank alone; leave it out"
    if facts.skips_no_data:
        return "ignore_data_skip begins an epoch again on the way, and data are read by the number of the step here"
    if facts.ranks > 1 and not facts.averages_tokens:
        return "average_tokens_across_devices=False has tokens weigh more or less by who computes them; leave it out"
    return ""


def refused(kind: str, why: str) -> str:
    """Return the whole sentence."""
    return f"unicron_elastic.transformers: this {kind} cannot go on in place: {why}"
