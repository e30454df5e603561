from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from unicron_elastic import Run, WrongUseError
from unicron_elastic.accelerate import InPlaceAccelerator


def data(samples: int = 11) -> TensorDataset:
    return TensorDataset(torch.arange(samples, dtype=torch.float32)[:, None])


def prepared(accelerator: Any) -> tuple[Any, ...]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda count: 0.5**count)
    found: tuple[Any, ...] = accelerator.prepare(model, optimizer, DataLoader(data(), 2), scheduler)
    return found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fsdp_plugin": FullyShardedDataParallelPlugin}, "FSDP divides the model"),
        ({"mixed_precision": "fp16"}, "fp16 needs a gradient scaler"),
        ({"dynamo_backend": "eager"}, "the dynamo backend EAGER wraps the model"),
        (
            {"dataloader_config": accelerate.DataLoaderConfiguration(split_batches=True)},
            "with split_batches a batch is not one rank's",
        ),
    ],
)
def test_what_cannot_go_on_is_refused_when_it_is_made(arguments: dict[str, Any], words: str) -> None:
    made = {name: value() if isinstance(value, type) else value for name, value in arguments.items()}
    with pytest.raises(WrongUseError, match=re.escape(words)):
        InPlaceAccelerator(cpu=True, **made)


def test_what_accelerates_launcher_divides_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(WrongUseError, match="DeepSpeed divides the model"):
        InPlaceAccelerator(cpu=True)


def test_a_second_one_is_refused() -> None:
    accelerate.Accelerator(cpu=True)
    with pytest.raises(WrongUseError, match="are there already"):
        InPlaceAccelerator(cpu=True)


@pytest.mark.parametrize("ranks", [0, -1])
def test_ranks_are_one_or_more(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"ranks must be 1 or more, got {ranks}"):
        InPlaceAccelerator(cpu=True, ranks=ranks)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("backward", r"step.backward\(loss\), within"),
        ("accumulate", "stand for accelerator.accumulate"),
        ("gather", "each rank has all of the data"),
        ("reduce", r"use run.mean\(value\)"),
    ],
)
def test_what_would_be_of_one_rank_is_refused(name: str, words: str) -> None:
    accelerator = InPlaceAccelerator(cpu=True)
    with pytest.raises(WrongUseError, match=words):
        getattr(accelerator, name)(torch.ones(1))
    with pytest.raises(WrongUseError, match="check_trigger"):
        accelerator.check_trigger()


def test_metrics_are_of_all_data_on_each_rank() -> None:
    accelerator = InPlaceAccelerator(cpu=True)
    loader: Any = accelerator.prepare(DataLoader(TensorDataset(torch.arange(9)), 4))
    assert [len(accelerator.gather_for_metrics(batch)) for (batch,) in loader] == [4, 4, 1]
    assert accelerator.gather_for_metrics({"text": ["a"]}, use_gather_object=True) == {"text": ["a"]}


def test_a_scheduler_makes_as_many_steps_as_in_so_many_processes() -> None:
    accelerator = InPlaceAccelerator(cpu=True, ranks=3)
    _, optimizer, _, scheduler = prepared(accelerator)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.01 * 0.5**3]
    assert accelerator.num_processes == 1


def test_a_run_trains_the_batches_of_all_ranks() -> None:
    accelerator = InPlaceAccelerator(cpu=True, ranks=2, gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = prepared(accelerator)
    batches = accelerator.batches(loader)
    with pytest.raises(WrongUseError, match=r"call Run.of\(accelerator\) before batches.steps"):
        next(batches.steps(0))
    regroups: list[int] = []
    run = Run.of(accelerator, on_regroup=lambda: regroups.append(1))
    with pytest.raises(WrongUseError, match=r"has to stand before Run.of"):
        accelerator.batches(loader)
    seen = []
    for epoch in range(2):
        for step in batches.steps(epoch):
            for index in step:
                (batch,) = batches(step.number, index)
                seen.append((step.number, batch.flatten().tolist()))
                step.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
    assert batches.steps_per_epoch == 2
    of_steps = [[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10]]
    assert seen == [(number, each) for number in range(4) for each in of_steps[number % 2]]
    assert scheduler.scheduler.last_epoch == 4 * 2
    assert run.step == 4
    assert regroups
    assert accelerator.is_main_process
    accelerator.end_training()


def test_what_can_only_be_iterated_is_refused() -> None:
    class Stream(IterableDataset[torch.Tensor]):
        """`Stream` has no numbers."""

        def __iter__(self) -> Any:
            return iter(torch.ones(4, 1))

    accelerator = InPlaceAccelerator(cpu=True)
    with pytest.raises(WrongUseError, match=r"what batches\(\) was given has a dataset that can only"):
        accelerator.batches(accelerator.prepare(DataLoader(Stream(), 2)))


def test_what_a_sampler_draws_goes_by_torchs_seed_or_the_one_given() -> None:
    accelerator = InPlaceAccelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(data(32), 32, shuffle=True))

    def order(of_script: int, **options: Any) -> list[float]:
        torch.manual_seed(of_script)
        found: list[float] = accelerator.batches(loader, **options)(0, 0)[0].flatten().tolist()
        return found

    assert order(1) == order(1) != order(2)
    assert order(1, seed=3) == order(2, seed=3) != order(1)


def test_another_order_than_the_others_is_refused() -> None:
    accelerator = InPlaceAccelerator(cpu=True)
    _, _, loader, _ = prepared(accelerator)
    batches = accelerator.batches(loader)
    batches.load_state_dict(batches.state_dict())
    with pytest.raises(ValueError, match="has the samples of epoch 0 in another order"):
        batches.load_state_dict({"epoch": 0, "digest": "another"})


def test_without_accelerate_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['accelerate'] = None; import unicron_elastic.accelerate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "the Python module accelerate is missing; install it" in done.stderr
