"""All that is known of the private and changing parts of Lightning.

Written against Lightning 2.6. ``missing_parts`` looks whether they are there; where one is not, the strategy refuses.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core.module import LightningModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from unicron_elastic.lightning.logged_values import Logged, LoggedValues, of_step
from unicron_elastic.lightning.refusal_of_options import HOOKS, LoaderOptions, TrainerOptions
from unicron_elastic.training.loader.loader_facts import has_index
from unicron_elastic.training.step.wrong_use import WrongUseError

# What is called or put in place of, with the arguments by which that is done.
_METHODS: tuple[tuple[Any, str, set[str]], ...] = (
    (_AutomaticOptimization, "_make_closure", {"kwargs", "optimizer", "batch_idx"}),
    (_AutomaticOptimization, "_on_before_zero_grad", {"optimizer"}),
    (_TrainingEpochLoop, "_build_kwargs", {"kwargs", "batch", "batch_idx"}),
    (_TrainingEpochLoop, "_should_accumulate", set()),
    (LightningModule, "_on_before_batch_transfer", {"batch", "dataloader_idx"}),
    (Precision, "_after_closure", {"model", "optimizer"}),
    (_ResultCollection, "update_metrics", {"key", "value", "batch_size"}),
    (_FitLoop, "restarting", set()),
)
_OF_TRAINER = (
    "fit_loop._combined_loader",
    "fit_loop._data_fetcher",
    "fit_loop._restart_stage",
    "fit_loop._loaded_from_state_dict",
    "fit_loop.epoch_progress.current.processed",
    "fit_loop.epoch_progress.total.processed",
    "fit_loop.epoch_loop._batches_that_stepped",
    "fit_loop.epoch_loop._results",
    "fit_loop.epoch_loop.batch_progress.current.processed",
    "fit_loop.epoch_loop.batch_progress.total.processed",
    "fit_loop.epoch_loop.scheduler_progress",
    "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed",
    "fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad.total.completed",
    "_logger_connector._callback_metrics",
    "_logger_connector._logged_metrics",
    "_logger_connector._progress_bar_metrics",
)
_WAY = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_COUNTS = ("ready", "started", "processed", "completed")
_OF_CHECKPOINTS = ("_last_global_step_saved", "_last_checkpoint_saved", "current_score")
_OF_CONNECTOR = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_NO_STAGE = "none"  # of a restart


def missing_parts(trainer: Any = None) -> str:
    """Name what this version of Lightning has not, or has otherwise; "" if all is there."""
    for owner, name, arguments in _METHODS:
        found = getattr(owner, name, None)
        if found is None:
            return f"{owner.__name__}.{name}"
        taken = inspect.signature(found).parameters if arguments else {}
        if lacking := next((each for each in sorted(arguments) if each not in taken), ""):
            return f"the argument {lacking} of {owner.__name__}.{name}"
    fields = getattr(_Metadata, "__dataclass_fields__", {})
    if lacking := next((each for each in (*_WAY, "reduce_fx") if each not in fields), ""):
        return f"_Metadata.{lacking}"
    return next((each for each in _OF_TRAINER if trainer is not None and not _has(trainer, each)), "")


def _has(trainer: Any, name: str) -> bool:
    try:
        operator.attrgetter(name)(trainer)
    except AttributeError:
        return False
    return True


def version() -> str:
    """Return what is installed."""
    return f"lightning {lightning.__version__}"


def trainer_options(trainer: Any, *, has_fitted: bool) -> TrainerOptions:
    """Read what decides whether this Trainer can go on in place, when its optimizers are there."""
    module = trainer.lightning_module
    wrapped = next((type(each).__name__ for each in module.modules() if isinstance(each, _WRAPPERS)), "")
    takes_closure = next((type(each).__name__ for each in trainer.optimizers if _needs_closure(each)), "")
    return TrainerOptions(
        has_fitted=has_fitted,
        is_automatic=module.automatic_optimization,
        takes_iterator=is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True),
        hooks=tuple(name for name in HOOKS if is_overridden(name, module)),
        callbacks=tuple(kind.__name__ for each in trainer.callbacks for kind in type(each).__mro__),
        is_compiled=getattr(module, "_compiler_ctx", None) is not None,
        wrapped_in=wrapped,
        precision=str(trainer.precision_plugin.precision),
        optimizers=len(trainer.optimizers),
        needs_closure=takes_closure,
        overfits=trainer.overfit_batches > 0,
        reloads=trainer.reload_dataloaders_every_n_epochs > 0,
        syncs_batchnorm=getattr(trainer._accelerator_connector, "_layer_sync", None) is not None,
        validates_by_clock=getattr(trainer, "_val_check_time_interval", None) is not None,
    )


_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def _needs_closure(optimizer: Any) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def loader_options(loader: Any, *, is_second: bool) -> LoaderOptions:
    """Read what decides whether batches can be read from a loader by number."""
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        return LoaderOptions(kind=kind, is_plain=False, is_second=is_second)
    is_numbered = has_index(loader.dataset)
    has_batches = loader.batch_sampler is not None
    return LoaderOptions(
        kind=kind,
        has_index=is_numbered,
        has_batches=has_batches,
        is_iterated_otherwise=type(loader).__iter__ is not DataLoader.__iter__,
        batches=len(loader.batch_sampler) if is_numbered and has_batches else 0,
        is_second=is_second,
    )


def show_rank(rank: int) -> None:
    """Have all that is done by the first rank alone be done there."""
    from lightning_utilities.core.rank_zero import rank_zero_only as of_utilities

    rank_zero_only.rank = of_utilities.rank = rank


def begin_as_first(trainer: Any) -> None:
    """Have the progress bar and the loggers begin, as the rank is the first one now."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.enable()
        bar.on_train_start(trainer, trainer.lightning_module)
        bar.on_train_epoch_start(trainer, trainer.lightning_module)
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            _go_on_writing(logger)


