"""What a script changed on its way is there again when all begin again behind it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unicron_elastic import Run
from unicron_elastic.state.layout import Layout, flatten, rebuild
from unicron_elastic.training.group.handover import Handover, NotTakenError
from unicron_elastic.training.snapshot import manager

pytestmark = pytest.mark.usefixtures("no_launcher")


class Tempered(nn.Linear):
    """A layer with a plain value of the script's own."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.tau = 1.0


def made() -> tuple[nn.Sequential, torch.optim.Optimizer, Run]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), Tempered())
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), 0.1, momentum=0.9)
    return model, optimizer, Run(model=model, optimizer=optimizer)


def train(folder: Path | None = None) -> Any:
    """Trains three steps of four; returns what a snapshot after them has."""
    model, optimizer, run = made()
    for step in run.steps(4, 1):
        if step.number == 3:
            if folder is not None:
                run.save(folder, 3)
                run.wait_saved()
            layout, tensors = flatten(run.state_dict())
            state = rebuild(Layout.parse(layout.to_json()), [each.clone() for each in tensors])
        for _ in step:
            step.backward(model(torch.ones(4, 3)).sum())
        optimizer.step()
        model[2].tau *= 0.5
        if step.number == 1:
            model[1].p = 0.25
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    return state


def groups(optimizer: torch.optim.Optimizer) -> list[tuple[int, float]]:
    return [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]


def test_a_restart_from_memory_has_all_of_it() -> None:
    model, optimizer, run = made()
    run.load_state_dict(train())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert (model[1].p, model[2].tau) == (0.25, 0.125)
    assert groups(optimizer) == [(2, 0.1), (2, 0.01)]
    assert len(optimizer.state) == 4
    assert run.step == 3


def test_what_was_written_has_the_groups_of_optimizers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path)
    capfd.readouterr()
    model, optimizer, run = made()
    assert run.restore(tmp_path) == 3
    assert groups(optimizer) == [(2, 0.1), (2, 0.01)]
    assert not model[0].weight.requires_grad, "another script may read it, which trains what it likes"
    assert model[1].p == 0.5
    assert "trains 2 parameters (0.weight, 0.bias) that this rank has frozen.\n" in capfd.readouterr().err


def test_groups_of_another_kind_are_no_continuation(tmp_path: Path) -> None:
    train(tmp_path)
    model, _, _ = made()
    optimizer = torch.optim.SGD([{"params": [each]} for each in model[2].parameters()], 0.1, momentum=0.9)
    with pytest.raises(ValueError, match="parameter group"):
        Run(model=model, optimizer=optimizer).restore(tmp_path)


