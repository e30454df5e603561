"""A run in one process, without a launcher: what a script gets, and what it is told when it does something wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import cast
from weakref import ref

import pytest
import torch
from torch import nn

from unicron_elastic import Run
from unicron_elastic.training.optimizer_step import Step
from unicron_elastic.training.step.wrong_use import WrongUseError

MICRO_BATCHES = 4


pytestmark = pytest.mark.usefixtures("no_launcher")


class Training:
    """A small model that a run trains."""

    def __init__(self, *, reproducible: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.run = Run(model=self.model, optimizer=self.optimizer, reproducible=reproducible)

    def loss(self, step: int, index: int) -> torch.Tensor:
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + index))
        return self.model(x).square().mean()

    def compute(self, step: Step) -> None:
        for index in step:
            step.backward(self.loss(step.number, index))

    def load_own_checkpoint(self) -> None:
        """As a script does that looks after its checkpoints itself."""
        self.loss(0, 0).backward()
        self.optimizer.step()

    def train(self, total: int, micro_batches: int | Callable[[int], int] = MICRO_BATCHES) -> list[float]:
        losses = []
        for step in self.run.steps(total, micro_batches):
            self.compute(step)
            self.optimizer.step()
            losses.append(step.loss)
        return losses


class Head(nn.Module):
    """`Head` names its parameters in another order than that in which it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 1)
        self.first = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


@pytest.mark.parametrize("reproducible", [False, True])
def test_gradients_lie_in_the_order_of_their_use_from_the_second_step_on(reproducible: bool) -> None:
    training = Training(reproducible=reproducible)
    training.model = model = Head()
    training.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training.run = Run(model=model, optimizer=training.optimizer, reproducible=reproducible)
    orders = []
    for step in training.run.steps(3, MICRO_BATCHES):
        training.compute(step)
        gradients = training.run._engine._gradients
        assert gradients is not None
        orders.append([id(each) for each in gradients.parameters])
        training.optimizer.step()
    own = [id(each) for each in model.parameters()]
    assert orders == [own, own[2:] + own[:2], own[2:] + own[:2]]


@pytest.mark.parametrize("reproducible", [False, True])
def test_it_trains_as_plain_accumulation_does(reproducible: bool) -> None:
    ours, plain = Training(reproducible=reproducible), Training()
    ours.model.eval()
    plain.model.eval()
    losses = ours.train(3)
    for step in range(3):
        plain.optimizer.zero_grad()
        mean = sum(plain.loss(step, index) for index in range(MICRO_BATCHES)) / MICRO_BATCHES
        mean.backward()
        plain.optimizer.step()
        assert losses[step] == pytest.approx(mean.item())
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert (ours.run.step, ours.run.rank, ours.run.world_size) == (3, 0, 1)


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_weighted_micro_batches_train_as_one_batch_of_all_samples(reproducible: bool, scale: float | None) -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()
    plain.load_state_dict(model.state_dict())
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    run = Run(model=model, optimizer=optimizer, scaler=scaler, reproducible=reproducible)
    batches = [torch.randn(count, 3, dtype=torch.float64) for count in (5, 1, 0, 3)]
    for step in run.steps(3, MICRO_BATCHES):
        for index in step:
            weight = torch.tensor(len(batches[index])) if index % 2 else len(batches[index])
            step.backward(model(batches[index]).square().sum(), weight=weight)
        plain_optimizer.zero_grad()
        loss = plain(torch.cat(batches)).square().mean()
        loss.backward()
        assert step.weight == 9
        assert step.loss == pytest.approx(loss.item(), rel=1e-6)
        if scaler is None:
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        plain_optimizer.step()
        torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-14)


