"""A worker that seems to have left out a collective."""

from __future__ import annotations

import pytest
from scenario import LEFT_OUT, Job, none, only

from unicron_elastic.recovery.commands import RecordIncident, StopWorkers, Tell
from unicron_elastic.recovery.state import Phase


@pytest.mark.parametrize("restarts", [0, 3])
def test_people_hear_of_it_and_the_job_goes_on(restarts: int) -> None:
    # It may be a step of an optimizer beside the training: nothing healthy is stopped.
    job = Job(max_restarts=restarts)
    job.start()
    commands = job.out_of_step(1)
    assert job.state.phase is Phase.RUNNING
    assert none(commands, StopWorkers)
    assert only(commands, Tell).reason == LEFT_OUT
    incident = only(commands, RecordIncident).incident
    assert (incident.rank, incident.step, incident.status, incident.severity) == (5, 300, "other software error", 2)
    assert (incident.method, incident.action, incident.reason) == ("online statistics", "observe", LEFT_OUT)
    assert incident.decision == "Nothing was done: only the script knows whether it was meant."


def test_of_an_earlier_generation_or_after_the_end_it_is_nothing() -> None:
    job = Job()
    job.start()
    assert job.out_of_step(1, generation=0) == []
    assert job.out_of_step(7) == []
    job.exited(1, 0)
    assert job.out_of_step(1) == []
