"""A stand-in for NCCL on CPUs: the back end "late", whose collectives end after ``wait`` has returned.

``import unicron_elastic.testing.late`` makes it known to torch: ``init_process_group("late")``. What it sends it sends
by gloo. docs/late.md says what it shows of a script, and what it does not.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store

from unicron_elastic.testing.late.late_event import Fate, LateEvent, Lateness, event_of, lateness
from unicron_elastic.testing.late.late_group import LateGroup, synchronize
from unicron_elastic.testing.late.stream_order import StreamOrder

__all__ = ["Fate", "LateEvent", "LateGroup", "Lateness", "StreamOrder", "event_of", "lateness", "synchronize"]

NAME = "late"


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> LateGroup:
    return LateGroup(store, rank, size, timeout)


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _create, devices=["cpu"])
