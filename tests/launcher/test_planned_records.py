"""What the agent of a node reads of nodes and jobs that are planned."""

from __future__ import annotations

import time

import pytest

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.launcher.node.planned_records import why_out_of_jobs
from unicron_elastic.rendezvous.records.cluster import quarantine_key, quarantine_text
from unicron_elastic.testing.memory_store import MemoryServer, MemoryStore

NOW = 1000.0


@pytest.mark.parametrize(
    ("until", "is_broken", "why"),
    [
        (None, False, "is drained by ops: a loud fan"),
        (NOW + 1, False, "is drained by ops: a loud fan"),
        (NOW, False, ""),
        (None, True, "is in quarantine: a loud fan"),
    ],
)
def test_a_node_is_to_leave_its_job_for_the_reason_that_the_store_has(
    until: float | None, is_broken: bool, why: str
) -> None:
    store = MemoryStore(MemoryServer(time.monotonic))
    assert why_out_of_jobs(store, "a", NOW) == ""
    drained = Quarantined(node="a", reason="a loud\nfan.", since=1.0, until=until, by="ops", is_broken=is_broken)
    store.put(quarantine_key("a"), quarantine_text(drained))
    assert why_out_of_jobs(store, "a", NOW) == why
    assert why_out_of_jobs(store, "b", NOW) == ""
    store.put(quarantine_key("a"), b"{}")
    assert why_out_of_jobs(store, "a", NOW) == ""
