"""Gradients that are accumulated over iterations are in the snapshots between two optimizer steps, and in no others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from unicron_elastic.training.run import Run
from unicron_elastic.training.snapshot.accumulated import AccumulatedGradients

pytestmark = pytest.mark.usefixtures("no_launcher")

EACH = 3  # iterations for an optimizer step
Wrap = Callable[[nn.Module], nn.Module]


class Script:
    """`Script` accumulates the gradients of some iterations for each optimizer step."""

    def __init__(self, wrap: Wrap = lambda model: model, kind: Any = torch.optim.AdamW, **zero: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.wrapped = wrap(self.model)
        self.optimizer = kind(self.wrapped.parameters(), 0.01)
        self.run = Run(model=self.wrapped, optimizer=self.optimizer)
        self._zero = zero
        self.kept: dict[int, Any] = {}

    def train(self, start: int, until: int) -> None:
        """Keeps the state at the end of each iteration."""
        for number in range(start, until):
            numbers = torch.Generator().manual_seed(number)
            self.wrapped(torch.randn(5, 4, generator=numbers)).pow(2).mean().backward()
            if number % EACH == EACH - 1:
                self.optimizer.step()
                self.optimizer.zero_grad(**self._zero)
            self.kept[number + 1] = copy.deepcopy(self.run.state_dict())

    def weights(self) -> list[list[float]]:
        return [each.flatten().tolist() for each in self.model.parameters()]


@pytest.fixture
def alone(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)


WRAPS: dict[str, Wrap] = {
    "bare": lambda model: model,
    "DDP": DistributedDataParallel,
    "DDP, views": lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("zero", [{}, {"set_to_none": False}])
@pytest.mark.parametrize("kind", WRAPS)
def test_a_script_goes_on_from_each_iteration_to_the_same_bits(kind: str, zero: dict[str, Any]) -> None:
    whole = Script(WRAPS[kind], **zero)
    whole.train(0, 3 * EACH)
    for start in range(1, 2 * EACH):
        again = Script(WRAPS[kind], **zero)
        again.run.load_state_dict(whole.kept[start])
        again.train(start, 3 * EACH)
        assert again.weights() == whole.weights(), start
        for at in range(start + 1, 3 * EACH):
            assert again.kept[at]["gradients"].keys() == whole.kept[at]["gradients"].keys(), (start, at)
    is_zeroed = bool(zero)  # then they are there, and zeros are not the same as none
    assert [bool(each["gradients"]) for each in whole.kept.values()] == [True, True, is_zeroed] * 3


def test_a_state_behind_a_step_has_none_where_others_are_made_for_each_step() -> None:
    script = Script()
    for number in range(3):
        script.optimizer.zero_grad()
        script.wrapped(torch.ones(5, 4)).sum().backward()
        assert len(script.run.state_dict()["gradients"]) == 4, "no step yet, or changed since the last one"
        script.optimizer.step()
        count = 4 if number == 0 else 0  # whether they are reset is not known before
        assert len(script.run.state_dict()["gradients"]) == count, number
        assert len(script.run.state_dict()["gradients"]) == count, "though it is asked twice"


def test_those_of_an_optimizer_that_has_used_its_own_are_not_kept_beside_another_s() -> None:
    """As with two networks, of which one is trained in each second iteration."""
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    first, second = torch.optim.SGD(one.parameters(), 0.1), torch.optim.SGD(other.parameters(), 0.1)
    run = Run(model=one, optimizer=first, other=other, second=second)
    for _ in range(2):
        first.zero_grad()
        (one(torch.ones(3)) + other(torch.ones(3))).sum().backward()
        first.step()
    kept = run.state_dict()["gradients"]
    assert sorted(kept) == [2, 3]
    assert torch.equal(kept[2], torch.full((2, 3), 2.0))


class Heads:
    """`Heads` trains another of many heads in each iteration, and what comes behind the step is the script's."""

    def __init__(self, reset: Callable[[torch.optim.Optimizer, int], None], *, window: int) -> None:
        torch.manual_seed(5)
        self.trunk = nn.Linear(3, 3)
        self.heads = nn.ModuleList(nn.Linear(3, 1) for _ in range(12))
        self.trunk.requires_grad_(window == 1)
        self.optimizer = torch.optim.SGD([*self.heads.parameters(), *self.trunk.parameters()], 0.1, momentum=0.9)
        self.run = Run(model=nn.ModuleList([self.trunk, self.heads]), optimizer=self.optimizer)
        self._reset, self._window = reset, window
        self.kept: dict[int, Any] = {}

    def train(self, start: int, until: int) -> list[list[float]]:
        """Keeps the state before each iteration, and returns the weights."""
        for number in range(start, until):
            self.kept[number] = copy.deepcopy(self.run.state_dict())
            if number % self._window == 0:
                self._reset(self.optimizer, number)
            self.heads[number * 7 % 12](self.trunk(torch.ones(2, 3) * number)).sum().backward()
            if number % self._window == self._window - 1:
                self.optimizer.step()
        return [each.flatten().tolist() for each in self.optimizer.param_groups[0]["params"]]


def _halve(optimizer: torch.optim.Optimizer, _number: int) -> None:
    for each in (each for group in optimizer.param_groups for each in group["params"]):
        if each.grad is not None:
            each.grad.mul_(0.5)


def _each_second_time(optimizer: torch.optim.Optimizer, number: int) -> None:
    if number % 4 == 0:
        optimizer.zero_grad()