def test_a_step_without_weights_has_none() -> None:
    training = Training()
    for step in training.run.steps(1, MICRO_BATCHES):
        training.compute(step)
        assert step.weight is None
        training.optimizer.step()


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        (
            (1.0, None, 2.0, None),
            "a weight for 2 of 4 micro-batches: give one for each, on all ranks, or for none",
        ),
        ((0, 0, 0, 0), "have the weight 0, so that it has no mean"),
    ],
)
def test_weights_that_make_no_mean_are_refused(weights: tuple[float | None, ...], sentence: str) -> None:
    training = Training()
    step = next(training.run.steps(1, MICRO_BATCHES))

    def go_through() -> None:
        for index in step:
            step.backward(training.loss(0, index), weight=weights[index])

    with pytest.raises(RuntimeError, match=sentence):
        go_through()


def test_dropout_depends_on_step_and_index_alone() -> None:
    one, other = Training(), Training()
    torch.manual_seed(123)
    one_losses = one.train(2)
    torch.manual_seed(123)
    torch.rand(3)
    assert one_losses == other.train(2)


def test_random_numbers_between_steps_are_left_alone() -> None:
    training = Training()
    torch.manual_seed(123)
    expected = torch.rand(2).tolist()
    torch.manual_seed(123)
    found = []
    for step in training.run.steps(2, MICRO_BATCHES):
        training.compute(step)
        found.append(float(torch.rand(1)))
        training.optimizer.step()
    assert found == pytest.approx(expected)


def test_a_run_goes_on_from_its_state() -> None:
    whole, first, second = Training(), Training(), Training()
    whole.train(4)
    first.train(2)
    second.run.load_state_dict(first.run.state_dict())
    assert second.run.step == 2
    second.train(4)
    for mine, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_each_micro_batch_wants_one_backward() -> None:
    training = Training()
    step = next(training.run.steps(1, MICRO_BATCHES))
    with pytest.raises(RuntimeError, match=r"not called for micro-batch 0"):
        list(step)


def test_a_second_backward_is_refused() -> None:
    training = Training()
    step = next(training.run.steps(1, MICRO_BATCHES))
    next(iter(step))
    step.backward(training.loss(0, 0))
    with pytest.raises(RuntimeError, match="once into each round"):
        step.backward(training.loss(0, 0))


def test_losses_are_not_known_before_the_end() -> None:
    step = next(Training().run.steps(1, MICRO_BATCHES))
    with pytest.raises(RuntimeError, match="known when"):
        _ = step.loss


@pytest.mark.parametrize("reproducible", [False, True])
def test_zero_grad_between_steps_is_harmless(reproducible: bool) -> None:
    one, other = Training(reproducible=reproducible), Training(reproducible=reproducible)
    for step in one.run.steps(2, MICRO_BATCHES):
        one.optimizer.zero_grad()
        one.compute(step)
        one.optimizer.step()
        one.optimizer.zero_grad()
    other.train(2)
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_zero_grad_within_a_step_is_noticed() -> None:
    training = Training()
    step = next(training.run.steps(1, MICRO_BATCHES))

    def take_away() -> None:
        for index in step:
            training.optimizer.zero_grad()
            step.backward(training.loss(0, index))

    with pytest.raises(RuntimeError, match="zero_grad"):
        take_away()


