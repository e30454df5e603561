"""Buffers of a model in a run: what is saved of them, and what they are after a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from unicron_elastic import Run
from unicron_elastic.training.step.buffers import Buffers, take

MICRO_BATCHES = 2


pytestmark = pytest.mark.usefixtures("no_launcher")


def batch(step: int, index: int) -> torch.Tensor:
    """(4, 3), of step and index alone."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + index))


class Training:
    """A small model, with batch norm if nothing else is said, that a run trains."""

    def __init__(self, *layers: nn.Module, reproducible: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), *(layers or [nn.BatchNorm1d(3)]), nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.run = Run(model=self.model, optimizer=self.optimizer, reproducible=reproducible)

    def train(self, total: int, folder: Path | None = None) -> None:
        """Saves after each step."""
        for step in self.run.steps(total, MICRO_BATCHES):
            for index in step:
                step.backward(self.model(batch(step.number, index)).square().mean())
            self.optimizer.step()
            if folder is not None:
                self.run.save(folder, step.number + 1)
        self.run.wait_saved()


def test_batch_norm_is_saved_as_it_is_after_the_step(tmp_path: Path) -> None:
    one, other = Training(), Training()
    one.train(3, tmp_path)
    assert other.run.restore(tmp_path) == 3
    for (name, mine), theirs in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    assert int(other.model[1].num_batches_tracked) == 3 * MICRO_BATCHES
    one.train(5)
    other.train(5)
    for (name, mine), theirs in zip(one.model.state_dict().items(), other.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name


def test_what_is_given_within_a_step_is_what_it_began_with() -> None:
    training = Training()
    training.train(1)
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    for step in training.run.steps(2, MICRO_BATCHES):
        for index in step:
            step.backward(training.model(batch(step.number, index)).square().mean())
            given = training.run.state_dict()["state"]["model"]
            for name, value in before.items():
                assert torch.equal(given[name], value), name
        training.optimizer.step()


def test_what_the_script_does_after_the_last_step_counts() -> None:
    training = Training()
    training.train(1)
    training.model[1].running_mean.fill_(7.0)
    assert training.run.state_dict()["state"]["model"]["1.running_mean"].tolist() == [7.0] * 3


class Book(nn.Module):
    """Buffers as models change them: through ``.data``, in place, replaced, of any type, tied, in a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("through_data", torch.zeros(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("is_ready", torch.tensor(False))
        self.register_buffer("narrow", torch.zeros(3, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("tied", self.through_data)
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("constant", torch.tensor([float("nan")] * 3))
        self.register_buffer("nothing", None)
        with torch.inference_mode():
            made = torch.zeros(3)
        self.register_buffer("inference", made, persistent=False)
        self.began: list[list[float]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.detach().mean(0)
        self.began.append([*self.replaced.tolist(), float(self.count)])
        self.through_data.data.mul_(0.5).add_(mean)
        self.count += 1
        self.is_ready.fill_(True)
        self.narrow.lerp_(mean.bfloat16(), 0.5)
        self.replaced = self.replaced + mean
        self.inference.data.copy_(mean)
        self.cache = torch.zeros(len(self.cache) + 1)
        return x * 1.0


def test_every_other_buffer_is_what_micro_batch_0_has_made_of_it() -> None:
    ours = Training(Book(), reproducible=True)
    plain, book = Training(Book()), ours.model[1]
    for step in ours.run.steps(3, MICRO_BATCHES):
        plain.model.load_state_dict(ours.model.state_dict())
        plain.model[1].narrow.copy_(book.narrow)
        for index in step:
            step.backward(ours.model(batch(step.number, index)).square().mean())
        plain.model(batch(step.number, 0))
        for name, value in plain.model[1].named_buffers(remove_duplicate=False):
            if name != "cache":
                assert torch.equal(getattr(book, name).isnan(), value.isnan()), name
                assert torch.equal(getattr(book, name).nan_to_num(), value.nan_to_num()), name
        assert book.tied is book.through_data
        ours.optimizer.step()
    assert book.began[0::2] == book.began[1::2]  # each micro-batch begins with the same
    assert len(book.cache) == 1 + 3 * MICRO_BATCHES  # it is left alone
    assert int(book.count) == 3


def test_a_tied_buffer_that_is_replaced_is_tied_no_longer() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.zeros(2))
            self.register_buffer("other", self.one)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.one = self.one + 1
            return x

    training = Training(Replaces())
    training.train(1)
    assert [each.tolist() for each in training.model[1].buffers()] == [[1.0, 1.0], [0.0, 0.0]]


def test_a_model_whose_buffers_stay_sends_none() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.tensor([float("nan"), -0.0, 1.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table.nan_to_num()

    training = Training(nn.BatchNorm1d(3), Table())
    training.train(2)
    assert training.run._engine._gradients is not None
    assert training.run._engine._gradients.shared() == {}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_statistics_are_those_of_the_global_batch(kind: type[nn.Module], momentum: float | None) -> None:
    """A cumulative average is that of plain accumulation; with a momentum, of which there is one update a step."""

    def make() -> nn.Module:
        layer: nn.Module = kind(3, momentum=momentum, track_running_stats=True)
        return layer

    class Rows(nn.Module):
        """InstanceNorm1d takes (samples, channels, length)."""

        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.t()[None])[0].t() if kind is nn.InstanceNorm1d else self.layer(x)

    ours, plain = Training(Rows(make())), Training(Rows(make()))
    ours.train(3)
    mean = plain.model[1].layer.running_mean.clone()
    for step in range(3):
        plain.optimizer.zero_grad()
        for index in range(MICRO_BATCHES):
            if momentum is not None:
                plain.model[1].layer.running_mean.copy_(mean)
            (plain.model(batch(step, index)).square().mean() / MICRO_BATCHES).backward()
            if momentum is not None and index == 0:
                made = [plain.model[1].layer.running_mean.clone()]
            elif momentum is not None:
                made.append(plain.model[1].layer.running_mean.clone())
        if momentum is not None:
            mean = torch.stack(made).mean(0)
        plain.optimizer.step()
    expected = plain.model[1].layer.running_mean if momentum is None else mean
    torch.testing.assert_close(ours.model[1].layer.running_mean, expected)
    mine, theirs = ours.model[1].layer.num_batches_tracked, plain.model[1].layer.num_batches_tracked
    assert int(mine) == int(theirs)


def test_a_layer_that_some_micro_batches_use_counts_those() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3, momentum=None)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            result: torch.Tensor = self.norm(x) if self.calls % 2 else x
            return result

    ours, plain = Training(Sometimes()), Training(Sometimes())
    ours.train(1)
    plain.model(batch(0, 0))
    plain.model(batch(0, 1))
    assert int(ours.model[1].norm.num_batches_tracked) == 1
    torch.testing.assert_close(ours.model[1].norm.running_mean, plain.model[1].norm.running_mean)


def test_a_frozen_layer_counts_nothing() -> None:
    training = Training()
    training.model[1].eval()
    training.train(1)
    assert int(training.model[1].num_batches_tracked) == 0
    assert training.model[1].running_mean.tolist() == [0.0] * 3


class Grows(nn.Module):
    """Makes a buffer, or changes its shape, in its forward pass."""

    def __init__(self, *, persistent: bool, is_there: bool) -> None:
        super().__init__()
        self.persistent = persistent
        if is_there:
            self.register_buffer("grown", torch.zeros(1), persistent=persistent)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "grown"):
            self.grown = torch.full((len(self.grown) + 1,), float(x.detach().mean()))
        else:
            self.register_buffer("grown", x.detach().mean(0), persistent=self.persistent)
        return x


@pytest.mark.parametrize("is_there", [False, True])
def test_a_buffer_that_gets_another_shape_is_refused_by_name_where_bits_are_promised(is_there: bool) -> None:
    with pytest.raises(RuntimeError, match=r"reproducible=True cannot hold.*the buffer grown of 1, a Grows"):
        Training(Grows(persistent=True, is_there=is_there), reproducible=True).train(1)
    Training(Grows(persistent=True, is_there=is_there)).train(2)
    Training(Grows(persistent=False, is_there=is_there), reproducible=True).train(2)


@pytest.mark.parametrize(
    ("layer", "complaint"),
    [
        (nn.SyncBatchNorm(3), "1 is a SyncBatchNorm, whose forward pass is a collective"),
        (nn.Embedding(3, 3, max_norm=1.0), "1 is an Embedding with max_norm, whose forward pass changes its weights"),
    ],
)
def test_layers_that_cannot_be_the_same_on_all_ranks_are_refused_by_name(layer: nn.Module, complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        Training(layer).train(1)


def test_a_state_dict_within_a_step_keeps_its_versions_and_names() -> None:
    training = Training(nn.BatchNorm1d(3), Grows(persistent=True, is_there=False))
    wanted = training.model.state_dict()
    step = next(training.run.steps(1, MICRO_BATCHES))
    next(iter(step))
    step.backward(training.model(batch(0, 0)).square().mean())
    given = training.run.state_dict()
    assert "2.grown" in training.model.state_dict()
    assert list(given["state"]["model"]) == list(wanted)
    assert given["state"]["model"]._metadata.keys() == wanted._metadata.keys()
    assert "2.grown" not in given["buffers"]


def test_buffers_reach_another_model_with_their_shapes_and_ties() -> None:
    one, other = Training(Book()), Training(Book())
    book = one.model[1]
    book.cache = torch.ones(5)
    book.through_data.fill_(3.0)
    book.narrow.fill_(2.0)
    book.nothing = torch.ones(2)
    other.model[1].through_data.resize_(7)
    other.model[1].register_buffer("more", torch.ones(1), persistent=False)
    other.run.load_state_dict(one.run.state_dict())
    for name, value in book.named_buffers(remove_duplicate=False):
        assert torch.equal(getattr(other.model[1], name).nan_to_num(), value.nan_to_num()), name
    assert other.model[1].tied is other.model[1].through_data
    assert other.model[1].tied is not book.tied
    assert other.model[1].more is None


class Keeps(nn.Module):
    """Buffers that ``state_dict`` leaves out: by name, what is done to each of them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("still", "flipped", "used", "changed", "replaced", "reshaped", "known"):
            self.register_buffer(name, torch.zeros(2), persistent=False)
        self.register_buffer("saved", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.used = self.used + 1
        self.known.add_(1)
        self.reshaped = torch.zeros(len(self.reshaped) + 1)
        self.register_buffer("made", x.detach().mean(), persistent=False)
        return x

    def between(self) -> None:
        """What the script does, and what faulty memory does, which nobody sees."""
        self.changed.add_(1)
        self.saved.add_(1)
        self.replaced = torch.ones(2)
        self.flipped.data[0] = 1e-9


def test_a_cache_is_a_process_s_own_when_the_script_changes_it_or_a_forward_pass_makes_it() -> None:
    training = Training(keeps := Keeps())
    for step in training.run.steps(3, MICRO_BATCHES):
        for index in step:
            step.backward(training.model(batch(step.number, index)).square().mean())
        training.optimizer.step()
        if step.number == 1:
            keeps.between()
    buffers = training.run._engine._buffers
    assert buffers is not None
    assert buffers.own == {"1.made", "1.reshaped", "1.changed", "1.replaced"}


def test_a_state_that_is_taken_over_makes_nothing_a_process_s_own() -> None:
    model = Keeps()
    buffers = Buffers(model, MICRO_BATCHES, is_reproducible=False)
    buffers.begin()
    buffers.end()
    buffers.begin()
    take(model, dict.fromkeys(model._buffers, torch.ones(3)), {})
    buffers.begin()
    assert buffers.own == set()


def _moved(model: nn.Module, number: int) -> dict[str, torch.Tensor]:
    """The running statistics after a step, from those at its beginning: moved by the mean over its micro-batches."""
    began = {name: value.clone() for name, value in model.named_buffers()}
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in began.items()}
    for index in range(MICRO_BATCHES):
        own = copy.deepcopy(model)
        own(batch(number, index))
        for name, value in own.named_buffers():
            share = 1 if name.endswith("num_batches_tracked") else MICRO_BATCHES
            total[name] += (value - began[name]).double() / share
    return {name: (value + total[name]).to(value.dtype) for name, value in began.items()}


def _untrack(model: nn.Sequential) -> None:
    model[1].track_running_stats = False


def _take_statistics(model: nn.Sequential) -> None:
    model[1].track_running_stats = False
    model[1].running_mean = model[1].running_var = model[1].num_batches_tracked = None


def _put(layer: nn.Module) -> Callable[[nn.Sequential], None]:
    return lambda model: model.__setitem__(1, layer)


CHANGES: dict[str, Callable[[nn.Sequential], None]] = {
    "added": lambda model: model.insert(2, nn.BatchNorm1d(3, affine=False)),
    "replaced": _put(nn.BatchNorm1d(3, affine=False, momentum=0.5)),
    "removed": _put(nn.Identity()),
    "untracked": _untrack,
    "without statistics": _take_statistics,
}


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_normalization_layers_may_change_between_steps(change: str, reproducible: bool) -> None:
    training = Training(nn.BatchNorm1d(3, affine=False), reproducible=reproducible)
    for step in training.run.steps(4, MICRO_BATCHES):
        if step.number == 2:
            CHANGES[change](training.model)
        expected = _moved(training.model, step.number)
        for index in step:
            step.backward(training.model(batch(step.number, index)).square().mean())
        found = dict(training.model.named_buffers())
        assert set(found) == set(expected)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], msg=f"{name} after step {step.number}")
        training.optimizer.step()


def test_a_layer_that_loses_its_statistics_within_a_step_is_named() -> None:
    training = Training()
    step = next(training.run.steps(1, MICRO_BATCHES))
    next(iter(step))
    training.model[1].running_mean = None
    with pytest.raises(RuntimeError, match="running_mean of a BatchNorm1d was taken away or replaced within a step"):
        step.backward(training.model[0](batch(0, 0)).square().mean())


class Hiding(nn.Module):
    """It has a buffer that its state_dict leaves out."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.full((2,), value), persistent=False)


def test_buffers_that_other_modules_leave_out_of_their_state_are_given_and_not_saved(tmp_path: Path) -> None:
    def run(value: float) -> tuple[Run, Hiding]:
        ema = Hiding(value)
        return Run(model=nn.Linear(3, 2), ema=ema), ema

    (one, _), (other, taken) = run(1.0), run(2.0)
    other.load_state_dict(one.state_dict())
    assert taken.hidden.tolist() == [1.0, 1.0]
    one.save(tmp_path, 1)
    one.wait_saved()
    third, left = run(3.0)
    assert third.restore(tmp_path) == 1
    assert left.hidden.tolist() == [3.0, 3.0]  # as in torch, it is the script's to make
