"""A stand-in for NCCL on CPUs: the back end "late", whose collectives end after ``wait`` has returned.

``import unicron_elastic.testing.late`` makes it known to torch: ``init_process_group("late")``. docs/late.md says what
it shows of a script, and what it does not.
"""

from __future__ import annotations

from unicron_elastic.engine.group.register import register
from unicron_elastic.testing.late.late_event import Fate, LateEvent, Lateness, event_of, lateness
from unicron_elastic.testing.late.late_inside import LateInside, synchronize
from unicron_elastic.testing.late.stream_order import StreamOrder

__all__ = ["NAME", "Fate", "LateEvent", "LateInside", "Lateness", "StreamOrder", "event_of", "lateness", "synchronize"]

NAME = "late"

register(NAME, LateInside)