def end_as_first(trainer: Any) -> None:
    """Have the progress bar end, as another rank is the first one now."""
    bar = trainer.progress_bar_callback
    if bar is not None:
        bar.disable()
        if (inner := vars(bar).get("_train_progress_bar")) is not None:
            inner.disable = True


def _go_on_writing(logger: Any) -> None:
    """Have a logger add to the file that there is, and not begin it anew."""
    path = Path(logger.log_dir, "metrics.csv")
    before = path.read_bytes() if path.exists() else b""
    writer = logger.experiment
    if before:
        path.write_bytes(before)
        writer.metrics_keys = before.decode().splitlines()[0].split(",")


def measure_alone(module: nn.Module) -> None:
    """Have metrics of torchmetrics gather nothing from other processes, each of which has evaluated all."""
    for each in module.modules():
        if isinstance(each, Metric):
            each.distributed_available_fn = _is_alone
    warnings.filterwarnings("ignore", message=".*sync_dist=True.*", category=UserWarning)


def _is_alone() -> bool:
    return False


def pass_by_hooks(module: Any, kind: type[Any]) -> None:
    """Have hooks that prepare a batch not be called for what only stands for one, of this ``kind``."""
    plain = module._on_before_batch_transfer

    def prepare(batch: Any, dataloader_idx: int = 0) -> Any:
        return batch if isinstance(batch, kind) else plain(batch, dataloader_idx)

    module._on_before_batch_transfer = prepare


def forget_hooks(module: Any) -> None:
    """Undo that."""
    vars(module).pop("_on_before_batch_transfer", None)


class StepClosure:
    """`StepClosure` computes what a batch of Lightning's loop is to compute, once, and keeps the result."""

    def __init__(self, compute: Callable[[], Tensor | None]) -> None:
        self._compute = compute
        self._result = ClosureResult(None)

    def __call__(self, *_: Any, **__: Any) -> Tensor | None:
        with torch.enable_grad():
            self._result = ClosureResult(self._compute())
        return self._result.loss

    def consume_result(self) -> ClosureResult:
        """Return the result."""
        return self._result


def compute_by(trainer: Any, compute: Callable[[], Tensor | None]) -> None:
    """Have Lightning's loop call this for each of its batches, in place of computing a loss and gradients of it."""

    def make_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> StepClosure:
        del kwargs, optimizer, batch_idx
        return StepClosure(compute)

    trainer.fit_loop.epoch_loop.automatic_optimization._make_closure = make_closure


def is_step_made(trainer: Any) -> bool:
    """Return whether the optimizer steps in the present batch of Lightning's loop."""
    return not trainer.fit_loop.epoch_loop._should_accumulate()


def begin_gradients(trainer: Any) -> None:
    """Tell who asks that the gradients are zeroed, which the run does."""
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    optimization._on_before_zero_grad(trainer.optimizers[0])
    optimization.optim_progress.optimizer.zero_grad.increment_completed()


def loss_of(trainer: Any, batch: Any, number: int, prepared: Callable[[Any], None]) -> Tensor:
    """Compute the loss of a batch, which is this ``number`` of its epoch; tell of it on the device before.

    Raises WrongUseError if there is none.
    """
    module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
    prepared(batch)
    kwargs = loop._build_kwargs(OrderedDict(), batch, number)
    output = call._call_strategy_hook(trainer, "training_step", *kwargs.values())
    loss = ClosureResult.from_training_step_output(output).closure_loss
    if loss is None:
        raise WrongUseError(
            "unicron_elastic.lightning: training_step returned None, and each batch of a step has a loss in place: "
            "return one that is 0 for a batch that is to count nothing"
        )
    return loss


