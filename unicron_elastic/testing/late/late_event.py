"""When what a late collective has received is in its tensors, and what is in them until then."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

INTEGER_GARBAGE = 85


class Fate(Enum):
    """`Fate` is what has become of a collective."""

    PENDING = "pending"
    LANDED = "landed"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)
class Lateness:
    """`Lateness` is how the back end behaves: results come ``delay_s`` after their collective was begun, or later.

    ``is_torn``: until then a tensor has what it had, and after an abort the rank's own values in front and the sum
    behind, as NCCL may leave it; else it has NaN, or the like, from the beginning. ``init_s``: how long the making of a
    group blocks, which nothing ends before.
    """

    delay_s: float = 0.02
    init_s: float = 0.0
    is_torn: bool = False
    _left: int = 0  # collectives until one is aborted

    def abort_in(self, collectives: int) -> None:
        """Have the group of that collective, counted from the next one as 1, be aborted while it is under way."""
        self._left = collectives

    def is_next_aborted(self) -> bool:
        """Count a collective that was begun; return whether its group is to be aborted now."""
        self._left -= 1
        return self._left == 0

    def spoil(self, tensor: Tensor) -> None:
        """Put garbage where a result is to come."""
        if self.is_torn:
            return
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        else:
            tensor.fill_(True if tensor.dtype is torch.bool else INTEGER_GARBAGE)

    def tear(self, tensor: Tensor, result: Tensor) -> None:
        """Leave what an abort half way leaves: the second half of the ``result``, if it is to be torn."""
        if self.is_torn and tensor.is_contiguous():
            half = tensor.numel() // 2
            tensor.view(-1)[half:].copy_(result.view(-1)[half:])


lateness = Lateness()  # of all groups of this process


class LateEvent:
    """A `LateEvent` is what a CUDA event behind a collective is: it can be asked, and waited for."""

    __slots__ = ("_has_ended", "begun_at", "fate")

    def __init__(self) -> None:
        self.fate = Fate.PENDING
        self.begun_at = time.monotonic()
        self._has_ended = threading.Event()

    def query(self) -> bool:
        """Return whether it has ended, well or badly: as on CUDA, an abort ends it, too."""
        return self._has_ended.is_set()

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; return whether it has come."""
        return self._has_ended.wait(timeout_s)

    def end(self, fate: Fate) -> None:
        """Note what has become of it."""
        self.fate = fate
        self._has_ended.set()


class Unseen(threading.local):
    """`Unseen` is whether this thread is where nobody sees each operation, to have it wait for what it reads."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


unseen = Unseen()
pending: dict[int, LateEvent] = {}  # by the address of a storage that waits for a result


def event_of(tensor: Tensor) -> LateEvent | None:
    """Return the event that ``tensor`` waits for; None if nothing is on its way to it."""
    return pending.get(tensor.untyped_storage().data_ptr())
