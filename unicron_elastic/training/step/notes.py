"""What travels behind the gradients, and is summed up with them: it says what is in the sum.

One after the other: the loss of each micro-batch; the weight of each; how often each was added, which must be once; how
many have a weight, which must be all or none; how many ranks have a gradient of each parameter; the stamps, and how
many ranks there are; digests of their states (``comparison.py``); how many bytes of buffers micro-batch 0 has made; how
many know of a newcomer on its way; how many have begun a bucket too early. Whole numbers below 2**24 are exact in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unicron_elastic.training.step.comparison import NOTES as DIGEST_NOTES
from unicron_elastic.training.step.wrong_use import WrongUseError

NOTES_DTYPE = torch.float32
_STAMP = 4  # bytes
_DIGITS, _BASE = 2, 2**20  # in which a number of bytes is written
_FLAGS = 2  # at the end


class Notes:
    """`Notes` are those of this rank, of a step with so many micro-batches, in ``memory``.

    After the reduction that has the sum over all ranks.
    """

    def __init__(self, memory: Tensor, micro_batches: int, stamp: bytes = bytes(_STAMP)) -> None:
        self.memory = memory
        self._micro_batches = micro_batches
        self._weights = memory[micro_batches : 2 * micro_batches]
        self._counts = memory[2 * micro_batches : 3 * micro_batches]
        self._weighted = memory[3 * micro_batches : 3 * micro_batches + 1]
        self._stamp = stamp
        self.losses = memory[:micro_batches]
        self.weight: float | None = None  # of all micro-batches, once the sum is read; None: they have none

    @staticmethod
    def size(micro_batches: int, parameters: int) -> int:
        """How many numbers they are."""
        return 3 * micro_batches + 1 + parameters + _STAMP + 1 + DIGEST_NOTES + _DIGITS + _FLAGS

    def begin(self, stamp: bytes) -> None:
        """Begins a step, with zeros; ``stamp``: four bytes that tell it, and what is trained in it, from others."""
        self._stamp = stamp
        self.memory.zero_()

    def add(self, index: int, loss: Tensor, weight: float | None) -> None:
        """This rank has computed a micro-batch; ``weight``: None if it has none."""
        self.losses[index].copy_(loss)
        self._counts[index] += 1
        if weight is not None:
            self._weights[index] = weight
            self._weighted += 1

    def write(
        self,
        staged: Tensor,
        touched: Sequence[bool],
        digest: Sequence[float],
        *,
        made_bytes: int,
        is_awaited: bool,
        must_repeat: bool,
    ) -> None:
        """Writes them, and what is known only now, to where they are summed up.

        ``touched``: whether this rank has a gradient of each parameter.
        """
        whole = [*touched, *self._stamp, 1, *digest, *divmod(made_bytes, _BASE), is_awaited, must_repeat]
        rest = [float(each) for each in whole]
        staged.copy_(self.memory)
        staged[3 * self._micro_batches + 1 :].copy_(torch.tensor(rest, dtype=NOTES_DTYPE))

    def read(self) -> list[bool]:
        """Whether any rank has a gradient of each parameter, from the sum.

        Then ``weight`` is known as well. Raises RuntimeError if it is not the sum of this step's micro-batches, each
        once, and WrongUseError if some have a weight and others have not, or if all weights are zero.
        """
        count = self._micro_batches
        numbers = self.memory[count:].tolist()  # all at once: a device is waited for each time
        weights, counts = numbers[:count], numbers[count : 2 * count]
        weighted, *rest = numbers[2 * count :]
        ends = -DIGEST_NOTES - _DIGITS - _FLAGS - 1
        touched, stamp, ranks = rest[: ends - _STAMP], rest[ends - _STAMP : ends], rest[ends]
        if stamp != [ranks * byte for byte in self._stamp]:
            raise RuntimeError(
                "the ranks have summed up gradients of different steps, or of different parameters: all must make the "
                "same steps, and freeze and unfreeze the same parameters before the same step"
            )
        wrong = [f"{index} ({count:g} times)" for index, count in enumerate(counts) if count != 1]
        if wrong:
            raise RuntimeError(f"the reduced gradients must have each micro-batch once, and have {', '.join(wrong)}")
        self.weight = self._total(weights, round(weighted))
        return [count > 0 for count in touched]

    def _total(self, weights: Sequence[float], weighted: int) -> float | None:
        if not weighted:
            return None
        if weighted != self._micro_batches:
            raise WrongUseError(
                f"step.backward(loss, weight=...) got a weight for {weighted} of {self._micro_batches} micro-batches: "
                "give one for each, on all ranks, or for none"
            )
        return math.fsum(weights)


def digest_notes(notes: Tensor) -> list[float]:
    """The sums of what ``comparison.written`` gave."""
    end = -_DIGITS - _FLAGS
    found: list[float] = notes[end - DIGEST_NOTES : end].tolist()
    return found


def made_bytes(notes: Tensor) -> int:
    """How many bytes of buffers micro-batch 0 has made, from the sum."""
    upper, lower = notes[-_DIGITS - _FLAGS : -_FLAGS].tolist()
    return int(upper) * _BASE + int(lower)


def flags(notes: Tensor) -> tuple[bool, bool]:
    """Whether any rank knows of a newcomer on its way, and whether any has begun a bucket too early."""
    is_awaited, must_repeat = notes[-_FLAGS:].tolist()
    return is_awaited > 0, must_repeat > 0
