"""A state is not used that trains what DistributedDataParallel, as the script has built it, does not reduce."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unicron_elastic import Run
from unicron_elastic.compat.groups import fake_store
from unicron_elastic.training.snapshot.manager import _refusals

pytestmark = pytest.mark.usefixtures("no_launcher")

BEHIND = "build it behind run.restore(), for which Run takes the model itself"
BUILT = f"and DistributedDataParallel was built for what this rank trains: {BEHIND}"
UNFROZEN = f"there the script trains 2 parameters (0.weight, 0.bias) that this rank has frozen, {BUILT}"
FROZEN = (
    f"there the script has frozen 2 parameters (0.weight, 0.bias) that this rank trains, {BUILT}, or with "
    "find_unused_parameters=True"
)


@pytest.fixture
def of_two() -> None:
    """A group of two ranks, of which the other one is not there."""
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=2)


@pytest.fixture
def alone() -> None:
    """A group of this rank alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def made(*, is_frozen: bool) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    model[0].requires_grad_(not is_frozen)
    return model


def state(*, is_frozen: bool) -> dict[str, Any]:
    return Run(model=made(is_frozen=is_frozen)).state_dict()


def reduced(wrapped: DistributedDataParallel) -> int:
    buckets = wrapped.reducer._get_zeros_like_grad_buckets()
    return sum(len(bucket.parameters()) for bucket in buckets)


@pytest.mark.usefixtures("of_two")
@pytest.mark.parametrize("is_bare", [False, True])
def test_what_was_built_without_the_trained_is_told(is_bare: bool) -> None:
    model = made(is_frozen=True)
    wrapped = DistributedDataParallel(model)
    run = Run(model=model if is_bare else wrapped)
    assert run.why_not(state(is_frozen=False)) == UNFROZEN
    assert run.why_not(state(is_frozen=True)) == ""
    assert not model[0].weight.requires_grad


class OwnParallel(DistributedDataParallel):
    """`OwnParallel` is a script's own."""


@pytest.mark.usefixtures("of_two")
def test_one_of_the_scripts_own_counts_too() -> None:
    model = made(is_frozen=True)
    OwnParallel(model)
    assert Run(model=model).why_not(state(is_frozen=False)) == ""
    wrapped = OwnParallel(model)
    assert Run(model=wrapped).why_not(state(is_frozen=False)) == UNFROZEN


@pytest.mark.usefixtures("of_two")
def test_what_is_built_behind_is_right() -> None:
    model = made(is_frozen=True)
    run = Run(model=model)
    unfrozen = state(is_frozen=False)
    assert run.why_not(unfrozen) == ""
    run.load_state_dict(unfrozen)
    assert reduced(DistributedDataParallel(model)) == 4


@pytest.mark.usefixtures("of_two")
@pytest.mark.parametrize("how", ["find_unused_parameters", "static_graph"])
def test_what_finds_the_unused_was_not_built_for_the_unfrozen_either(how: str) -> None:
    wrapped = DistributedDataParallel(made(is_frozen=True), **{how: True})
    assert Run(model=wrapped).why_not(state(is_frozen=False)) == UNFROZEN


@pytest.mark.usefixtures("of_two")
def test_what_was_frozen_behind_it_is_reduced_when_it_is_trained_again() -> None:
    model = made(is_frozen=False)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    model[0].requires_grad_(False)
    assert Run(model=wrapped).why_not(state(is_frozen=False)) == ""


@pytest.mark.usefixtures("alone")
def test_a_rank_alone_trains_what_nobody_reduces() -> None:
    wrapped = DistributedDataParallel(made(is_frozen=True))
    assert Run(model=wrapped).why_not(state(is_frozen=False)) == ""


def train(wrapped: DistributedDataParallel) -> None:
    """Makes the passes of three steps."""
    for _ in range(3):
        wrapped(torch.ones(2, 3)).sum().backward()


@pytest.mark.usefixtures("alone")
def test_what_was_built_with_the_frozen_is_told_and_would_wait_for_them() -> None:
    wrapped = DistributedDataParallel(made(is_frozen=False))
    run = Run(model=wrapped)
    frozen = state(is_frozen=True)
    assert run.why_not(frozen) == FROZEN
    train(wrapped)  # it has made its buckets anew
    assert run.why_not(frozen) == FROZEN
    run.load_state_dict(frozen)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        train(wrapped)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("how", ["find_unused_parameters", "static_graph"])
