from __future__ import annotations

import pytest

from unicron_elastic.transformers.refusal import (
    ArgumentFacts,
    TrainerFacts,
    refusal_of_arguments,
    refusal_of_trainer,
    refused,
)


def test_what_everybody_has_is_not_refused() -> None:
    assert refusal_of_arguments(ArgumentFacts()) == ""
    assert refusal_of_trainer(TrainerFacts(bases=("SFTTrainer", "Trainer"), ranks=8)) == ""


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (TrainerFacts(bases=("GRPOTrainer", "Trainer")), "GRPOTrainer learns from what is gathered"),
        (TrainerFacts(kind="Mine", overrides=("_run_epoch",)), "Mine has a _run_epoch of its own"),
        (TrainerFacts(is_search=True), "search of hyperparameters"),
        (TrainerFacts(has_trained=True), "launch once for each training"),
        (TrainerFacts(has_index=False), "can only be iterated"),
        (TrainerFacts(wrapped_in="DataParallel"), "wrapped in DataParallel already"),
        (TrainerFacts(is_divided=True), "divided among devices"),
        (TrainerFacts(mixed_precision="fp16"), "fp16 needs a gradient scaler"),
        (TrainerFacts(mixed_precision="fp8"), "fp8 needs a gradient scaler"),
        (TrainerFacts(is_compiled=True), "torch_compile"),
        (TrainerFacts(optimizer="adalomo"), "optim=adalomo steps within the backward pass"),
        (TrainerFacts(optimizer="galore_adamw_layerwise"), "within the backward pass"),
        (TrainerFacts(sampling="batch_rebalance"), "train_sampling_strategy=batch_rebalance"),
        (TrainerFacts(splits_batches=True), "split_batches"),
        (TrainerFacts(dispatches_batches=True), "dispatch_batches"),
        (TrainerFacts(finds_batch_size=True), "auto_find_batch_size"),
        (TrainerFacts(skips_no_data=True), "ignore_data_skip"),
        (TrainerFacts(ranks=2, averages_tokens=False), "average_tokens_across_devices=False"),
    ],
    ids=lambda each: None if isinstance(each, TrainerFacts) else each,
)
def test_what_is_refused_is_named(facts: TrainerFacts, words: str) -> None:
    assert words in refusal_of_trainer(facts)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp", "parallelism_config"])
def test_arguments_that_divide_the_model_are_refused(name: str) -> None:
    facts = ArgumentFacts(name == "deepspeed", name == "fsdp", name == "parallelism_config")
    assert name in refusal_of_arguments(facts)


def test_the_sentence_names_the_trainer() -> None:
    assert refused("SFTTrainer", "why") == "unicron_elastic.transformers: this SFTTrainer cannot go on in place: why"
