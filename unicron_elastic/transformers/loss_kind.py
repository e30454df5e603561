"""What a Trainer's loss is of: told by what it comes to for other numbers of items."""

from __future__ import annotations

import math
from enum import Enum

PART = 1024.0  # a power of 2, by which sums are divided exactly
_ROUNDING = 1e-5


class LossKind(Enum):
    """`LossKind` is how the loss of a batch depends on ``num_items_in_batch``."""

    SUM = "a sum, divided by the number of items"
    ADDED = "the same for every number; losses of batches are added up"
    UNKNOWN = "not told yet"
    OTHER = "neither"


def loss_kind(one: float, part: float, of_ranks: float, ranks: int) -> LossKind:
    """Return of which kind it is: ``one`` is the loss for 1 item, ``part`` for ``PART``, ``of_ranks`` among ``ranks``.

    The Trainer's own way multiplies by the number of ranks, as DistributedDataParallel takes the mean over them; a loss
    that heeds neither number would be another among ranks than in one process, and is ``OTHER``.
    """
    if not all(map(math.isfinite, (one, part, of_ranks))) or one == part == 0:
        return LossKind.UNKNOWN
    if _are_close(one, part * PART):
        return LossKind.SUM
    if _are_close(one, part) and _are_close(of_ranks, one * ranks):
        return LossKind.ADDED
    return LossKind.OTHER


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING)
