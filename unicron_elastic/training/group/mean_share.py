"""What a rank gives to a mean over all ranks, how it is summed, and how the mean is given back.

Everything is summed in float64, in which halves and 32 bits do not overflow and all integers below 2**53 are exact, and
is scaled by a power of two meanwhile, so that float64 does not overflow either. A mean of floating or complex numbers
has their type; that of integers and booleans is float64, as it is no integer.

The ranks first exchange messages of one size for all, which say what is asked and have the numbers, if they are few.
So nothing is summed up that is not of the same kind.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from unicron_elastic.engine.protocol.said import MismatchError

MESSAGE_BYTES = 2048
TEXT_BYTES = 160
FEW = (MESSAGE_BYTES - TEXT_BYTES) // 8  # numbers


@dataclass(frozen=True, slots=True)
class MeanShare:
    """`MeanShare` is what one rank gives: ``numbers`` in float64, (n,), complex ones as pairs; and what it was."""

    numbers: Tensor
    dtype: torch.dtype  # of the mean
    given: torch.dtype
    shape: torch.Size
    device: torch.device

    @classmethod
    def of(cls, value: Tensor | complex, device: torch.device) -> MeanShare:
        """The share of a rank that trains on ``device``. Raises TypeError for what has no mean."""
        if not isinstance(value, Tensor):
            value = _number(value)
        _refuse(value)
        wide = torch.complex128 if value.is_complex() else torch.float64
        try:
            numbers = value.detach().to(device, wide, copy=True).resolve_conj().resolve_neg().contiguous()
        except (RuntimeError, NotImplementedError, TypeError):
            raise TypeError(f"run.mean(value) cannot sum {_short(value.dtype)}") from None
        if numbers.is_complex():
            numbers = torch.view_as_real(numbers)
        keeps = value.is_floating_point() or value.is_complex()
        return cls(numbers.reshape(-1), value.dtype if keeps else torch.float64, value.dtype, value.shape, value.device)

    @property
    def kind(self) -> str:
        """What must be the same for all ranks."""
        return f"{_short(self.given)} {list(self.shape)}"

    def given_back(self, numbers: Tensor) -> Tensor:
        """The mean, of its type and shape, where the value was."""
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

    def mean(self, messages: Sequence[Tensor], all_reduce: Callable[[Tensor], None]) -> Tensor:
        """The mean's numbers, from what all have told, which is of the same kind."""
        scale = 2.0 ** -(len(messages) - 1).bit_length()
        if self.is_small:
            total = torch.zeros_like(self.numbers)
            for told in messages:  # in the order of ranks, on all of them
                total.add_(few(told, total.numel()), alpha=scale)
        else:
            total = self.numbers * scale
            all_reduce(total)
        return total / (len(messages) * scale)


def message(label: str, numbers: Tensor) -> Tensor:
    """What a rank tells to all: what it waits for, and few numbers in float64. (MESSAGE_BYTES,) bytes."""
    text = label.encode()
    if len(text) > TEXT_BYTES:
        text = text[: TEXT_BYTES - 20] + b"... " + hashlib.sha256(text).hexdigest()[:16].encode()
    whole = bytearray(text.ljust(TEXT_BYTES).ljust(MESSAGE_BYTES, b"\0"))
    # In memory of torch's own: gloo's threads may be the last to hold it, and cannot let go of Python's at the end.
    told = torch.frombuffer(whole, dtype=torch.uint8).to(numbers.device, copy=True)
    few(told, numbers.numel()).copy_(numbers)
    return told


def few(told: Tensor, count: int) -> Tensor:
    """The first ``count`` numbers of a message."""
    return told[TEXT_BYTES : TEXT_BYTES + 8 * count].view(torch.float64)


def check_same(messages: Sequence[Tensor]) -> None:
    """Raises MismatchError if the ranks, in this order, do not all ask the same."""
    here = messages if messages[0].is_cpu else torch.stack(list(messages)).cpu()
    asked = [ctypes.string_at(message.data_ptr(), TEXT_BYTES) for message in here]
    for rank, text in enumerate(asked):
        if text != asked[0]:
            first, other = (each.decode(errors="replace").rstrip() for each in (asked[0], text))
            raise MismatchError(
                f"rank 0 waits for {first}, and rank {rank} for {other}: all ranks must make the same calls of "
                "run.steps() and run.mean(), with values of the same type and shape"
            )


def _number(value: Any) -> Tensor:
    """A number of Python's, or numpy's. Raises TypeError."""
    if not isinstance(value, Number):
        raise TypeError(f"run.mean(value) takes a tensor or a number, and not a {type(value).__name__}")
    if isinstance(value, complex):
        return torch.tensor(value, dtype=torch.complex128)
    return torch.tensor(float(value), dtype=torch.float64)  # type: ignore[arg-type]


def _refuse(value: Tensor) -> None:
    """Raises TypeError for a tensor whose numbers do not simply lie in memory."""
    if hasattr(value, "full_tensor"):
        raise TypeError("run.mean(value) takes no DTensor: give it value.full_tensor()")
    if value.is_quantized:
        raise TypeError("run.mean(value) takes no quantized tensor: give it value.dequantize()")
    if value.is_nested or value.layout != torch.strided:
        kind = "nested tensor" if value.is_nested else f"tensor of the layout {_short(value.layout)}"
        raise TypeError(f"run.mean(value) takes no {kind}: give it a dense one, as of value.to_dense()")
    if value.is_meta:
        raise TypeError("run.mean(value) takes no tensor on the meta device, which has no numbers")


def _short(kind: torch.dtype | torch.layout) -> str:
    return str(kind).removeprefix("torch.")
