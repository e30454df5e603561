"""A script whose steps are seldom those at which a snapshot is kept is told so, before it needs one."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from unicron_elastic import Run
from unicron_elastic.training.snapshot.seldom_due import SeldomDue


def told(steps: Iterable[int], every: int) -> list[str]:
    seldom = SeldomDue()
    found = [seldom.sentence(step, every, is_due=bool(every) and step % every == 0) for step in steps]
    return [each for each in found if each]


def test_who_counts_by_another_number_is_told_once() -> None:
    (sentence,) = told(range(1, 3000, 16), 10)
    assert sentence.startswith("run.snapshot(step, every=10) has kept nothing for 21 steps in a row, the latest of")


@pytest.mark.parametrize(
    ("steps", "every"),
    [
        (range(1, 400), 100),
        (range(2, 4000, 2), 100),
        ([step for step in range(1, 300) for _ in range(8)], 100),  # behind each micro-batch
        (range(1, 300), 0),  # the copies of a neighbour alone
        (range(1, 20, 2), 10),  # of which no more are known yet
    ],
)
def test_who_comes_to_one_in_time_is_not(steps: Iterable[int], every: int) -> None:
    assert told(steps, every) == []


@pytest.mark.usefixtures("no_launcher")
def test_a_run_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(2, 1)
    run = Run(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    for step in range(1, 200, 16):
        run.snapshot(step, every=4)
    assert capsys.readouterr().err.count("unicron: run.snapshot(step, every=4) has kept nothing for 9 steps") == 1
