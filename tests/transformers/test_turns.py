from __future__ import annotations

from typing import Any

import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader

from unicron_elastic.training.loader.epoch_plan import EpochPlan
from unicron_elastic.transformers.turns import Turns


def test_who_skips_turns_draws_no_number_of_everybodys() -> None:
    loader: Any = DataLoader(range(8), 2)  # type: ignore[arg-type]
    before = torch.get_rng_state()
    skipped: Any = skip_first_batches(Turns(loader, EpochPlan(4, 1, 1)), 2)
    iter(skipped)
    assert torch.equal(torch.get_rng_state(), before)
