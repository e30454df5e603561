"""Which batches of an epoch belong to which optimizer step, as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class EpochPlan(NamedTuple):
    """`EpochPlan` is how the ``batches`` of each epoch are dealt to optimizer steps, of all ranks together.

    The Trainer of each of ``ranks`` processes takes ``accumulated`` batches for a step; the last step of an epoch has
    those that are left.
    """

    batches: int
    accumulated: int
    ranks: int

    @property
    def per_step(self) -> int:
        """Return how many batches a step has that is not an epoch's last one."""
        return self.accumulated * self.ranks

    @property
    def steps(self) -> int:
        """Return how many steps an epoch has."""
        return -(-self.batches // self.per_step)

    @property
    def turns(self) -> int:
        """Return how many batches of an epoch the Trainer's loop counts in one of its processes."""
        return -(-self.batches // self.ranks)

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and which one of this epoch it is."""
        return divmod(step, self.steps)

    def micro_batches(self, step: int) -> int:
        """Return how many batches a step has."""
        return min(self.per_step, self.batches - self.place(step)[1] * self.per_step)

    @property
    def counts(self) -> int | Callable[[int], int]:
        """Return how many batches steps have, as ``run.steps()`` takes it: an epoch's last one may have fewer."""
        return self.micro_batches if self.batches % self.per_step else self.per_step

    def batch(self, step: int, index: int) -> tuple[int, int]:
        """Return the epoch, and which of its batches this one of the step is. Raises ValueError if there is none."""
        if step < 0 or not 0 <= index < self.micro_batches(step):
            raise ValueError(f"there is no micro-batch {index} of step {step}")
        epoch, place = self.place(step)
        return epoch, place * self.per_step + index
