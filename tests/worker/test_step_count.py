"""Counting the optimizer steps of scripts that know nothing of us, with the real torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import optimizer as torch_optimizer

from unicron_elastic import Run
from unicron_elastic.worker.pulse import Pulse, PulsePage
from unicron_elastic.worker.step_count import count_as_step, count_steps, made_before


class Counting:
    """A page that is fed by this process, and the first steps that were told."""

    def __init__(self) -> None:
        self.page = PulsePage()
        self.first: list[int] = []
        count_steps(Pulse(os.dup(self.page.fd)), self.first.append)

    @property
    def step(self) -> int:
        reading = self.page.read()
        assert reading is not None
        return reading.step


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    monkeypatch.setattr(torch_optimizer, "_global_optimizer_post_hooks", OrderedDict())  # the hook goes with the test
    count_as_step(0)  # of runs in tests before this one
    made_before(0)
    made = Counting()
    yield made
    made.page.close()


def _optimizer(**options: Any) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1, **options)


def test_each_step_beats(counting: Counting) -> None:
    optimizer = _optimizer()
    assert (counting.step, counting.first) == (0, [])
    for step in (1, 2, 3):
        optimizer.step()
        assert counting.step == step
    assert counting.first == [1]


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["a number", "a tensor"])
@pytest.mark.parametrize("has_schedule", [False, True])
def test_what_torch_steps_to_have_a_state_is_no_step(
    counting: Counting, rate: float | torch.Tensor, has_schedule: bool
) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    if has_schedule:  # it wraps the optimizer's step
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 2)
    _, state = get_state_dict(model, optimizer)
    set_state_dict(model, optimizer, model_state_dict=model.state_dict(), optim_state_dict=state)
    assert (counting.step, counting.first) == (0, [])
    for step in (1, 2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert counting.step == step
        get_state_dict(model, optimizer)
    assert (counting.step, counting.first) == (2, [1])


def test_a_step_at_a_rate_of_zero_is_a_step(counting: Counting) -> None:
    """A schedule that warms up begins there."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.0)
    optimizer.step()
    assert (counting.step, counting.first) == (1, [1])


@pytest.mark.parametrize("rate", [torch.tensor([0.1, 0.2]), "as scheduled", None], ids=["many", "a word", "none"])
def test_an_optimizer_with_rates_of_its_own_kind_steps_as_without_us(counting: Counting, rate: object) -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            """Do nothing with the rate."""

    optimizer = Own([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()
    assert (counting.step, counting.first) == (1, [1])


def test_two_optimizers_make_one_iteration(counting: Counting) -> None:
    first, second = _optimizer(), _optimizer()
    for step in (1, 2, 3):
        first.step()
        second.step()
        assert counting.step == step
    assert counting.first == [1]


def test_the_optimizer_that_steps_most_often_counts(counting: Counting) -> None:
    often, seldom = _optimizer(), _optimizer()
    for step in range(1, 7):
        if step % 3 == 0:
            seldom.step()
        often.step()
        assert counting.step == step


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    made_before(0)
    yield
    made_before(0)
    count_as_step(0)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_steps_of_a_run_are_counted_by_their_numbers(counting: Counting) -> None:
    nets = [torch.nn.Linear(2, 1) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    run = Run(model=torch.nn.ModuleList(nets), optimizer=optimizers[0], other=optimizers[1])
    steps_of = {  # by step, which optimizers step
        "in turn": [[0], [1]] * 3,
        "both": [[0, 1]] * 3,
        "one twice as often, and none": [[0], [0], [1], [], [0], [1]],
    }
    made = 0
    for which in steps_of.values():
        for step in run.steps(total=made + len(which), micro_batches=2):
            for _ in step:
                step.backward(sum(net(torch.ones(1, 2)).mean() for net in nets))
            for number in which[step.number - made]:
                optimizers[number].step()
                assert counting.step == step.number + 1
            assert counting.step >= step.number
        made += len(which)
    first, ends = counting.page.beats()
    assert (first, len(ends)) == (1, made)
    assert counting.first == [1]
    for _ in range(2):  # what the script trains by itself behind the run
        optimizers[1].step()
    assert counting.step == made + 2


@pytest.mark.usefixtures("alone")
def test_a_second_run_goes_on_with_the_count(counting: Counting) -> None:
    counts = []
    for _ in range(2):
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run = Run(model=net, optimizer=optimizer)
        for step in run.steps(total=3, micro_batches=1):
            for _index in step:
                step.backward(net(torch.ones(1, 2)).mean())
            optimizer.step()
            counts.append(counting.step)
    assert counts == sorted(counts)  # who begins anew falls to its first step
    assert counts[:3] == [1, 2, 3]
    assert counts[-1] > 4


def test_an_optimizer_made_anew_goes_on_with_the_count(counting: Counting) -> None:
    # Training in phases: each has an optimizer of its own, and progress must stay visible.
    kept = []
    for step in range(1, 5):
        optimizer = _optimizer()
        kept.append(optimizer)
        optimizer.step()
        optimizer.step()
        assert counting.step >= step


def test_a_forked_process_of_the_script_does_not_beat(counting: Counting) -> None:
    optimizer = _optimizer()
    child = os.fork()
    if child == 0:
        try:
            optimizer.step()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (counting.step, counting.first) == (0, [])
    optimizer.step()
    assert (counting.step, counting.first) == (1, [1])


def test_the_hook_goes_in_when_torch_is_imported_later() -> None:
    code = """
import json, os, sys
from unicron_elastic.worker.pulse import Pulse, PulsePage
from unicron_elastic.worker.step_count import count_steps
before = list(sys.meta_path)
page, first = PulsePage(), []
count_steps(Pulse(os.dup(page.fd)), first.append)
assert "torch" not in sys.modules
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import optimizer as torch_optimizer
module = sys.modules["torch.optim.optimizer"]
parameter = torch.nn.Parameter(torch.ones(2))
parameter.grad = torch.ones(2)
optimizer = torch.optim.SGD([parameter], lr=0.1)
optimizer.step()
optimizer.step()
print(json.dumps({
    "ours": [type(finder).__name__ for finder in sys.meta_path if type(finder).__module__.startswith("unicron")],
    "kept": all(finder in sys.meta_path for finder in before),
    "loaders": [type(module.__spec__.loader).__name__, type(module.__loader__).__name__],
    "step": page.read().step,
    "first": first,
}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == {
        "ours": [],
        "kept": True,
        "loaders": ["SourceFileLoader", "SourceFileLoader"],
        "step": 2,
        "first": [1],
    }
