"""What a rank gives to a mean or a sum over all ranks, how it is summed, and how the result is given back.

Everything is summed in float64, in which halves and 32 bits do not overflow and all integers below 2**53 are exact, and
is scaled by a power of two meanwhile, so that float64 does not overflow either. A mean or a sum of floating or complex
numbers has their type. That of integers and booleans is float64 if it is a mean, as it is no integer; their sum is
int64, and summed as such.

The ranks first exchange messages of one size for all, which say what is asked and have the numbers, if they are few.
So nothing is summed up that is not of the same kind.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Number
from typing import Any, Protocol

import torch
from torch import Tensor

from unicron_elastic.engine.protocol.said import MismatchError

MESSAGE_BYTES = 2048
TEXT_BYTES = 160
FEW = (MESSAGE_BYTES - TEXT_BYTES) // 8  # numbers
_WHOLE_BELOW = 2**63
MEAN, SUM = "mean", "all_reduce"  # as the run's calls are called


class AllMembers(Protocol):
    """`AllMembers` are the members of a world, as far as what they do together between steps needs it."""

    @property
    def rank(self) -> int:
        """This one's."""

    def sum(self, tensor: Tensor) -> None:
        """Sum it over all members, in place."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give all members what ``source`` has."""


class InReplica(Protocol):
    """`InReplica` are the processes of one replica."""

    @property
    def seats(self) -> int:
        """How many they are."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of what each has."""


@dataclass(frozen=True, slots=True)
class MeanShare:
    """`MeanShare` is what one rank gives to such a ``call``, and what it was.

    ``numbers`` are float64, (n,), complex ones as pairs; or int64, where integers are summed.
    """

    call: str
    numbers: Tensor
    dtype: torch.dtype  # of the result
    given: torch.dtype
    shape: torch.Size
    device: torch.device

    @classmethod
    def of(cls, value: Tensor | complex, device: torch.device, call: str = MEAN) -> MeanShare:
        """The share of a rank that trains on ``device``. Raises TypeError for what has no mean, or no sum."""
        if not isinstance(value, Tensor):
            value = _number(value, call)
        _refuse(value, call)
        keeps = value.is_floating_point() or value.is_complex()
        whole = torch.int64 if call == SUM else torch.float64
        wide = torch.complex128 if value.is_complex() else torch.float64 if keeps else whole
        try:
            numbers = value.detach().to(device, wide, copy=True).resolve_conj().resolve_neg().contiguous()
        except (RuntimeError, NotImplementedError, TypeError):
            raise TypeError(f"run.{call}(value) cannot sum {_short(value.dtype)}") from None
        if numbers.is_complex():
            numbers = torch.view_as_real(numbers)
        dtype = value.dtype if keeps else whole
        return cls(call, numbers.reshape(-1), dtype, value.dtype, value.shape, value.device)

    @property
    def kind(self) -> str:
        """What must be the same for all ranks."""
        return f"{_short(self.given)} {list(self.shape)}"

    def given_back(self, numbers: Tensor, mates: InReplica | None = None) -> Tensor:
        """The result, of its type and shape, where the value was; over all ``mates``, if there are any."""
        if mates is not None:
            numbers = mates.sum(numbers)
            numbers = numbers if self.call == SUM else numbers / mates.seats
        if self.dtype.is_complex:
            numbers = torch.view_as_complex(numbers.view(-1, 2))
        return numbers.to(self.device, self.dtype, copy=True).reshape(self.shape)

    def message(self, label: str) -> Tensor:
        """What is told to all: what is asked, and the numbers, if they are few."""
        return message(label, self.numbers if self.is_small else self.numbers[:0])

    @property
    def is_small(self) -> bool:
        """Whether the numbers are in the message."""
        count: int = self.numbers.numel()
        return count <= FEW

    def lacks(self, lost: frozenset[int]) -> frozenset[int]:
        """Whose shares are not in the result, of those that were ``lost`` since shares were dealt."""
        return lost

    def result(self, messages: Sequence[Tensor], members: AllMembers) -> Tensor:
        """The result's numbers, from what all have told, which is of the same kind."""
        is_whole = not self.numbers.is_floating_point()
        scale = 1 if is_whole else 2.0 ** -(len(messages) - 1).bit_length()
        if self.is_small:
            total = torch.zeros_like(self.numbers)
            for told in messages:  # in the order of ranks, on all of them
                total.add_(few(told, total.numel(), total.dtype), alpha=scale)
        else:
            total = self.numbers * scale
            members.sum(total)
        if self.call == SUM:
            return total if is_whole else total / scale
        return total / (len(messages) * scale)


