"""Wrong use of a run is refused at the first wrong call by one sentence that says what is right."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from unicron_elastic import Run
from unicron_elastic.training.optimizer_step import Step
from unicron_elastic.training.step.wrong_use import WrongUseError

MICRO_BATCHES = 3


pytestmark = pytest.mark.usefixtures("no_launcher")


class Training:
    """A small model that a run trains."""

    def __init__(self, *, scaler: torch.amp.GradScaler | None = None) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = scaler
        self.other = torch.amp.GradScaler("cpu")
        self.run = Run(model=self.model, optimizer=self.optimizer, scaler=scaler)

    def move(self) -> None:
        """Makes a step without an optimizer."""
        with torch.no_grad():
            self.model.weight -= 0.1

    def losses(self) -> Tensor:
        return self.model(torch.ones(2, 3)).square().flatten()

    def loss(self) -> Tensor:
        return self.losses().mean()


def _scaled(training: Training, step: Step) -> None:
    assert training.scaler is not None
    step.backward(training.scaler.scale(training.loss()))


def _scaled_in_a_list(training: Training, step: Step) -> None:
    assert training.scaler is not None
    step.backward(sum(training.scaler.scale([training.loss(), training.loss()])))


def _scaled_and_divided(training: Training, step: Step) -> None:
    assert training.scaler is not None
    step.backward(training.scaler.scale(training.loss() * 2) / 2)


def _scaled_by_another(training: Training, step: Step) -> None:
    step.backward(training.other.scale(training.loss()))


def _twice(training: Training, step: Step) -> None:
    step.backward(training.loss())
    step.backward(training.loss())


def _directly(training: Training, step: Step) -> None:
    training.loss().backward()
    step.backward(training.loss())


def _optimizer_step(training: Training, step: Step) -> None:
    step.backward(training.loss())
    training.optimizer.step()


def _again(training: Training, step: Step) -> None:
    step.backward(training.loss())
    list(step)


def _detached(training: Training, step: Step) -> None:
    step.backward(training.loss().detach())


def _mean(training: Training, step: Step) -> None:
    loss = training.loss()
    step.backward(loss)
    training.run.mean(loss)


def _a_number(training: Training, step: Step) -> None:
    step.backward(training.loss().item())  # type: ignore[arg-type]


def _clipped_by_a_hook(training: Training, step: Step) -> None:
    def clip(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.clamp_(-0.1, 0.1)

    training.model.weight.register_post_accumulate_grad_hook(clip)
    step.backward(training.loss())


def _nothing(training: Training, step: Step) -> None:
    pass


IN_A_STEP: list[tuple[Callable[[Training, Step], None], type[Exception], str]] = [
    (_scaled, RuntimeError, r"scales the loss itself.*not scaler\.scale"),
    (_scaled_in_a_list, RuntimeError, r"scales the loss itself.*not scaler\.scale"),
    (_scaled_and_divided, RuntimeError, r"scales the loss itself.*not scaler\.scale"),
    (_scaled_by_another, RuntimeError, r"Run\(scaler=scaler\)"),
    (_twice, RuntimeError, "once into each round"),
    (_clipped_by_a_hook, RuntimeError, r"changed in the backward pass.*post_accumulate_grad_hook.*register_hook"),
    (_directly, RuntimeError, "no other backward pass"),
    (_optimizer_step, RuntimeError, r"optimizer\.step\(\) belongs behind"),
    (_again, RuntimeError, "iterated over once"),
    (_detached, RuntimeError, "depends on no parameter"),
    (_mean, RuntimeError, r"run\.mean\(\) belongs between steps"),
    (lambda training, step: step.backward(training.losses()), TypeError, r"one real number, and got float32 .*\[2\]"),
    (lambda training, step: step.backward(training.loss() * 1j), TypeError, "one real number, and got complex64"),
    (lambda training, step: step.backward(training.loss(), weight=-1.0), ValueError, "0 or more, and got -1.0"),
    (lambda training, step: step.backward(training.loss(), weight=math.nan), ValueError, "finite weight.*and got nan"),
    (
        lambda training, step: step.backward(training.loss(), weight=training.losses()),
        TypeError,
        "one number.*got Tensor",
    ),
    (lambda training, step: step.backward(training.loss(), weight="5"), TypeError, "one number.*got str"),
    (_a_number, TypeError, "as a tensor, and not as float"),
    (_nothing, RuntimeError, "was not called for micro-batch 0"),
]


@pytest.mark.parametrize(("wrong", "kind", "sentence"), IN_A_STEP)
def test_in_a_step(wrong: Callable[[Training, Step], None], kind: type[Exception], sentence: str) -> None:
    training = Training(scaler=torch.amp.GradScaler("cpu"))
    step = next(training.run.steps(2, MICRO_BATCHES))

    def go_through() -> None:
        for _ in step:
            wrong(training, step)

    with pytest.raises(kind, match=sentence) as found:
        go_through()
    assert "\n" not in str(found.value)


def test_a_loss_of_one_number_in_a_dimension_is_as_good_as_a_scalar() -> None:
    one, other = Training(), Training()
    other.model.load_state_dict(one.model.state_dict())
    for training, shape in ((one, ()), (other, (1, 1))):
        for step in training.run.steps(2, MICRO_BATCHES):
            for _ in step:
                step.backward(training.loss().reshape(shape))
            training.optimizer.step()
    assert torch.equal(one.model.weight, other.model.weight)


def test_a_scaler_scales_as_before_outside_of_steps_and_where_it_is_disabled() -> None:
    training = Training(scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert training.scaler is not None
    for step in training.run.steps(1, MICRO_BATCHES):
        for _ in step:
            step.backward(training.scaler.scale(training.loss()))
        assert float(training.other.scale(torch.ones(()))) == training.other.get_scale()


def _go_on(_training: Training, _step: Step, steps: Iterator[Step]) -> None:
    next(steps)


def _mean_of_all(training: Training, _step: Step, _steps: Iterator[Step]) -> None:
    training.run.mean(1.0)


def _loss_of_all(_training: Training, step: Step, _steps: Iterator[Step]) -> None:
    print(step.loss)


BEHIND_A_BREAK: list[Callable[[Training, Step, Iterator[Step]], object]] = [
    lambda training, _step, _steps: training.optimizer.step(),
    _mean_of_all,
    _loss_of_all,
    _go_on,
]


def _break(training: Training, step: Step) -> None:
    for number, _ in enumerate(step):
        step.backward(training.loss())
        if number == 1:
            break


def _take_two(training: Training, step: Step) -> None:
    for _ in itertools.islice(step, 2):
        step.backward(training.loss())


def _raise(training: Training, step: Step) -> None:
    with contextlib.suppress(ZeroDivisionError):
        for number, _ in enumerate(step):
            step.backward(training.loss())
            print(1 / (1 - number))


@pytest.mark.parametrize("next_call", BEHIND_A_BREAK)
@pytest.mark.parametrize("leave", [_break, _take_two, _raise])
def test_micro_batches_that_are_left_are_refused_in_the_next_call(
    leave: Callable[[Training, Step], None], next_call: Callable[[Training, Step, Iterator[Step]], object]
) -> None:
    training = Training()
    steps = training.run.steps(2, MICRO_BATCHES)
    step = next(steps)
    weight = training.model.weight.detach().clone()
    leave(training, step)
    with pytest.raises(RuntimeError, match=r"left by break.* after 2 micro-batches of step 0.*let that loop come"):
        next_call(training, step, steps)
    assert torch.equal(training.model.weight, weight)


def _steps(training: Training, total: int) -> Iterator[Step]:
    for step in training.run.steps(total, MICRO_BATCHES):
        for _ in step:
            step.backward(training.loss())
        training.optimizer.step()
        yield step


def test_a_second_loop_over_steps_after_a_break_is_refused() -> None:
    training = Training()
    for step in _steps(training, 5):
        if step.number == 2:
            break
    with pytest.raises(RuntimeError, match=r"has not come to its end, in step 2.*would be trained twice"):
        next(training.run.steps(5, MICRO_BATCHES))


def test_a_second_loop_over_steps_beside_the_first_is_refused() -> None:
    training = Training()
    for _ in _steps(training, 2):
        with pytest.raises(RuntimeError, match="has not come to its end"):
            next(training.run.steps(4, MICRO_BATCHES))
    assert [step.number for step in _steps(training, 4)] == [2, 3]


def test_a_head_that_its_optimizer_had_first_is_trained_when_it_is_attached() -> None:
    head = nn.Linear(1, 1)
    model = nn.Sequential(nn.Linear(3, 1))
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    run = Run(model=model, optimizer=optimizer)
    before = head.weight.detach().clone()
    for step in run.steps(3, MICRO_BATCHES):
        if step.number == 1:
            model.append(head)
        for _ in step:
            step.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
    assert not torch.equal(head.weight, before)


class Wrapper:
    """An optimizer of a script's own that has others inside, and gives their state."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = {"inside": list(optimizers)}

    def state_dict(self) -> dict[str, Any]:
        return {"inside": [each.state_dict() for each in self.optimizers["inside"]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for each, taken in zip(self.optimizers["inside"], state["inside"], strict=True):
            each.load_state_dict(taken)


def _stepped(run: Run, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for step in run.steps(run.step + 2, MICRO_BATCHES):
        for _ in step:
            step.backward(model(torch.ones(2, 3)).square().mean())
        for each in optimizers:
            each.step()


def test_an_optimizer_that_is_not_registered_and_steps_over_the_model_is_told_of_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    training = Training()
    other = torch.optim.Adam(nn.Linear(3, 1).parameters())
    _stepped(training.run, training.model, training.optimizer, other)
    assert not capfd.readouterr().err
    for _ in range(2):
        new = torch.optim.AdamW(training.model.parameters(), lr=0.1)
        _stepped(training.run, training.model, training.optimizer, new)
    said = capfd.readouterr().err
    assert said.startswith("unicron: AdamW, an optimizer that is not registered, has stepped over parameters of the")
    assert said.count("\n") == 1


def test_a_module_that_the_run_has_not_is_refused_when_it_is_trained_by_an_optimizer_of_its_own() -> None:
    training, encoder = Training(), nn.Linear(3, 3)
    own = torch.optim.Adam(encoder.parameters())
    with pytest.raises(RuntimeError, match=r"of shape \(3,.*\) got a gradient that is not reduced: .* a ModuleList"):
        _stepped(training.run, nn.Sequential(encoder, training.model), training.optimizer, own)
    assert training.run.step == 1, "before the second step is made"


def test_a_run_ends_although_a_module_lives_that_was_trained_beside_it() -> None:
    training, other = Training(), nn.Linear(3, 1)
    _stepped(training.run, training.model, training.optimizer, torch.optim.Adam(other.parameters()))
    guard = weakref.ref(training.run._engine.guard)
    del training
    gc.collect()
    assert guard() is None


def test_a_module_that_is_trained_beside_the_run_by_its_own_loss_is_the_scripts() -> None:
    training, other = Training(), nn.Linear(3, 1)
    own = torch.optim.Adam(other.parameters())
    for step in training.run.steps(3, MICRO_BATCHES):
        for _ in step:
            other(torch.ones(2, 3)).mean().backward()
            step.backward(training.loss())
        training.optimizer.step()
        own.step()
    assert training.run.step == 3


@pytest.mark.parametrize(
    ("update", "scaler", "is_told"),
    [
        (lambda _: None, None, True),
        (lambda training: training.optimizer.step(), None, False),
        (lambda _: None, torch.amp.GradScaler("cpu"), False),  # which may have found the gradients infinite
        (lambda training: training.move(), None, False),
        (lambda training: training.run.mean(1.0), None, True),
    ],
)
def test_a_step_whose_gradients_are_dropped_is_told_of_once(
    update: Callable[[Training], object],
    scaler: torch.amp.GradScaler | None,
    is_told: bool,
    capfd: pytest.CaptureFixture[str],
) -> None:
    training = Training(scaler=scaler)
    for step in training.run.steps(4, MICRO_BATCHES):
        for _ in step:
            step.backward(training.loss())
        if step.number == 0:
            training.optimizer.step()
        else:
            update(training)
    said = capfd.readouterr().err
    assert (
        said.count("\n")
        == said.count("unicron: step 1 ended without an optimizer.step(): its gradients are")
        == is_told
    )


def test_an_optimizer_inside_of_what_is_registered_is_as_good_as_registered(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(3, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    _stepped(Run(model=model, optimizer=first, more=Wrapper(second)), model, first, second)
    assert not capfd.readouterr().err


class Around(torch.optim.Optimizer):
    """An optimizer that has another one make its steps, as one that looks ahead."""

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups, {})
        self.inside = inside

    def step(self, _closure: Any = None) -> None:
        self.inside.step()


def test_so_is_one_around_a_registered_one(capfd: pytest.CaptureFixture[str]) -> None:
    training = Training()
    _stepped(training.run, training.model, Around(training.optimizer))
    other = Training()
    around = Around(other.optimizer)
    _stepped(Run(model=other.model, optimizer=around), other.model, around)
    assert not capfd.readouterr().err


def test_a_run_may_go_while_an_optimizer_steps() -> None:
    training = Training()
    _stepped(training.run, training.model, training.optimizer)
    guard, model = weakref.ref(training.run._engine.guard), training.model
    left = [training]
    del training

    def end(*_: Any) -> None:
        left.clear()
        gc.collect()

    hook = register_optimizer_step_post_hook(end)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    hook.remove()
    assert guard() is None


def test_what_an_optimizer_gets_later_and_the_model_has_not_is_refused() -> None:
    training = Training()
    head = nn.Linear(1, 1)

    def train() -> None:
        for step in training.run.steps(2, MICRO_BATCHES):
            if step.number == 1:
                training.optimizer.add_param_group({"params": head.parameters()})
            for _ in step:
                step.backward(head(training.model(torch.ones(2, 3))).square().mean())
            training.optimizer.step()

    with pytest.raises(RuntimeError, match="got a gradient that is not reduced"):
        train()


def _sharded() -> nn.Module:
    return fully_shard(nn.Linear(4, 4))


def _deepspeed(model: nn.Module) -> nn.Module:
    engine = type("DeepSpeedEngine", (nn.Module,), {"__module__": "deepspeed.runtime.engine"})()
    engine.module = model
    return engine  # type: ignore[no-any-return]


MODELS: list[tuple[Callable[[], nn.Module], str]] = [
    (_sharded, "FSDPModule.*whole on every rank.*tier 1"),
    (lambda: nn.Sequential(_sharded(), nn.Linear(4, 1)), r"the model's 0 is divided .*FSDPModule.*tier 1"),
    (lambda: _deepspeed(nn.Linear(4, 1)), "DeepSpeedEngine.*whole on every rank.*tier 1"),
    (lambda: nn.parallel.DistributedDataParallel(nn.Linear(4, 1)), "wrapped in DistributedDataParallel"),
    (lambda: nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(4, 1))), r"model's 0 .*DistributedDataPar"),
    (lambda: torch.compile(nn.parallel.DistributedDataParallel(nn.Linear(4, 1))), "wrapped in DistributedDataPar"),  # type: ignore[return-value]
    (lambda: nn.DataParallel(nn.Linear(4, 1)), r"wrapped in DataParallel.*model\.module"),
    (lambda: nn.LazyLinear(3), "weight has no shape yet: make one forward pass"),
    (lambda: nn.Linear(3, 3, device="meta"), "weight is on the meta device"),
]


@pytest.mark.parametrize(("make", "sentence"), MODELS)
def test_a_model_that_steps_cannot_train(make: Callable[[], nn.Module], sentence: str) -> None:
    os.environ.pop("RANK", None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = Run(model=make())
    with pytest.raises(TypeError, match=sentence):
        next(run.steps(1, 1))


class Registered:
    """Something of a script's own that gives this as its state."""

    def __init__(self, state: Callable[[], object]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 1, "inside": [self._state()]}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        pass


def _deep() -> list[Any]:
    state: list[Any] = []
    for _ in range(200):
        state = [state]
    return state


STATES: list[tuple[Callable[[], object], str]] = [
    (lambda: {1, 2}, r"sent to other ranks: counters\.inside\[0\] is a set, which cannot be sent; supported are"),
    (io.BytesIO, r"counters\.inside\[0\] is a BytesIO"),
    (lambda: {(0, 1): 2}, r"counters\.inside\[0\] has the key \(0, 1\); keys that can be sent are"),
    (threading.Lock, r"counters\.inside\[0\] is a lock"),
    (lambda: torch.eye(2).to_sparse(), r"counters\.inside\[0\] is a Tensor \(sparse_coo"),
    (_deep, "nested deeper than 100 levels"),
    (
        lambda: 1 // 0,
        r"counters, a Registered, cannot be given .* its state_dict\(\) raised ZeroDivisionError",
    ),
    (lambda: Registered(dict), r"counters\.inside\[0\] is a Registered"),
]


@pytest.mark.parametrize(("state", "sentence"), STATES)
def test_what_is_registered_and_cannot_be_sent_is_refused_by_name_at_once(
    state: Callable[[], object], sentence: str
) -> None:
    run = Run(model=nn.Linear(3, 1), counters=Registered(state))
    for _ in range(2):
        with pytest.raises(TypeError, match=sentence) as found:
            next(run.steps(1, 1))
        assert "\n" not in str(found.value)


ARGUMENTS: list[tuple[str, object, str]] = [
    ("model", None, r"model must be a torch\.nn\.Module, and not None"),
    ("model", nn.Linear, r"model must be a torch\.nn\.Module, and not the class Linear"),
    ("model", [1, 2], r"and not \[1, 2\], a list"),
    ("optimizer", torch.optim.SGD, "optimizer must be an object with a state, and not the class SGD"),
    ("snapshot_every", "10", r"snapshot_every must be a whole number, and not '10', a str"),
    ("snapshot_every", 0.5, r"snapshot_every must be a whole number, and not 0\.5, a float"),
    ("peer_snapshot_every", "10", "peer_snapshot_every must be a whole number"),
    ("compare_every", None, "compare_every must be a whole number, and not None"),
    ("seed", 0.5, "seed must be a whole number"),
    ("timeout_s", "600", "timeout_s must be a number of seconds, and not '600', a str"),
    ("join_patience_s", None, "join_patience_s must be a number of seconds, and not None"),
    ("on_regroup", 3, "on_regroup must be a function without arguments, and not 3, a int"),
    ("total", 2.5, r"total must be a whole number, and not 2\.5, a float"),
    ("total", None, "total must be a whole number, and not None"),
    ("micro_batches", "2", "micro_batches must be a whole number, and not '2', a str"),
    ("micro_batches", [2], r"micro_batches must be a whole number, and not \[2\], a list"),
    ("every", 0.5, "every must be a whole number"),
    ("step", "1", "step must be a whole number"),
    ("keep", None, "keep must be a whole number, and not None"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), ARGUMENTS)
def test_an_argument_of_another_type_is_named(name: str, value: Any, sentence: str, tmp_path: Path) -> None:
    given = {"model": nn.Linear(1, 1), "total": 1, "micro_batches": 1, "every": 1, "keep": 3, "step": 1, name: value}
    own = {key: given.pop(key) for key in ("total", "micro_batches", "every", "keep", "step")}

    def use() -> None:
        run = Run(**given)
        run.snapshot(own["step"], own["every"])
        run.save(tmp_path, own["step"], own["keep"])
        next(run.steps(own["total"], own["micro_batches"]))

    with pytest.raises(TypeError, match=sentence) as found:
        use()
    assert "\n" not in str(found.value)


def test_a_whole_number_is_good_in_any_type() -> None:
    model = nn.Linear(1, 1)
    given: dict[str, Any] = {"seed": np.int64(1), "snapshot_every": None, "compare_every": 10.0, "timeout_s": 60}
    run = Run(model=model, **given)
    total: Any = torch.tensor(2)
    micro_batches: Any = 3.0
    for step in run.steps(total, micro_batches):
        for _ in step:
            step.backward(model(torch.ones(1, 1)).sum())
    assert (run.step, len(step.losses)) == (2, 3)


def test_an_extra_state_that_cannot_be_sent_is_refused_by_name() -> None:
    class Layer(nn.Linear):
        def get_extra_state(self) -> io.BytesIO:
            return io.BytesIO(b"fp8")

        def set_extra_state(self, _state: io.BytesIO) -> None:
            pass

    run = Run(model=nn.Sequential(Layer(2, 1)))
    with pytest.raises(TypeError, match=r"model\['0\._extra_state'\] is a BytesIO, which cannot be sent"):
        next(run.steps(1, 1))


def test_an_optimizer_of_which_each_rank_has_a_part_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Linear(3, 1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(WrongUseError, match=r"optimizer is a ZeroRedundancyOptimizer, of whose state each rank has"):
        Run(model=model, optimizer=optimizer)


class Bare(torch.optim.Optimizer):
    """A `Bare` writes past torch, which knows nothing of its steps."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.defaults, self.state = {}, {}  # type: ignore[assignment]
        self.param_groups = [{"params": list(parameters), "lr": 0.1}]

    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)


def test_an_optimizer_whose_steps_torch_does_not_know_is_refused_and_its_state_copied_at_once() -> None:
    model = nn.Linear(3, 1)
    optimizer = Bare(model.parameters())
    run = Run(model=model, optimizer=optimizer)
    assert run._snapshots._unchanging() == []
    with pytest.raises(TypeError, match=r"Bare is a torch.optim.Optimizer that has not called super\(\).*tier 1"):
        next(run.steps(1, 1))
    with_step = Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert with_step._snapshots._unchanging() == list(model.parameters())


def test_a_compiled_model_is_trained() -> None:
    model = nn.Linear(3, 1)
    run = Run(model=torch.compile(model, backend="eager"), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]
    assert next(run.steps(1, 1)).number == 0
