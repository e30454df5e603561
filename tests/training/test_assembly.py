"""What the ranks of a world do together while its store is gone."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock, Mock

from torch.distributed import DistNetworkError, HashStore

from unicron_elastic.training.group.assembly import Assembly
from unicron_elastic.training.group.collective_order import CollectiveOrder
from unicron_elastic.training.group.membership import FixedMembership
from unicron_elastic.training.group.reports import Reports


class GoneStore(HashStore):  # type: ignore[misc]
    """A store whose host has ended: under torchrun rank 0, which may have come to the script's end before another."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def compare_set(self, *_: Any) -> bytes:
        self.asked += 1
        raise DistNetworkError("Connection reset by peer")


def test_who_waits_in_a_last_collective_needs_no_store() -> None:
    transport, store, now = Mock(), GoneStore(), [0.0]
    assembly = Assembly(FixedMembership(), transport, Mock(), Reports(), signs=MagicMock(), timeout_s=1.0)
    assembly._order = CollectiveOrder(store, 1, lambda: now[0])

    def gather() -> None:
        now[0] += 5.0
        transport.on_look()  # as long as it has not ended

    assert assembly.together(gather, "the end of run.steps(total=6)") is None
    assert store.asked == 1
