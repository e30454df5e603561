"""How many micro-batches each step has: as many in all, or as a function of the script's says of each."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from unicron_elastic.training.whole_number import shown, whole_number


class MicroBatchCounts:
    """`MicroBatchCounts` are those of the steps of one call of ``run.steps()``."""

    def __init__(self, given: int | Callable[[int], int]) -> None:
        """``given``: a number for all steps, or a function of the step. Raises TypeError for what is neither."""
        self._function = given if callable(given) else None
        self._number = 1 if callable(given) else whole_number("micro_batches", given)

    @property
    def are_by_step(self) -> bool:
        """Return whether steps may differ."""
        return self._function is not None

    @property
    def number(self) -> int:
        """Return that of all steps; 1 if a function gives it for each."""
        return self._number

    @property
    def kind(self) -> str:
        """Return what all ranks must have been given, in a few words."""
        return "micro-batches by a function of the step" if self.are_by_step else f"{self._number} micro-batches"

    def why_not_after(self, before: MicroBatchCounts) -> str:
        """Return why a call of ``run.steps()`` with these cannot follow one with those ``before``; "" if it can."""
        if before.kind == self.kind:
            return ""
        if before.are_by_step or self.are_by_step:
            return f"all calls of run.steps() in a run are alike: {before.kind}, and not {self.kind}"
        return (
            f"all steps of a run have the same number of micro-batches: {before.number}, not {self.number}; a function "
            "of the step gives each its own"
        )

    def of(self, step: int) -> int:
        """Return that of this step. Raises TypeError and ValueError for what a function gives that is no such number.

        A float is refused even if it is whole: what is computed with a fraction is one in some other step.
        """
        if self._function is None:
            return self._number
        given: Any = self._function(step)
        try:
            number = operator.index(given)
        except TypeError:
            raise TypeError(
                f"micro_batches, called for step {step}, must return a whole number, and not {shown(given)}"
            ) from None
        if number < 1:
            raise ValueError(f"micro_batches, called for step {step}, must return 1 or more, and returned {number}")
        return number