def test_what_finds_the_unused_does_without_the_frozen(how: str) -> None:
    model = made(is_frozen=False)
    wrapped = DistributedDataParallel(model, **{how: True})
    run = Run(model=wrapped)
    frozen = state(is_frozen=True)
    assert run.why_not(frozen) == ""
    run.load_state_dict(frozen)
    train(wrapped)
    assert model[0].weight.grad is None


@pytest.mark.usefixtures("of_two")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_it_ignores_it_is_not_asked_about(is_frozen: bool) -> None:
    model = made(is_frozen=is_frozen)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    wrapped = DistributedDataParallel(model)
    assert Run(model=wrapped).why_not(state(is_frozen=not is_frozen)) == ""


@pytest.mark.usefixtures("of_two")
def test_of_some_layers_those_are_named_that_are_wrong() -> None:
    model = made(is_frozen=True)
    wrapped = DistributedDataParallel(model[0].requires_grad_(True))
    model[1].requires_grad_(False)
    unlike = Run(model=made(is_frozen=True)).state_dict()
    assert Run(model=model).why_not(unlike) == FROZEN, "the other layer is in no reducer"
    assert reduced(wrapped) == 2


@pytest.mark.usefixtures("of_two")
def test_both_are_told_in_one_sentence() -> None:
    model = made(is_frozen=True)
    wrapped = DistributedDataParallel(model)
    other = made(is_frozen=False)
    other[1].requires_grad_(False)
    assert Run(model=wrapped).why_not(Run(model=other).state_dict()) == (
        "there the script trains 2 parameters (0.weight, 0.bias) that this rank has frozen and has frozen 2 parameters "
        f"(1.weight, 1.bias) that this rank trains, {BUILT}"
    )


@pytest.mark.usefixtures("of_two")
def test_what_the_script_has_dropped_does_not_count() -> None:
    model = made(is_frozen=True)
    wrapped = DistributedDataParallel(model)
    wrapped.itself = [wrapped]  # type: ignore[assignment]  # so that it is there until somebody collects it
    run = Run(model=wrapped)
    assert run.why_not(state(is_frozen=False)) == UNFROZEN
    del wrapped
    assert run.why_not(state(is_frozen=False)) == ""


@pytest.mark.usefixtures("of_two")
def test_one_around_another_model_does_not_count() -> None:
    other = DistributedDataParallel(made(is_frozen=True))
    assert Run(model=made(is_frozen=True)).why_not(state(is_frozen=False)) == ""
    assert reduced(other) == 2


def without(part: str) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state["way"] = {"trained": state["way"]["model"]["trained"], "optimizers": []} if part == "model" else {}

    return change


@pytest.mark.usefixtures("of_two")
@pytest.mark.parametrize("change", [without("model"), without("all"), lambda state: state.pop("way")])
def test_where_it_is_left_to_the_script_what_is_trained_nothing_is_refused(change: Any) -> None:
    wrapped = DistributedDataParallel(made(is_frozen=True))
    unfrozen = state(is_frozen=False)
    change(unfrozen)
    assert Run(model=wrapped).why_not(unfrozen) == ""


@pytest.mark.usefixtures("alone")
def test_what_was_written_is_used(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = Run(model=DistributedDataParallel(made(is_frozen=True)))
    run.save(tmp_path, 3)
    run.wait_saved()
    wrapped = DistributedDataParallel(made(is_frozen=False))
    assert Run(model=wrapped).restore(tmp_path) == 3
    assert "leaves it to the script which parameters are trained" in capfd.readouterr().err


@pytest.mark.usefixtures("of_two")
def test_the_state_of_another_model_says_so_itself() -> None:
    wrapped = DistributedDataParallel(made(is_frozen=True))
    run = Run(model=wrapped)
    larger = Run(model=nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)))).state_dict()
    assert run.why_not(larger) == ""
    with pytest.raises(RuntimeError, match="Error"):
        run.load_state_dict(larger)


def test_each_reason_is_said_once() -> None:
    refused = [(16, ["old", "old"]), (12, ["old", ""]), (12, ["old", ""]), (8, ["", "new"]), (4, ["", ""])]
    assert _refusals(refused) == [
        "Rank 0: the states of steps 16 and 12 cannot be used: old.",
        "Rank 1: the state of step 16 cannot be used: old.",
        "Rank 1: the state of step 8 cannot be used: new.",
    ]
    assert _refusals([(16, ["old", "old"]), (12, ["old", "old"])]) == [
        "Ranks 0 and 1: the states of steps 16 and 12 cannot be used: old."
    ]
