"""What is registered takes over the state of another process, whatever its tensors were made for."""

from __future__ import annotations

import copy

import torch
from torch import nn

from unicron_elastic.training.registered import Registered


def test_an_average_that_was_made_for_inference_takes_a_state_over() -> None:
    given = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.inference_mode():
        average = copy.deepcopy(given)
        for parameter in average.parameters():
            parameter.zero_()
    state = Registered({"ema": given}).state()
    Registered({"ema": average}).load(state, {})
    assert all(each.is_inference() for each in average.parameters())
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(average.parameters(), given.parameters(), strict=True))
