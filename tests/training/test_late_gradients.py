"""A rank that is late gets the reduced gradients from another; what breaks on the way leaves none that count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor

from unicron_elastic.engine.protocol.replica_event import GroupBroke, Handed
from unicron_elastic.training.group.assembly import Assembly
from unicron_elastic.training.group.reports import Reports


def test_what_is_received_again_and_breaks_counts_no_more() -> None:
    def break_off(tensor: Tensor, source: int) -> None:
        if len(received) == 1:
            tensor.fill_(77.0)
            raise RuntimeError(f"Connection closed by rank {source}")
        received.append(source)

    received: list[int] = []
    done = {0, 1, 2}  # as they have come in an earlier world
    gradients: Any = SimpleNamespace(
        buckets=[0, 1, 2, 3],
        done=done,
        forget=done.discard,
        room=lambda _: torch.zeros(2),
        has_notes=lambda _: False,
    )
    membership: Any = SimpleNamespace(is_left=lambda: False, is_fixed=False, next_world_timeout_s=1.0)
    transport: Any = SimpleNamespace(receive=break_off)
    assembly = Assembly(membership, transport, gradients, Reports(), signs=Mock(), timeout_s=1.0)
    assert assembly.hand_over(0, 1, 0) == Handed()
    broke = assembly.hand_over(1, 1, 0)
    assert isinstance(broke, GroupBroke)
    assert "Connection closed" in broke.why
    assert 1 not in done
    assert 0 in done
