"""Who wants to know hears of each step, and torch has no more hooks for that than one before and one behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as of_torch

from unicron_elastic import Run
from unicron_elastic.compat.watching.optimizers import watch_after_steps, watch_before_steps


class Hearing:
    """`Hearing` notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def before_step(self, _optimizer: Any) -> None:
        """Notes it."""
        self.heard.append("before")

    def after_step(self, _optimizer: Any) -> None:
        """Notes it."""
        self.heard.append("after")


def _step() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def test_each_hears_of_what_it_wants_to_know() -> None:
    both, one = Hearing(), Hearing()
    watch_before_steps(both)
    watch_after_steps(both)
    watch_after_steps(both)
    watch_after_steps(one)
    _step()
    assert (both.heard, one.heard) == (["before", "after"], ["after"])


def test_a_run_leaves_no_hook_of_all_optimizers_behind() -> None:
    def hooks() -> int:
        return len(of_torch._global_optimizer_pre_hooks) + len(of_torch._global_optimizer_post_hooks)

    def run() -> Run:
        model = nn.Linear(1, 1)
        return Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    run()
    before = hooks()
    for _ in range(3):
        run()
    assert hooks() == before
