"""A rank that is late gets the reduced gradients from another; what breaks on the way leaves none that count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from unicron_elastic.engine.protocol.agreement import Agreement
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
        buckets=[0, 1, 2, 3], done=done, forget=done.discard, room=lambda _: torch.zeros(2)
    )
    membership: Any = SimpleNamespace(is_left=lambda: False)
    transport: Any = SimpleNamespace(receive=break_off)
    assembly = Assembly(membership, transport, gradients, Reports(), signs=Mock(), timeout_s=1.0)
    with pytest.raises(RuntimeError, match="Connection closed"):
        assembly._give_gradients(Agreement(step=1, gradients=((1, 0),)))
    assert 1 not in done
    assert 0 in done