def of_groups(count: int) -> tuple[Handover, torch.optim.Optimizer]:
    """Return what is handed over of a run whose optimizer has so many groups, and that optimizer."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD([model.weight], 0.1)
    for _ in range(count - 1):
        optimizer.add_param_group({"params": [model.bias]})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step] * count)
    return Run(model=model, optimizer=optimizer, scheduler=scheduler)._engine._registered, optimizer


def test_a_newcomer_without_a_function_for_each_group_is_told_before_it_joins() -> None:
    state = of_groups(2)[0].state_dict()
    with pytest.raises(NotTakenError, match=r"LambdaLR has 1 function for 2 groups"):
        of_groups(1)[0].load_state_dict(state)
    of_groups(2)[0].load_state_dict(state)


def test_a_newcomer_may_join_in_the_step_in_which_a_group_and_its_function_are_added() -> None:
    state = {**of_groups(2)[0].state_dict(), "yielded_groups": [1]}
    newcomer, optimizer = of_groups(1)
    newcomer.load_state_dict(state)
    newcomer.rewind()
    assert len(optimizer.param_groups) == 1, "its script adds the other"


def test_a_loop_of_the_script_s_own_has_it_too_but_for_modes_of_an_evaluation_and_is_told(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def begun() -> tuple[nn.Sequential, torch.optim.Optimizer, Run]:
        model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.SGD([model[0].weight], 0.1)
        return model, optimizer, Run(model=model, optimizer=optimizer)

    model, optimizer, run = begun()
    model[0].bias.requires_grad_(True)
    optimizer.add_param_group({"params": [model[0].bias], "lr": 0.01})
    model[1].p = 0.25
    model.eval()
    run.snapshot(3)
    state = run.state_dict()
    model, optimizer, run = begun()
    run.load_state_dict(state)
    assert model[0].bias.requires_grad
    assert model[1].p == 0.25
    assert groups(optimizer) == [(1, 0.1), (1, 0.01)]
    assert model.training, "it may have been kept in an evaluation"
    assert "trains 1 parameter (0.bias) that this rank has frozen: so does this one now.\n" in capfd.readouterr().err


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_a_loop_of_the_script_s_own_has_the_modes_of_its_training(
    is_evaluated: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """As of a BatchNorm that is put into evaluation mode on the way, and of one that no longer is."""

    def begun() -> tuple[nn.Sequential, Run]:
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Dropout(0.5))
        model[1].eval()
        return model, Run(model=model)

    model, run = begun()
    model[1].train()
    model[2].eval()
    if is_evaluated:
        model.eval()
    state = run.state_dict()
    model, run = begun()
    run.load_state_dict(state)
    modes = [each.training for each in model]
    assert modes == ([True, False, True, True] if is_evaluated else [True, True, False, True])
    assert model.training
    said = capfd.readouterr().err
    if is_evaluated:
        assert said == ""
    else:
        assert (
            "has 1 module (1) in training mode that this rank has in evaluation mode and has 1 module (2) in "
            "evaluation mode that this rank has in training mode: so does this one now.\n"
        ) in said


def test_a_state_that_was_kept_without_modes_leaves_them_alone(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    run = Run(model=model)
    state = run.state_dict()
    del state["way"]["is_in_steps"], state["way"]["model"]["in_training"]
    model[1].eval()
    run.load_state_dict(state)
    assert not model[1].training
    assert capfd.readouterr().err == ""


def test_a_module_beside_the_model_is_trained_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    """As the second network of a GAN, whose layers a script freezes on its way."""

    def begun() -> tuple[nn.Sequential, Run]:
        model, other = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
        return other, Run(model=model, optimizer=optimizer, other=other)

    other, run = begun()
    other[0].weight.requires_grad_(False)
    other[1].eval()
    run.snapshot(3)
    state = run.state_dict()
    other, run = begun()
    run.load_state_dict(state)
    assert [each.requires_grad for each in other.parameters()] == [False, True, True, True]
    assert [each.training for each in other] == [True, False, True]
    said = capfd.readouterr().err
    assert "has frozen 1 parameter (other.0.weight) that this rank trains" in said
    assert "has 1 module (other.1) in evaluation mode that this rank has in training mode: so does this one now" in said


def test_a_newcomer_has_the_modes_of_a_module_beside_the_model() -> None:
    def begun() -> tuple[nn.Sequential, Handover]:
        model, other = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        run = Run(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), other=other)
        return other, run._engine._registered

    other, given = begun()
    other[1].eval()
    other[0].bias.requires_grad_(False)
    newcomer, taking = begun()
    taking.load_state_dict(given.state_dict())
    assert [each.training for each in newcomer] == [True, False]
    assert [each.requires_grad for each in newcomer.parameters()] == [True, False]


def test_a_newcomer_takes_over_an_average_that_was_made_for_inference() -> None:
    def begun() -> tuple[nn.Module, Handover]:
        model = nn.Linear(2, 2)
        with torch.inference_mode():
            average = copy.deepcopy(model)
        run = Run(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), average=average)
        return average, run._engine._registered

    (one, given), (other, taking) = begun(), begun()
    taking.load_state_dict(given.state_dict())
    assert torch.equal(one.weight, other.weight)


def test_a_module_in_an_evaluation_is_left_in_its_mode_and_one_of_another_kind_alone() -> None:
    def begun(*layers: nn.Module) -> tuple[nn.Sequential, Run]:
        model, other = nn.Linear(2, 2), nn.Sequential(*layers)
        return other, Run(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), other=other)

    other, run = begun(nn.Linear(2, 2), nn.Dropout(0.5))
    other.eval()
    way = run.state_dict()["way"]
    other, run = begun(nn.Linear(2, 2), nn.Dropout(0.5))
    run._engine.take_way(way)
    assert other.training
    other[0].weight.requires_grad_(False)
    way = run.state_dict()["way"]
    other, run = begun(nn.Dropout(0.5))
    run._engine.take_way(way)


@pytest.mark.parametrize("is_of_steps", [False, True])
def test_who_reads_of_a_loop_what_rank_0_has_written_says_so(is_of_steps: bool) -> None:
    _, _, run = made()
    state: dict[str, Any] = {"random": {}} if is_of_steps else {"random": {}, "epochs": {}}
    told = run._snapshots._lacks(manager._Loaded(state, "storage", None), 3, rank=1)
    assert told.startswith(
        "" if is_of_steps else "storage has what rank 0 had alone: its own random numbers begin again"
    )
    assert bool(told) is not is_of_steps
