"""What the ranks of a world do together while its store is gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from torch.distributed import DistNetworkError, HashStore

from unicron_elastic.base.world import Member, World
from unicron_elastic.engine.protocol.said import MismatchError, Said, written
from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.training.group.assembly import Assembly, TextsHeard
from unicron_elastic.training.group.collective_order import CollectiveOrder, OutgrownError
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


def test_who_gives_something_to_others_hears_that_their_world_is_outgrown() -> None:
    """It is in no collective of all then."""
    store = HashStore()
    order = CollectiveOrder(store, 1)
    order.look()
    order.outgrow()
    order._next = 0.0
    with pytest.raises(OutgrownError):
        order.look()


class NextWorld(FixedMembership):
    """`NextWorld` is that of a rank which goes on to a larger world."""

    def adopt(self, number: int | None = None) -> Any:
        assert number == 2
        raise Superseded  # the rest is another test's


def test_who_goes_on_tells_those_who_wait_also_if_it_has_begun_something_itself() -> None:
    transport = Mock(is_broken=False)
    transport.give_up = lambda *_: setattr(transport, "is_broken", True) or True
    assembly = Assembly(NextWorld(), transport, Mock(), Reports(), signs=MagicMock(), timeout_s=1.0)
    assembly.world = World(number=1, members=(Member(name="a", node="n", local_rank=0),), store="h:1")
    assembly._order = order = CollectiveOrder(HashStore(), 0)
    assembly._early = {0: Mock()}
    assembly.say(2, Said(state=0))
    with pytest.raises(OutgrownError):
        order.look()


def _understood(own: Said, other: Said) -> None:
    assembly = Assembly(FixedMembership(), Mock(), Mock(), Reports(), signs=MagicMock(), timeout_s=1.0)
    assembly.terms = "the same"
    assembly.understand(own, TextsHeard((written(own, "the same"), written(other, "the same"))))


def test_who_trains_other_parameters_in_a_step_is_told_and_not_who_may_still_freeze_some_before_it() -> None:
    said = Said(state=3, until=9, trained=frozenset([0, 1]))
    with pytest.raises(MismatchError, match="in step 3 rank 1 trains other parameters"):
        _understood(said, replace(said, trained=frozenset([0])))
    _understood(said, replace(said, trained=frozenset([0]), is_between=True))
    _understood(replace(said, is_between=True), replace(said, trained=frozenset([0])))


def test_who_waits_in_a_last_collective_needs_no_store() -> None:
    transport, store, now = Mock(), GoneStore(), [0.0]
    assembly = Assembly(FixedMembership(), transport, Mock(), Reports(), signs=MagicMock(), timeout_s=1.0)
    assembly._order = CollectiveOrder(store, 1, lambda: now[0])

    def gather() -> None:
        now[0] += 5.0
        transport.on_look()  # as long as it has not ended

    assert assembly.together(gather, "the end of run.steps(total=6)") is None
    assert store.asked == 1
