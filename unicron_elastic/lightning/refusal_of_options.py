"""What of a Trainer of Lightning's cannot go on in place, or would not train with the same numbers: a sentence each."""

from __future__ import annotations

from typing import NamedTuple

PRECISIONS = ("32-true", "64-true", "bf16-mixed")
# Callbacks with state that nobody hands on, or that decide by this process alone.
CALLBACKS = {
    "BaseFinetuning": "adds parameters to the optimizer on its way, which was not tried",
    "BatchSizeFinder": "trains several times in one process, and a process has one run",
    "GradientAccumulationScheduler": "changes accumulate_grad_batches, and data are read by the number of the step",
    "LearningRateFinder": "trains several times in one process, and a process has one run",
    "ModelPruning": "changes the parameters themselves, which was not tried",
    "StochasticWeightAveraging": "keeps averaged weights that a replacement would not get",
    "Timer": "ends the training by the clock of one process, and ranks have one each; give max_steps or max_epochs",
    "WeightAveraging": "keeps averaged weights that a replacement would not get",
}
HOOKS = {
    "backward": "a run computes the gradients",
    "optimizer_zero_grad": "a run zeroes the gradients",
}


class TrainerOptions(NamedTuple):
    """`TrainerOptions` are what matters of a Trainer of Lightning's and its module when they begin to fit."""

    has_fitted: bool = False
    is_automatic: bool = True
    takes_iterator: bool = False
    hooks: tuple[str, ...] = ()
    callbacks: tuple[str, ...] = ()  # classes, and those that they are made of
    is_compiled: bool = False
    wrapped_in: str = ""
    precision: str = "32-true"
    optimizers: int = 1
    needs_closure: str = ""  # the optimizer's class
    overfits: bool = False
    reloads: bool = False
    syncs_batchnorm: bool = False
    validates_by_clock: bool = False


class LoaderOptions(NamedTuple):
    """`LoaderOptions` are what matters of the data loader that Lightning trains with."""

    kind: str = "DataLoader"
    is_plain: bool = True
    has_index: bool = True
    has_batches: bool = True
    is_iterated_otherwise: bool = False
    batches: int = 1
    is_second: bool = False


def refusal_of_options(options: TrainerOptions) -> str:
    """Return why this Trainer cannot go on in place; "" if it can."""
    return _of_loop(options) or _of_model(options) or _of_callbacks(options)


def _of_loop(options: TrainerOptions) -> str:
    if options.has_fitted:
        return "fit() was called before in this process, and a process has one run: launch once for each training"
    if not options.is_automatic:
        return "automatic_optimization is False, and who decides what a step is must be one"
    if options.takes_iterator:
        return "training_step takes dataloader_iter, and a batch is read by its number here: take batch"
    if options.overfits:
        return "overfit_batches was not tried; leave it out"
    if options.reloads:
        return "reload_dataloaders_every_n_epochs gives other data on the way, which a replacement would not have"
    if options.validates_by_clock:
        return "val_check_interval is a time, and each rank has a clock of its own; give a number of batches"
    return ""


def _of_model(options: TrainerOptions) -> str:
    if options.hooks:
        name = options.hooks[0]
        return f"the module has a {name}() of its own, and {HOOKS[name]}"
    if options.is_compiled:
        return "the module is compiled, which was not tried; leave torch.compile out"
    if options.wrapped_in:
        return f"{options.wrapped_in} is in the module already, and a run reduces the gradients itself"
    if options.precision not in PRECISIONS:
        return f"precision {options.precision} needs a gradient scaler or was not tried; take {', '.join(PRECISIONS)}"
    if options.optimizers != 1:
        return f"configure_optimizers() gave {options.optimizers} optimizers, and a step is one optimizer's"
    if options.needs_closure:
        return f"{options.needs_closure} computes the loss several times in a step, and a run computes it once"
    if options.syncs_batchnorm:
        return "sync_batchnorm needs all ranks in each forward pass; leave it out"
    return ""


def _of_callbacks(options: TrainerOptions) -> str:
    found = next((each for each in options.callbacks if each in CALLBACKS), "")
    return f"{found} {CALLBACKS[found]}" if found else ""


def refusal_of_loader_options(options: LoaderOptions) -> str:
    """Return why batches cannot be read from this loader by their number; "" if they can."""
    if options.is_second:
        return "there are several training data loaders, and a batch is one loader's; give one"
    if not options.is_plain:
        return f"the training data come from a {options.kind}, and batches are read by number from a DataLoader"
    if not options.has_index:
        return (
            "the training dataset can only be iterated: what a lost rank has read of it nobody could read again; "
            "give it __getitem__ and __len__"
        )
    if not options.has_batches:
        return "the training data loader has no batches (batch_size=None); give it a batch_size"
    if options.is_iterated_otherwise:
        return f"a {options.kind} changes batches while it is iterated, and a batch is read by its number here"
    if options.batches < 1:
        return "the training data loader has no batch"
    return ""


def refused(why: str) -> str:
    """Return the whole sentence."""
    return f"unicron_elastic.lightning: this Trainer cannot go on in place: {why}"
