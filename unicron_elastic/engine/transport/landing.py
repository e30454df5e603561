"""When what a collective gives is there: on devices that is after its wait has returned.

NCCL's wait only has the stream wait, and an abort ends what is under way without an exception, with anything in its
tensors. So a result counts once the device has passed a mark behind the collective, in a world that is whole then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor


class Mark(Protocol):
    """A `Mark` stands behind collectives in the order in which a device does things."""

    def query(self) -> bool:
        """Return whether the device has passed it."""


Marking: TypeAlias = Callable[[Sequence[Tensor]], Sequence[Mark]]  # behind what was begun with these tensors


def _no_marks(_tensors: Sequence[Tensor]) -> Sequence[Mark]:
    return ()


def mark_devices(tensors: Sequence[Tensor]) -> Sequence[Mark]:
    """Mark the present stream of each GPU on which a tensor is."""
    marks = []
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(device))
        marks.append(mark)
    return marks


_markings: dict[str, Marking] = {"gloo": _no_marks}


def know_landing(backend: str, marking: Marking) -> None:
    """Take it that results of this back end are there when its marks are passed."""
    _markings[backend] = marking


def marking_of(backend: str) -> Marking:
    """Return what marks collectives of a back end, or of several, as ``cpu:gloo,cuda:nccl``."""
    parts = {part.rpartition(":")[2] for part in backend.lower().split(",")}
    return _markings.get(parts.pop(), mark_devices) if len(parts) == 1 else mark_devices