@pytest.mark.parametrize(("total", "micro_batches"), [(0, 4), (3, 0)])
def test_numbers_below_one_are_refused(total: int, micro_batches: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        next(Training().run.steps(total, micro_batches))


@pytest.mark.parametrize("reproducible", [False, True])
def test_each_step_may_have_another_number_of_micro_batches(reproducible: bool) -> None:
    training, plain, counts = Training(reproducible=reproducible), Training(), [3, 5, 1, 4]
    training.model.eval()
    plain.model.eval()  # without dropout
    asked: list[int] = []

    def count(step: int) -> int:
        asked.append(step)
        return counts[step]

    for total in (3, 4):  # two calls
        for step in training.run.steps(total, count):
            losses = [plain.loss(step.number, index) for index in range(counts[step.number])]
            plain.optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            plain.optimizer.step()
            training.compute(step)
            training.optimizer.step()
            expected = [each.item() for each in losses]
            assert step.losses.tolist() == pytest.approx(expected, rel=1e-5)
            assert step.loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert asked == [0, 1, 2, 3]  # each once, and none behind the last
    for ours, theirs in zip(training.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("given", "kind", "why"),
    [
        (0, ValueError, "must return 1 or more, and returned 0"),
        (-3, ValueError, "must return 1 or more, and returned -3"),
        (None, TypeError, "must return a whole number, and not None"),
        (2.0, TypeError, "must return a whole number, and not 2.0, a float"),
        ("4", TypeError, "must return a whole number, and not '4', a str"),
        (torch.tensor(2.5), TypeError, r"must return a whole number, and not tensor\(2.5000\), a Tensor"),
    ],
)
def test_a_function_of_micro_batches_that_returns_no_such_number_is_refused(
    given: object, kind: type[Exception], why: str
) -> None:
    training = Training()
    with pytest.raises(kind, match=f"^micro_batches, called for step 2, {why}$"):
        training.train(4, lambda step: cast("int", given) if step == 2 else 3)
    assert training.run.step == 2


def test_what_a_function_of_micro_batches_raises_the_script_gets() -> None:
    with pytest.raises(IndexError):
        next(Training().run.steps(1, [].__getitem__))


def test_a_number_of_micro_batches_and_a_function_in_one_run_are_refused() -> None:
    training = Training()
    training.train(2)
    with pytest.raises(ValueError, match="4 micro-batches, and not micro-batches by a function of the step"):
        next(training.run.steps(3, lambda _: 4))


def test_another_number_of_micro_batches_is_refused() -> None:
    training = Training()
    training.train(1)
    with pytest.raises(ValueError, match="4, not 5"):
        next(training.run.steps(2, 5))


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(TypeError, match="epoch must have state_dict"):
        Run(model=nn.Linear(1, 1), epoch=3)  # type: ignore[arg-type]


def test_the_state_of_something_else_is_refused() -> None:
    state = Run(model=nn.Linear(1, 1)).state_dict()
    with pytest.raises(ValueError, match="are registered"):
        Training().run.load_state_dict(state)


@pytest.mark.parametrize("is_iterated", [False, True])
def test_a_step_that_was_left_early_is_noticed(is_iterated: bool) -> None:
    training = Training()

    def leave_early() -> None:
        for step in training.run.steps(2, MICRO_BATCHES):
            for index in step if is_iterated else ():
                step.backward(training.loss(step.number, index))
                break
            training.optimizer.step()

    with pytest.raises(RuntimeError, match="for index in step"):
        leave_early()


def test_a_mean_before_the_first_steps_is_refused_in_a_sentence() -> None:
    with pytest.raises(RuntimeError, match=r"run\.mean\(\) is for the ranks of run\.steps\(\)"):
        Run(model=nn.Linear(1, 1)).mean(torch.ones(1))


def test_the_mean_of_one_rank_is_what_it_is_given_and_not_partial() -> None:
    run = Run(model=nn.Linear(1, 1))
    for step in run.steps(1, 1):
        for _ in step:
            step.backward(run._model(torch.ones(1, 1)).mean())
        assert float(run.mean(torch.tensor([3]))) == 3.0
        assert not run.is_partial


def _lazy(kind: str) -> torch.Tensor:
    numbers = torch.arange(4.0)
    complex_numbers = torch.complex(numbers, numbers + 1)
    made = {
        "expanded": numbers.expand(3, 4),
        "one number, expanded": torch.tensor(2.0).expand(3, 4),
        "conjugated": complex_numbers.conj(),
        "negated": complex_numbers.conj().imag,
        "expanded and conjugated": complex_numbers.expand(3, 4).conj(),
        "half complex, conjugated": complex_numbers.to(torch.complex32).conj(),
        "nothing, complex": torch.zeros(0, 2, dtype=torch.complex64),
        "8 bits": numbers.to(torch.float8_e4m3fn),
    }
    return made[kind]


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "expanded",
        "one number, expanded",
        "conjugated",
        "negated",
        "expanded and conjugated",
        "half complex, conjugated",
        "nothing, complex",
        "8 bits",
    ],
)
def test_buffers_that_torch_keeps_in_other_ways_than_it_shows_them_may_be_there(kind: str, reproducible: bool) -> None:
    training = Training(reproducible=reproducible)
    training.model.register_buffer("lazy", _lazy(kind))
    training.model.register_buffer("hidden", _lazy(kind), persistent=False)
    training.run._engine._replicas.every = 1
    assert len(training.train(3)) == 3
    for name in ("lazy", "hidden"):
        found, expected = training.model.get_buffer(name), _lazy(kind)
        assert torch.equal(found.to(torch.complex64), expected.to(torch.complex64))
        assert (found.stride(), found.is_conj(), found.is_neg()) == (
            expected.stride(),
            expected.is_conj(),
            expected.is_neg(),
        )
    assert training.run._engine._replicas.digest() is not None
    given = training.run.state_dict()
    other = Training()
    other.model.register_buffer("lazy", torch.zeros_like(_lazy(kind)))
    other.model.register_buffer("hidden", _lazy(kind).roll(1, -1), persistent=False)
    other.run.load_state_dict(given)
    assert torch.equal(other.model.get_buffer("hidden").to(torch.complex64), _lazy(kind).to(torch.complex64))