RESETS: dict[str, Callable[[torch.optim.Optimizer, int], None]] = {
    "none": lambda optimizer, _: optimizer.zero_grad(),
    "zeros": lambda optimizer, _: optimizer.zero_grad(set_to_none=False),
    "halves": _halve,
    "each second time": _each_second_time,
}


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("reset", RESETS)
def test_wherever_a_script_of_many_heads_goes_on_it_comes_to_the_same_bits(reset: str, window: int) -> None:
    whole = Heads(RESETS[reset], window=window)
    weights = whole.train(0, 18)
    for start in range(18):
        again = Heads(RESETS[reset], window=window)
        again.run.load_state_dict(whole.kept[start])
        assert again.train(start, 18) == weights, start


def test_what_an_optimizer_alone_has_is_kept() -> None:
    more = nn.Parameter(torch.ones(3))
    run = Run(model=nn.Linear(2, 2), optimizer=torch.optim.SGD([more], 0.1))
    (more * 2).sum().backward()
    state = copy.deepcopy(run.state_dict())
    more.grad = None
    run.load_state_dict(state)
    assert more.grad is not None
    assert more.grad.tolist() == [2.0, 2.0, 2.0]


def test_gradients_of_few_rows_are_kept_as_these() -> None:
    def begun() -> tuple[nn.Embedding, torch.optim.Optimizer, Run]:
        table = nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), 0.1)
        return table, optimizer, Run(model=table, optimizer=optimizer)

    table, _, run = begun()
    table(torch.tensor([1, 4, 1])).sum().backward()
    state = copy.deepcopy(run.state_dict())
    assert state["gradients"][0]["indices"].tolist() == [[1, 4]]
    again, _, other = begun()
    other.load_state_dict(state)
    assert isinstance(again.weight.grad, Tensor)
    assert again.weight.grad.layout == torch.sparse_coo
    assert torch.equal(again.weight.grad.to_dense(), table.weight.grad.to_dense())  # type: ignore[union-attr]
    again(torch.tensor([4])).sum().backward()


def test_a_state_that_was_kept_without_them_is_taken() -> None:
    script = Script()
    script.train(0, 1)
    state = script.kept[1]
    del state["gradients"]
    script.run.load_state_dict(state)


def test_what_is_saved_has_none_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script()
    script.train(0, EACH)
    script.run.save(tmp_path, EACH)
    script.run.wait_saved()
    assert capsys.readouterr().err == ""
    script.train(EACH, EACH + 1)
    script.run.save(tmp_path, EACH + 1)
    script.run.wait_saved()
    assert "run.save() was called between two optimizer steps" in capsys.readouterr().err
    again = Script()
    assert again.run.restore(tmp_path) == EACH + 1
    assert all(each.grad is None for each in again.model.parameters())


def _kept_by(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of the snapshots that are made, as if somebody kept them."""
    kept: list[int] = []
    monkeypatch.setattr(run._snapshots, "snapshot", lambda step: kept.append(step) is None)
    return kept


def test_the_number_with_which_the_script_begins_is_not_kept_again_with_gradients_of_the_step_that_is_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts optimizer steps, and comes to all iterations of the next one again."""
    for before in (0, 2):
        script = Script()
        assert script.run.restore(tmp_path) == before
        kept = _kept_by(script.run, monkeypatch)
        assert script.run.snapshot(before), "the state with which it begins"
        for steps in (before, before + 1):
            for _ in range(EACH):
                script.model(torch.ones(5, 4)).sum().backward()
                assert script.run.snapshot(steps) == (steps > before)
            script.optimizer.step()
            script.optimizer.zero_grad()
        assert kept == [before, *EACH * [before + 1]]
        script.run.save(tmp_path, before + 2)
        script.run.wait_saved()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("policy", [{}, {"reduce_dtype": torch.float32, "param_dtype": torch.bfloat16}])
def test_while_fsdp2_has_some_that_are_not_reduced_nothing_is_kept_and_that_is_told_once(
    policy: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    sharded: Any = fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy))
    optimizer = torch.optim.SGD(sharded.parameters(), 0.1)
    run = Run(model=sharded, optimizer=optimizer)
    kept = _kept_by(run, monkeypatch)

    for number in range(3 * EACH):
        is_last = number % EACH == EACH - 1
        sharded.set_requires_gradient_sync(is_last)
        sharded(torch.ones(5, 4)).sum().backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        assert run.snapshot(number + 1) == is_last, number
    assert kept == [EACH, 2 * EACH, 3 * EACH]
    assert capsys.readouterr().err.count("no snapshot is made while FSDP has gradients that are not reduced") == 1
    run.save(tmp_path, 3 * EACH)
    run.wait_saved()
    assert capsys.readouterr().err == ""
    sharded.set_requires_gradient_sync(False)
    sharded(torch.ones(5, 4)).sum().backward()
    run.save(tmp_path, 3 * EACH)
    run.wait_saved()
    assert "run.save() was called between two optimizer steps" in capsys.readouterr().err


def test_a_gradient_of_another_shape_is_not_reduced_yet(capsys: pytest.CaptureFixture[str]) -> None:
    """As those that FSDP1 has behind ``no_sync()``."""
    layer = nn.Linear(2, 2)
    gradients = AccumulatedGradients([layer])
    layer.weight.grad = torch.ones(2, 2)
    assert gradients.can_be_kept()
    layer.weight.data = torch.ones(2)
    assert not gradients.can_be_kept()
    assert "while FSDP has gradients that are not reduced, as in no_sync()" in capsys.readouterr().err