def message(label: str, numbers: Tensor) -> Tensor:
    """What a rank tells to all: what it waits for, and few numbers of 8 bytes each. (MESSAGE_BYTES,) bytes."""
    text = label.encode()
    if len(text) > TEXT_BYTES:
        text = text[: TEXT_BYTES - 20] + b"... " + hashlib.sha256(text).hexdigest()[:16].encode()
    whole = bytearray(text.ljust(TEXT_BYTES).ljust(MESSAGE_BYTES, b"\0"))
    # In memory of torch's own: gloo's threads may be the last to hold it, and cannot let go of Python's at the end.
    told = torch.frombuffer(whole, dtype=torch.uint8).to(numbers.device, copy=True)
    few(told, numbers.numel(), numbers.dtype).copy_(numbers)
    return told


def few(told: Tensor, count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """The first ``count`` numbers of a message."""
    return told[TEXT_BYTES : TEXT_BYTES + 8 * count].view(dtype)


def check_same(messages: Sequence[Tensor]) -> None:
    """Raises MismatchError if the ranks, in this order, do not all ask the same."""
    here = messages if messages[0].is_cpu else torch.stack(list(messages)).cpu()
    asked = [ctypes.string_at(message.data_ptr(), TEXT_BYTES) for message in here]
    for rank, text in enumerate(asked):
        if text != asked[0]:
            first, other = (each.decode(errors="replace").rstrip() for each in (asked[0], text))
            raise MismatchError(
                f"rank 0 waits for {first}, and rank {rank} for {other}: all ranks must make the same calls of "
                "run.steps(), run.mean() and its like, with values of the same type and shape"
            )


def _number(value: Any, call: str) -> Tensor:
    """A number of Python's, or numpy's. Raises TypeError, and OverflowError for an integer that is summed."""
    if not isinstance(value, Number):
        raise TypeError(f"run.{call}(value) takes a tensor or a number, and not a {type(value).__name__}")
    if isinstance(value, complex):
        return torch.tensor(value, dtype=torch.complex128)
    if call == SUM and isinstance(value, Integral):
        if abs(int(value)) >= _WHOLE_BELOW:
            raise OverflowError(f"run.{call}(value) takes integers below 2**63, and got {value}")
        return torch.tensor(int(value), dtype=torch.int64)
    return torch.tensor(float(value), dtype=torch.float64)  # type: ignore[arg-type]


def _refuse(value: Tensor, call: str) -> None:
    """Raises TypeError for a tensor whose numbers do not simply lie in memory."""
    if call == SUM and value.dtype is torch.uint64:
        raise TypeError(f"run.{call}(value) takes no uint64, as it sums integers in int64")
    if hasattr(value, "full_tensor"):
        raise TypeError(f"run.{call}(value) takes no DTensor: give it value.full_tensor()")
    if value.is_quantized:
        raise TypeError(f"run.{call}(value) takes no quantized tensor: give it value.dequantize()")
    if value.is_nested or value.layout != torch.strided:
        kind = "nested tensor" if value.is_nested else f"tensor of the layout {_short(value.layout)}"
        raise TypeError(f"run.{call}(value) takes no {kind}: give it a dense one, as of value.to_dense()")
    if value.is_meta:
        raise TypeError(f"run.{call}(value) takes no tensor on the meta device, which has no numbers")


def _short(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")