def test_a_lazy_buffer_that_a_forward_pass_changes_is_what_micro_batch_0_made_of_it() -> None:
    training = Training()
    training.model.register_buffer("spun", torch.complex(torch.zeros(2), torch.ones(2)).conj())
    for step in training.run.steps(2, MICRO_BATCHES):
        for index in step:
            training.model.get_buffer("spun").mul_(1j).add_(index)
            step.backward(training.loss(step.number, index))
        training.optimizer.step()
    assert torch.equal(training.model.get_buffer("spun"), torch.complex(torch.zeros(2), torch.ones(2)))


def test_an_expanded_buffer_that_is_replaced_by_other_numbers_is_what_micro_batch_0_made_of_it() -> None:
    training = Training()
    training.model.register_buffer("book", torch.zeros(2).expand(3, 2))
    for step in training.run.steps(2, MICRO_BATCHES):
        for index in step:
            training.model._buffers["book"] = training.model.get_buffer("book") + torch.arange(6.0).view(3, 2) + index
            step.backward(training.loss(step.number, index))
        training.optimizer.step()
    assert torch.equal(training.model.get_buffer("book"), 2 * torch.arange(6.0).view(3, 2))


BEGINS_AT = "unicron: run.steps() begins again with step {}, as the script says by run.begin_at().\n"
ASKS_NOTHING = "unicron: run.steps() begins again with step 0: the script has not asked run.restore() for a snapshot.\n"


