"""A node is lost, and the workers of this one cannot go on without it: ``golden/lost_nodes.txt`` has what is told."""

from __future__ import annotations

import pytest
from scenario import GLOO_CLOSED, TERMINATED, Job


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
