from __future__ import annotations

import math

import pytest

from unicron_elastic.transformers.loss_kind import PART, LossKind, loss_kind


@pytest.mark.parametrize(
    ("one", "part", "of_ranks", "kind"),
    [
        (5000.0, 5000.0 / PART, 10_000.0, LossKind.SUM),
        (5000.0, 5000.0 / PART, 5000.0, LossKind.SUM),
        (2.0, 2.0, 4.0, LossKind.ADDED),
        (2.0, 2.0, 2.0, LossKind.OTHER),  # a mean: two ranks have half of what one process adds up
        (5000.002, 5000.0 / PART + 0.002, 10_000.004, LossKind.OTHER),  # with an auxiliary loss of 0.002
        (0.0, 0.0, 0.0, LossKind.UNKNOWN),  # of nothing
        (math.nan, 1.0, 1.0, LossKind.UNKNOWN),
        (math.inf, math.inf, math.inf, LossKind.UNKNOWN),
    ],
)
def test_it_is_told_from_three_losses(one: float, part: float, of_ranks: float, kind: LossKind) -> None:
    assert loss_kind(one, part, of_ranks, 2) is kind


def test_alone_a_mean_is_added_up() -> None:
    assert loss_kind(2.0, 2.0, 2.0, 1) is LossKind.ADDED
