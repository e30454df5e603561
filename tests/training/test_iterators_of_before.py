"""An iterator that a script made before it took a state over has an order of before, and nothing gone is remembered."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from script_in_epochs import BATCH, EPOCH, Noisy, Script, shuffled
from torch import nn
from torch.utils.data import DataLoader, Subset

from unicron_elastic.training.run import Run

SAID = "unicron: an iterator over the DataLoader was made before restore()"


class Prefetching(Script):
    """`Prefetching` goes on with the iterator that it made with its loader."""

    held: Any = None

    @classmethod
    def _numbered(cls, _: Any, step: int) -> Any:
        for batch in cls.held:
            yield step, batch
            step += 1


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("is_drawn", [True, False])
def test_a_line_says_that_its_order_was_drawn_before(
    *, is_drawn: bool, is_behind: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun() -> Any:
        loader = DataLoader(Noisy(), BATCH, shuffle=is_drawn)
        Prefetching.held = iter(loader)
        return loader

    script = Prefetching(begun, snapshot_behind=is_behind)
    script.train(0, EPOCH)
    assert capsys.readouterr().err == ""
    script.train(3, EPOCH)
    said = capsys.readouterr().err
    assert said.startswith(SAID) is is_drawn
    assert said.count("\n") == is_drawn
    Prefetching.held = None


def test_one_that_the_script_does_not_go_on_with_is_no_reason_to_say_anything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = []

    def begun() -> Any:
        loader = shuffled()
        held.append(iter(loader))
        return loader

    script = Script(begun, snapshot_behind=True)
    whole = script.train(0, EPOCH)
    assert script.train(3, EPOCH) == whole[3:]
    assert capsys.readouterr().err == ""


def sizes(of: Any) -> dict[str, int]:
    """Return how much a run's epochs, and what belongs to them, have in their lists."""
    parts = {"epochs": of._epochs, "own": of._epochs._own, "looks": of._epochs._looks}
    return {
        f"{name}.{part}": len(value)
        for name, each in parts.items()
        for part, value in vars(each).items()
        if isinstance(value, list | dict | set)
    }


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("is_restored", [False, True])
def test_nothing_is_kept_of_loaders_that_are_gone(*, is_restored: bool, trains: bool) -> None:
    """As of those with which a script evaluates, made anew for each epoch."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0001)
    run = Run(model=model, optimizer=optimizer)
    held = iter(shuffled())
    next(held)
    run.snapshot(0)
    if is_restored:
        run.load_state_dict(run.state_dict())

    def go(first: int) -> None:
        for number in range(first, first + 50):
            loader = DataLoader(
                Subset(Noisy(), range(8)), 2, shuffle=True, generator=torch.Generator().manual_seed(number)
            )
            for batch in (next(iter(loader)), *loader):
                if trains:
                    model(batch).sum().backward()
                    optimizer.step()
            run.snapshot(number)

    go(1)
    gc.collect()
    before = sizes(run)
    go(51)
    gc.collect()
    assert sizes(run) == before


def test_of_loaders_of_ever_other_lengths_the_latest_are_remembered() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0001)
    run = Run(model=model, optimizer=optimizer)
    for length in range(1, 101):
        loader = DataLoader(Subset(Noisy(), [0] * length), length, generator=torch.Generator())
        next(iter(loader))
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
    gc.collect()
    assert max(sizes(run).values()) <= 65
