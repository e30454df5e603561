"""What a simulated worker tells is taken by the live system's tables for the fault that it is."""

from __future__ import annotations

import pytest

from unicron_elastic.faults import SEVERITY_OF, Status, classify
from unicron_elastic.simulation.history.events import KINDS, Method
from unicron_elastic.simulation.live.shows import Shows, failure_of, shows


@pytest.mark.parametrize("status", [each for each in KINDS if shows(each) not in (Shows.SILENCE, Shows.HANG)])
def test_a_failure_is_classified_as_what_it_is(status: Status) -> None:
    found = classify(failure_of(status, at=1.0, local_rank=0, pid=1, step=5))
    assert found.status is status
    assert found.severity is SEVERITY_OF[status]


def test_a_node_is_silent_and_a_hang_is_shown_by_statistics() -> None:
    assert [each for each in KINDS if shows(each) is Shows.SILENCE] == [Status.LOST_CONNECTION]
    assert [each for each in KINDS if shows(each) is Shows.HANG] == [Status.TASK_HANG]


def test_exceptions_are_noticed_as_exceptions() -> None:
    for status in KINDS:
        if shows(status) is Shows.EXCEPTION:
            assert KINDS[status].method is Method.EXCEPTION
