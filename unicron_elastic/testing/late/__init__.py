"""A stand-in for NCCL on CPUs: the back end "late", whose collectives end after ``wait`` has returned.

``import unicron_elastic.testing.late`` makes it known to torch: ``init_process_group("late")``. docs/late.md says what
it shows of a script, and what it does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unicron_elastic.engine.group.register import register
from unicron_elastic.engine.transport.landing import know_landing
from unicron_elastic.testing.late.late_event import Fate, LateEvent, Lateness, event_of, lateness
from unicron_elastic.testing.late.late_inside import LateInside, synchronize
from unicron_elastic.testing.late.stream_order import StreamOrder

__all__ = ["NAME", "Fate", "LateEvent", "LateInside", "Lateness", "StreamOrder", "event_of", "lateness", "synchronize"]

NAME = "late"


def _events(tensors: Sequence[Tensor]) -> list[LateEvent]:
    """Return what the tensors wait for: events stand where marks on a stream do."""
    return [event for each in tensors if (event := event_of(each)) is not None]


register(NAME, LateInside)
know_landing(NAME, _events)
