from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from unicron_elastic.lightning.refusal_of_options import (
    CALLBACKS,
    HOOKS,
    LoaderOptions,
    TrainerOptions,
    refusal_of_loader_options,
    refusal_of_options,
    refused,
)


def test_what_everybody_has_is_not_refused() -> None:
    assert refusal_of_options(TrainerOptions(callbacks=("ModelCheckpoint", "Checkpoint", "Callback"))) == ""
    assert refusal_of_loader_options(LoaderOptions()) == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (TrainerOptions(has_fitted=True), "launch once for each training"),
        (TrainerOptions(is_automatic=False), "automatic_optimization is False"),
        (TrainerOptions(takes_iterator=True), "takes dataloader_iter"),
        (TrainerOptions(overfits=True), "overfit_batches"),
        (TrainerOptions(reloads=True), "reload_dataloaders_every_n_epochs"),
        (TrainerOptions(validates_by_clock=True), "val_check_interval is a time"),
        (TrainerOptions(is_compiled=True), "leave torch.compile out"),
        (TrainerOptions(wrapped_in="DataParallel"), "DataParallel is in the module already"),
        (TrainerOptions(precision="16-mixed"), "precision 16-mixed needs a gradient scaler"),
        (TrainerOptions(optimizers=2), "gave 2 optimizers"),
        (TrainerOptions(optimizers=0), "gave 0 optimizers"),
        (TrainerOptions(needs_closure="LBFGS"), "LBFGS computes the loss several times"),
        (TrainerOptions(syncs_batchnorm=True), "sync_batchnorm"),
        *((TrainerOptions(hooks=(name,)), f"has a {name}() of its own") for name in HOOKS),
        *((TrainerOptions(callbacks=("Mine", name)), f"{name} {why}") for name, why in CALLBACKS.items()),
    ],
)
def test_what_is_refused_is_named(options: TrainerOptions, words: str) -> None:
    assert words in refusal_of_options(options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (LoaderOptions(is_second=True), "several training data loaders"),
        (LoaderOptions(kind="Mine", is_plain=False), "come from a Mine"),
        (LoaderOptions(has_index=False), "can only be iterated"),
        (LoaderOptions(has_batches=False), "batch_size=None"),
        (LoaderOptions(kind="Mine", is_iterated_otherwise=True), "a Mine changes batches"),
        (LoaderOptions(batches=0), "no batch"),
    ],
)
def test_loaders_that_are_no_table_are_refused(options: LoaderOptions, words: str) -> None:
    assert words in refusal_of_loader_options(options)


@pytest.mark.parametrize("of", [refusal_of_options, refusal_of_loader_options])
def test_each_is_one_sentence(of: Callable[[Any], str]) -> None:
    wrong = TrainerOptions(is_automatic=False) if of is refusal_of_options else LoaderOptions(has_index=False)
    sentence = refused(of(wrong))
    assert sentence.startswith("unicron_elastic.lightning: this Trainer cannot go on in place: ")
    assert not sentence.endswith(".")
