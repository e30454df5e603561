from __future__ import annotations

import pytest

from unicron_elastic.accelerate.accelerator_facts import AcceleratorFacts, refusal_of_accelerator, refused


def test_what_everybody_has_is_not_refused() -> None:
    assert refusal_of_accelerator(AcceleratorFacts()) == ""
    assert refusal_of_accelerator(AcceleratorFacts(mixed_precision="bf16")) == ""


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (AcceleratorFacts(has_begun=True), "are there already, with a process group of their own"),
        (AcceleratorFacts(divided_by="FSDP"), "FSDP divides the model among ranks"),
        (AcceleratorFacts(mixed_precision="fp16"), "fp16 needs a gradient scaler"),
        (AcceleratorFacts(dynamo="INDUCTOR"), "the dynamo backend INDUCTOR wraps the model"),
        (AcceleratorFacts(splits_batches=True), "with split_batches a batch is not one rank's"),
        (AcceleratorFacts(dispatches_batches=True), "with dispatch_batches a batch is not one rank's"),
    ],
    ids=lambda each: None if isinstance(each, AcceleratorFacts) else each,
)
def test_what_is_refused_is_named(facts: AcceleratorFacts, words: str) -> None:
    assert words in refusal_of_accelerator(facts)


def test_the_sentence_names_the_accelerator() -> None:
    assert refused("why") == "unicron_elastic.accelerate: this Accelerator cannot go on in place: why"