def backward_of(trainer: Any, loss: Tensor, backward: Callable[[Tensor], None]) -> None:
    """Compute the gradients by this function, between the hooks that stand around."""
    module, precision = trainer.lightning_module, trainer.precision_plugin
    loss = precision.pre_backward(loss, module)
    backward(loss)
    precision.post_backward(loss, module)


def step_by(precision: Any, module: Any, optimizer: Any, closure: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
    """Compute, clip, and have the optimizer step: the loss is computed before, and not within its step."""
    loss = closure()
    precision._after_closure(module, optimizer)
    optimizer.step(**kwargs)
    return loss


def turns_behind(trainer: Any) -> int:
    """Return how many batches of the epoch Lightning's loop has counted."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)


def loader_given(trainer: Any) -> Any:
    """Return what the loop takes its batches from."""
    return trainer.fit_loop._combined_loader.iterables


def begin_in_epoch(trainer: Any, epoch: int, step: int) -> None:
    """Have Lightning's loop begin in this epoch, in which it counts ``step`` steps behind it, and restart nothing."""
    loop = trainer.fit_loop
    loop.restarting = False
    for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
        each._restart_stage = _NO_STAGE
        each._restarting = each._loaded_from_state_dict = each._resuming_from_checkpoint = False
    for counted in (loop.epoch_progress.current, loop.epoch_progress.total):
        _count(counted, epoch)
    optimizer = loop.epoch_loop.automatic_optimization.optim_progress.optimizer
    for counted in (optimizer.step.total, optimizer.zero_grad.total):
        _count(counted, step)


def place_in_epoch(trainer: Any, turns: int, steps: int, total: int) -> None:
    """Have the loop, which takes its first batch, have so many behind it, ``steps`` of the optimizer, of ``total``."""
    loop = trainer.fit_loop.epoch_loop
    optimizer = loop.automatic_optimization.optim_progress.optimizer
    _count(loop.batch_progress.current, turns)
    _count(loop.batch_progress.total, total)
    _count(optimizer.step.current, steps)
    _count(optimizer.zero_grad.current, steps)
    trainer.fit_loop._data_fetcher.fetched = turns


def count_by_others(trainer: Any, turns: int, total: int) -> None:
    """Have a loop that begins from a checkpoint of other ranks count batches as it does here."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counted, number in ((progress.current, turns), (progress.total, total)):
        more = number - counted.ready
        for name in _COUNTS:
            setattr(counted, name, max(0, getattr(counted, name) + more))


def _count(counted: Any, number: int) -> None:
    for name in _COUNTS:
        if hasattr(counted, name):
            setattr(counted, name, number)


class StepResults(_ResultCollection):  # type: ignore[misc]
    """`StepResults` note what each micro-batch logs, until all ranks know it."""

    def __init__(self, whole: Any) -> None:
        super().__init__(training=True)
        self.whole = whole  # what all ranks know
        self.noted = LoggedValues()
        self._index = 0

    def begin(self, index: int, batch: Any) -> None:
        """Begin a micro-batch."""
        self._index, self.batch, self.batch_size = index, batch, None

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Note a value. Raises WrongUseError for a metric, of which each rank would have another part."""
        way = self[key].meta
        if not isinstance(value, Tensor):
            raise WrongUseError(
                f"unicron_elastic.lightning: training_step logs {way.name} as a {type(value).__name__}, and each rank "
                "would have the part of its own batches: log its value for the batch"
            )
        weight = batch_size if way.is_mean_reduction else 1
        self.noted.note(key, self._index, Logged(float(value), int(weight)), _way(way))


def _way(meta: Any) -> dict[str, Any]:
    synced = {"is_synced": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only}
    return {name: getattr(meta, name) for name in _WAY} | {"reduce_fx": meta.reduce_fx.__name__, **synced}


@contextmanager
def results_noted(trainer: Any) -> Iterator[StepResults]:
    """Have what is logged meanwhile be noted."""
    loop = trainer.fit_loop.epoch_loop
    noted = loop._results = StepResults(loop._results)
    try:
        yield noted
    finally:
        loop._results = noted.whole


def _whole_results(trainer: Any) -> Any:
    """Return what all ranks know, also while a step is computed: ranks compare it there, and newcomers get it."""
    results = trainer.fit_loop.epoch_loop._results
    return results.whole if isinstance(results, StepResults) else results


def take_logged(trainer: Any, found: dict[str, dict[int, Logged]], ways: dict[str, dict[str, Any]]) -> None:
    """Have the loop have what all micro-batches of a step have logged, in their order."""
    results = trainer.fit_loop.epoch_loop._results
    device = trainer.strategy.root_device
    for key, values in found.items():
        if not values:
            continue
        if key not in results:
            results[key] = _metric(ways[key], trainer.strategy)
        metric = results[key]
        for _, logged in sorted(values.items()):
            results.update_metrics(key, torch.tensor(logged.value, device=device), logged.weight)
        if metric.meta.on_step:
            whole = of_step([each.value for each in values.values()], ways[key]["reduce_fx"])
            metric._forward_cache = torch.tensor(whole, device=device)
            if not metric.meta.on_epoch:
                metric.value = metric._forward_cache


def _metric(way: dict[str, Any], strategy: Any) -> _ResultMetric:
    """Return an empty one, as that which is made where a value is logged this way: Lightning compares them."""
    way = dict(way)
    is_synced, rank_zero_only = way.pop("is_synced"), way.pop("rank_zero_only")
    meta = _Metadata(**way)
    meta.sync = _Sync(_should=is_synced, fn=strategy.reduce, rank_zero_only=rank_zero_only)
    return _ResultMetric(meta, is_tensor=True).to(strategy.root_device)


def folders_of(trainer: Any) -> dict[str, Any]:
    """Return where this process would write: each finds a free name by itself."""
    folders = [getattr(each, "dirpath", None) for each in _checkpoints(trainer)]
    return {
        "checkpoints": [None if each is None else str(each) for each in folders],
        "loggers": [each.version for each in _versioned(trainer)],
    }


def take_folders(trainer: Any, folders: dict[str, Any]) -> None:
    """Have this process write there."""
    for each, folder in zip(_checkpoints(trainer), folders["checkpoints"], strict=True):
        each.dirpath = folder
    for each, name in zip(_versioned(trainer), folders["loggers"], strict=True):
        each._version = name


def loop_state(trainer: Any) -> dict[str, Any]:
    """Return what Lightning's loop and its callbacks have, but for where they write."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    callbacks = {each.state_key: state for each in trainer.callbacks if (state := _callback_state(each))}
    data = trainer.datamodule.state_dict() if trainer.datamodule is not None else {}
    return {
        "stepped": loop._batches_that_stepped,
        "schedulers": loop.scheduler_progress.state_dict(),
        "callbacks": callbacks,
        "checkpoints": [_checkpoint_state(each) for each in _checkpoints(trainer)],
        "data": data,
        "metrics": {name: dict(getattr(connector, name)) for name in _OF_CONNECTOR},
        "results": {key: _metric_state(each) for key, each in _whole_results(trainer).items() if each.is_tensor},
        "stop": bool(trainer.should_stop),
    }


def take_loop_state(trainer: Any, state: dict[str, Any]) -> None:
    """Take over what another rank's ``loop_state`` returned."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    loop._batches_that_stepped = state["stepped"]
    loop.scheduler_progress.load_state_dict(state["schedulers"])
    for each, kept in zip(_checkpoints(trainer), state["checkpoints"], strict=True):
        for name, value in kept.items():
            setattr(each, name, value)
    for each in trainer.callbacks:
        if each.state_key in state["callbacks"]:
            each.load_state_dict(_with_folder(each, state["callbacks"][each.state_key]))
    if state["data"]:
        trainer.datamodule.load_state_dict(state["data"])
    for name in _OF_CONNECTOR:
        setattr(connector, name, dict(state["metrics"][name]))
    results = _whole_results(trainer)
    results.clear()
    for key, kept in state["results"].items():
        metric = results[key] = _metric(kept["way"], trainer.strategy)
        for name, value in kept["values"].items():
            setattr(metric, name, value)
        metric._computed, metric._update_count = None, 1
    trainer.should_stop = state["stop"]


def _checkpoints(trainer: Any) -> list[Any]:
    return [each for each in trainer.callbacks if isinstance(each, Checkpoint)]


def _checkpoint_state(callback: Any) -> dict[str, Any]:
    return {name: getattr(callback, name) for name in _OF_CHECKPOINTS if hasattr(callback, name)}


def _callback_state(callback: Any) -> dict[str, Any]:
    state = dict(callback.state_dict())
    if isinstance(callback, Checkpoint):
        state.pop("dirpath", None)
    return state


def _with_folder(callback: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state for this callback, which takes over what it found best if it writes to the same folder."""
    return {**state, "dirpath": callback.dirpath} if hasattr(callback, "dirpath") else state


def _versioned(trainer: Any) -> list[Any]:
    return [each for each in trainer.loggers if isinstance(each, CSVLogger | TensorBoardLogger)]


def _metric_state(metric: Any) -> dict[str, Any]:
    names = ("value", "cumulated_batch_size", "_forward_cache", "has_reset")
    return {
        "way": _way(metric.meta),
        "values": {name: getattr(metric, name) for name in names if hasattr(metric, name)},
    }
