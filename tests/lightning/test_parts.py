from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from small_module import Seen, SmallModule, loader, trainer_of
from torch import nn
from torch.utils.data import DataLoader

from unicron_elastic.lightning import parts
from unicron_elastic.lightning.logged_values import Logged
from unicron_elastic.lightning.parts import begin_as_first, loader_options, missing_parts, trainer_options
from unicron_elastic.lightning.refusal_of_options import LoaderOptions, TrainerOptions


def fitted(folder: Path) -> pl.Trainer:
    """Return a plain Trainer behind one step."""
    trainer = trainer_of(folder, Seen(), accumulate=2, ranks=None, max_steps=1, limit_val_batches=0)
    trainer.fit(SmallModule(), loader())
    return trainer


def test_this_version_has_all_that_is_used(tmp_path: Path) -> None:
    assert missing_parts() == ""
    assert missing_parts(trainer_of(tmp_path, Seen(), accumulate=1, ranks=None)) == ""


def test_what_has_other_arguments_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_TrainingEpochLoop, "_build_kwargs", lambda self, kwargs, batch: None)  # noqa: ARG005
    assert missing_parts() == "the argument batch_idx of _TrainingEpochLoop._build_kwargs"


def test_what_a_trainer_has_not_is_missing(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Seen(), accumulate=1, ranks=None)
    del trainer.fit_loop.epoch_loop._batches_that_stepped
    assert missing_parts(trainer) == "fit_loop.epoch_loop._batches_that_stepped"


def test_a_plain_trainer_has_nothing_to_refuse(tmp_path: Path) -> None:
    options = trainer_options(fitted(tmp_path), has_fitted=False)
    assert options == TrainerOptions(callbacks=options.callbacks)
    assert "Seen" in options.callbacks


def test_loaders_are_read() -> None:
    assert loader_options(DataLoader([1, 2, 3], 2), is_second=False) == LoaderOptions(batches=2)
    assert not loader_options([1], is_second=False).is_plain


def test_who_becomes_the_first_adds_to_the_log_that_there_is(tmp_path: Path) -> None:
    trainer = fitted(tmp_path)
    before = Path(trainer.logger.log_dir, "metrics.csv").read_text()  # type: ignore[union-attr,arg-type]
    logger = trainer.loggers[0] = CSVLogger(tmp_path, version=0)
    begin_as_first(trainer)
    logger.log_metrics({"loss_step": 1.0}, step=7)
    logger.save()
    found = Path(logger.log_dir, "metrics.csv").read_text()
    assert found.startswith(before)
    assert len(found.splitlines()) == len(before.splitlines()) + 1


def test_state_comes_back_as_it_was_and_hooks_log_on(tmp_path: Path) -> None:
    trainer = fitted(tmp_path)
    way: dict[str, Any] = {
        **dict.fromkeys(("prog_bar", "enable_graph", "is_synced", "rank_zero_only"), False),
        **dict.fromkeys(("logger", "on_step", "on_epoch", "add_dataloader_idx"), True),
        "fx": "training_step",
        "name": "x",
        "dataloader_idx": None,
        "metric_attribute": None,
        "reduce_fx": "mean",
    }
    logged = {"training_step.x": {1: Logged(4.0, 1), 0: Logged(1.0, 2)}}
    parts.take_logged(trainer, logged, {"training_step.x": way})
    state = parts.loop_state(trainer)
    results = trainer.fit_loop.epoch_loop._results
    results.clear()
    parts.take_loop_state(trainer, state)
    metric = results["training_step.x"]
    assert (float(metric.compute()), float(metric._forward_cache)) == (2.0, 2.5)  # of samples, and of batches
    results.log("training_step", "x", torch.tensor(9.0), on_step=True, sync_dist_fn=trainer.strategy.reduce)
    assert float(metric.value) == 2 * 1.0 + 4.0 + 9.0


def test_metrics_of_a_module_gather_nothing() -> None:
    from torchmetrics import MeanMetric

    module = nn.ModuleDict({"mean": MeanMetric()})
    parts.measure_alone(module)
    assert not module["mean"].distributed_available_fn()
