"""A node is lost, and the workers of this one cannot go on without it: ``golden/lost_nodes.txt`` has what is told."""

from __future__ import annotations

import pytest
from scenario import GLOO_CLOSED, LOST, TERMINATED, Job

from unicron_elastic.recovery.commands import RecordIncident


@pytest.mark.parametrize("is_late", [False, True])
def test_what_workers_raise_for_it_is_no_failure_of_their_node(is_late: bool) -> None:
    job = Job()
    job.start(why_stay="")
    if is_late:
        job.loses()
    job.raised(0, GLOO_CLOSED, kind="RuntimeError", said_at=job.now - 0.02 if is_late else None)
    if not is_late:
        job.loses()
    job.exited(0, 1)
    job.exited(1, TERMINATED)
    assert job.state.attempts == ()  # this node is not put out for it one day


@pytest.mark.parametrize("is_consequence", [True, False])
def test_a_loss_that_is_known_when_all_meet_again_has_the_incident_of_what_it_broke(is_consequence: bool) -> None:
    job = Job()
    job.start(why_stay="")
    job.raised(0, GLOO_CLOSED if is_consequence else "bad input", kind="RuntimeError")
    job.exited(0, 1)
    job.exited(1, TERMINATED)
    (recorded,) = (each for each in job.start(restarts_used=1, why_lost=LOST) if isinstance(each, RecordIncident))
    incident = recorded.incident
    assert (incident.number, incident.action, incident.rank) == (1, "restart", None if is_consequence else 4)
    assert (incident.reason == LOST) == is_consequence
    assert any(each.startswith("rank 4 raised") for each in incident.consequences) == is_consequence, incident
