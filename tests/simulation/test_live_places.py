"""When a look of the coordinator would find nothing to do."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_cluster import DAY_S, cluster, fault, linear, ran

from unicron_elastic.faults import Status
from unicron_elastic.simulation.live.places import Places


def test_leaving_out_looks_that_do_nothing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = cluster(6, linear("a", 4, 2.0, min_nodes=2), linear("b", 4), linear("c", 2, 0.5, min_nodes=2))
    events = [fault(Status.LOST_CONNECTION, node, 1000.0 + 700.0 * node, 20_000.0 + 3000.0 * node) for node in range(5)]
    quick = ran(scenario, "unicron", *events, days=2 * DAY_S / DAY_S)
    monkeypatch.setattr(Places, "said", lambda *_: False)
    slow = ran(scenario, "unicron", *events, days=2.0)
    assert slow.curve == quick.curve
    assert replace(slow, moves=quick.moves, plans=quick.plans) == quick
    assert (slow.plans, slow.moves) == (quick.plans, quick.moves)