@pytest.mark.parametrize(
    ("restarts", "before", "said"),
    [
        ("1", lambda _: None, ASKS_NOTHING),
        ("0", lambda _: None, ""),
        ("1", lambda training: training.run.restore(), ""),  # which says what it has found
        ("1", lambda training: training.run.load_state_dict(Training().run.state_dict() | {"steps": 2}), ""),
        ("1", lambda training: training.load_own_checkpoint(), ""),
        ("0", lambda training: training.run.begin_at(2), ""),
        ("1", lambda training: training.run.begin_at(0), BEGINS_AT.format(0)),
        ("1", lambda training: training.run.begin_at(2), BEGINS_AT.format(2)),
    ],
)
def test_a_restart_that_begins_again_with_step_0_says_so(
    restarts: str,
    before: Callable[[Training], object],
    said: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    training = Training()
    before(training)
    training.train(3)
    training.train(4)
    assert capfd.readouterr().err == said


def test_steps_begin_where_the_script_says_that_its_checkpoint_is() -> None:
    training = Training()
    training.load_own_checkpoint()
    training.run.begin_at(3)
    assert training.run.step == 3
    assert [step for step, _ in zip(range(3, 9), training.train(5), strict=False)] == [3, 4]
    assert training.run.step == 5
    with pytest.raises(WrongUseError, match="has to stand before it"):
        training.run.begin_at(5)


def test_a_checkpoint_of_the_last_step_leaves_nothing_to_do() -> None:
    training = Training()
    training.run.begin_at(5)
    assert training.train(5) == []
    assert len(training.train(6)) == 1


@pytest.mark.parametrize(("step", "kind"), [(-1, ValueError), (2.5, TypeError), (None, TypeError)])
def test_a_step_that_is_none_is_refused(step: int, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="step must be"):
        Training().run.begin_at(step)


def _saved(folder: Path, total: int) -> Training:
    training = Training()
    training.train(total)
    training.run.save(folder, total)
    training.run.wait_saved()
    return training


@pytest.mark.parametrize(("begun", "restored"), [(2, 4), (4, 4), (6, 6)])
def test_of_a_checkpoint_of_its_own_and_a_state_that_is_kept_the_newer_one_counts(
    begun: int, restored: int, tmp_path: Path
) -> None:
    saved = _saved(tmp_path, 4)
    training = Training()
    training.load_own_checkpoint()
    own = [each.clone() for each in training.model.parameters()]
    training.run.begin_at(begun)
    assert training.run.restore(tmp_path) == training.run.step == restored
    expected = own if restored > 4 else [*saved.model.parameters()]
    assert all(map(torch.equal, training.model.parameters(), expected))
    assert len(training.train(8)) == 8 - restored


@pytest.mark.parametrize("step", [0, 3, 5])
def test_a_step_that_is_not_that_of_the_state_taken_over_is_refused(step: int, tmp_path: Path) -> None:
    _saved(tmp_path, 4)
    training = Training()
    training.run.restore(tmp_path)
    with pytest.raises(
        WrongUseError, match=r"has taken over the one of step 4 before: load it and call begin_at\(\) first"
    ):
        training.run.begin_at(step)
    training.run.begin_at(4)
    assert len(training.train(5)) == 1


@pytest.mark.parametrize("reproducible", [False, True])
def test_nothing_is_left_of_a_run_that_a_script_has_dropped(reproducible: bool, tmp_path: Path) -> None:
    """Python cannot see what torch keeps in C++, as hooks of parameters, nor frees what waits for the script's end."""
    training = Training(reproducible=reproducible)
    training.train(3)
    training.run.save(tmp_path, 3)
    training.run.wait_saved()
    kept = {name: ref(each) for name, each in vars(training).items()}
    del training
    gc.collect()
    assert [name for name, each in kept.items() if each() is not None] == []


def test_a_lazy_module_is_kept_from_its_first_forward_pass_on(capsys: pytest.CaptureFixture[str]) -> None:
    model, another = (nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2)) for _ in range(2))
    run, again = (Run(model=each, optimizer=torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, another))
    for _ in range(2):
        assert not run.snapshot(0)
    said = capsys.readouterr().err
    assert said.count("model.1.weight is of a lazy module, and gets its shape in the first forward pass") == 1
    model(torch.ones(1, 3))
    run.snapshot(0)
    again.load_state_dict(run.state_dict())
    assert torch.equal(another[1].weight, model[1].weight)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_reproducible", [False, True])
def test_what_is_compiled_is_said_to_have_the_same_bits_for_one_shape(
    capsys: pytest.CaptureFixture[str], *, is_reproducible: bool
) -> None:
    training = Training(reproducible=is_reproducible)
    compiled = torch.compile(training.model, backend="eager")
    training.loss = lambda step, index: compiled(torch.ones(1 + (step + index) % 2, 3)).square().mean()  # type: ignore[method-assign]
    training.train(3)
    said = capsys.readouterr().err
    assert said.count("only where all micro-batches have one shape") == is_reproducible
