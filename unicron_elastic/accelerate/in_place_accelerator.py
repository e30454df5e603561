"""An Accelerator in one of several processes, of which it is not told: a run has the others."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch

from unicron_elastic.base.extras import Unusable, why_missing

try:
    import accelerate
    from accelerate.scheduler import AcceleratedScheduler
except ImportError as error:
    if why := why_missing(error):
        raise Unusable(why) from error
    raise

from unicron_elastic.accelerate.accelerator_facts import (
    ACCUMULATE,
    APART,
    BACKWARD,
    LATE_BATCHES,
    NO_RUN,
    AcceleratorFacts,
    refusal_of_accelerator,
    refused,
)
from unicron_elastic.accelerate.alone import (
    alone,
    has_begun,
    hide_rank,
    missing_parts,
    own_device,
    show_rank,
    shown_ranks,
)
from unicron_elastic.accelerate.loader_batches import LoaderBatches
from unicron_elastic.training.loader.epoch_plan import EpochPlan
from unicron_elastic.training.loader.loader_facts import loader_facts, refusal_of_loader
from unicron_elastic.training.of_launcher import of_launcher
from unicron_elastic.training.run import Run
from unicron_elastic.training.step.wrong_use import WrongUseError
from unicron_elastic.training.whole_number import check_ranks, whole_number

_DIVIDES = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
    "parallelism_config": "parallelism_config",
}
_BY_VARIABLE = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}


class InPlaceAccelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`InPlaceAccelerator` is accelerate's, told that there is one process: it wraps no model and divides no data.

    A step of a run has the batches of so many ``ranks``, by default of as many as the launcher has started: say it
    where jobs grow or shrink. Raises WrongUseError, in one sentence, for what cannot go on in place.
    """

    def __init__(self, *args: Any, ranks: int | None = None, **kwargs: Any) -> None:
        check_ranks(ranks)
        if missing := missing_parts():
            raise WrongUseError(refused(f"accelerate {accelerate.__version__} has not {missing}"))
        self._refuse(refusal_of_accelerator(AcceleratorFacts(has_begun(), _divided_by(kwargs))))
        with alone():
            super().__init__(*args, **kwargs)
        facts = AcceleratorFacts(
            mixed_precision=str(self.mixed_precision),
            dynamo=str(getattr(self.state.dynamo_plugin.backend, "value", "NO")),
            splits_batches=bool(self.split_batches),
            dispatches_batches=bool(self.dispatch_batches),
        )
        self._refuse(refusal_of_accelerator(facts))
        if self.device.type == "cuda":
            self.state.device = own_device(self.device)
        self.ranks = ranks or of_launcher("WORLD_SIZE", 1)
        self._batches: list[LoaderBatches] = []
        self._run: Run | None = None
        hide_rank()

    def batches(self, loader: Any, *, seed: int | None = None) -> LoaderBatches:
        """Return the batches of a prepared loader by step and index, with ``gradient_accumulation_steps`` a rank.

        Its own sampler has the order; what that draws from global random numbers is by ``seed``, which is torch's by
        default, and epoch. Raises WrongUseError for a loader whose batches cannot be read by number, and behind
        ``Run.of``.
        """
        self._refuse(LATE_BATCHES if self._run is not None else "")
        known = (accelerate.data_loader.DataLoaderShard.__iter__,)
        facts = loader_facts(loader, known)
        self._refuse(refusal_of_loader(facts, "what batches() was given"))
        plan = EpochPlan(facts.batches, self.gradient_accumulation_steps, self.ranks)
        seed = torch.initial_seed() if seed is None else whole_number("seed", seed)
        made = LoaderBatches(loader, plan, self.device, seed, self._present_run)
        self._batches.append(made)
        return made

    def _present_run(self) -> Run:
        if self._run is None:
            raise WrongUseError(refused(NO_RUN))
        return self._run

    def options_of_run(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of ``Run.of`` with what is registered besides, and the rank shown in each new group."""
        theirs = options.get("on_regroup")

        def show() -> None:
            show_rank(self._present_run().rank)

        def regroup() -> None:
            show()
            if theirs is not None:
                theirs()

        of_batches = {f"order_{number}": each for number, each in enumerate(self._batches)}
        return {**options, **of_batches, "on_regroup": show if theirs is None else functools.wraps(theirs)(regroup)}

    def run_begins(self, run: Run) -> None:
        """Take rank and step from this run."""
        self._run = run

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler, which counts the batches of all ranks, as in as many processes."""
        prepared = super().prepare_scheduler(scheduler)
        if not isinstance(prepared, _OfAllRanks):
            prepared.__class__ = _OfAllRanks
            prepared.ranks = self.ranks
        return prepared

    def end_training(self) -> None:
        """End what reads ahead, and the trackers."""
        for each in self._batches:
            each.close()
        super().end_training()

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise WrongUseError: the step of a run does it."""
        raise WrongUseError(refused(BACKWARD))

    def accumulate(self, *_: Any) -> NoReturn:
        """Raise WrongUseError: the run does it."""
        raise WrongUseError(refused(ACCUMULATE))

    def gather(self, *_: Any, **__: Any) -> NoReturn:
        """Raise WrongUseError: nothing is gathered."""
        raise WrongUseError(refused(APART["gather"]))

    def gather_for_metrics(self, input_data: Any, *_: Any, **__: Any) -> Any:
        """Give back what it gets: in an evaluation each rank has all of the data."""
        return input_data

    def reduce(self, *_: Any, **__: Any) -> NoReturn:
        """Raise WrongUseError: nothing is reduced."""
        raise WrongUseError(refused(APART["reduce"]))

    def check_trigger(self) -> NoReturn:
        """Raise WrongUseError: the others' triggers are not known."""
        raise WrongUseError(refused(APART["check_trigger"]))

    def _refuse(self, why: str) -> None:
        if why:
            raise WrongUseError(refused(why))


class _OfAllRanks(AcceleratedScheduler):  # type: ignore[misc]
    """`_OfAllRanks` makes as many steps as accelerate's own does in so many processes."""

    ranks = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Make them."""
        with shown_ranks(self.ranks):
            super().step(*args, **kwargs)


def _divided_by(arguments: dict[str, Any]) -> str:
    """Name what divides the model, by these arguments or as ``accelerate launch`` has said; "" for nothing."""
    from accelerate.utils import parse_flag_from_env

    by_argument = next((what for name, what in _DIVIDES.items() if arguments.get(name) is not None), "")
    by_variable = next((what for name, what in _BY_VARIABLE.items() if parse_flag_from_env(name, False)), "")
    return by_argument or by_variable
