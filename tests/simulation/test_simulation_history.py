"""What a history accepts and refuses, and what is known of a fault by its kind."""

from __future__ import annotations

import pytest

from unicron_elastic.faults import SEVERITY_OF, Severity, Status
from unicron_elastic.simulation.history.events import (
    KINDS,
    Event,
    FaultStruck,
    History,
    JobArrives,
    JobEnds,
    MeasuredFault,
    Method,
    NodeJoins,
    NodeLeaves,
)


def history(*events: Event, nodes: int = 4, absent: frozenset[int] = frozenset()) -> History:
    return History.of(events, name="h", duration_s=100.0, nodes=nodes, source="made by hand", absent=absent)


def fault(at_s: float, node: int = 0, kind: Status = Status.ECC_ERROR, repair_s: float | None = None) -> FaultStruck:
    return FaultStruck(at_s=at_s, node=node, kind=kind, repair_s=repair_s)


def test_every_status_of_the_live_system_has_its_severity_and_a_method() -> None:
    assert set(KINDS) == set(Status)
    assert {status: kind.severity for status, kind in KINDS.items()} == dict(SEVERITY_OF)
    assert KINDS[Status.LOST_CONNECTION].method is Method.NODE_HEALTH
    assert fault(1.0).severity is Severity.SEV1
    assert fault(1.0).method is Method.EXCEPTION


def test_events_are_put_into_one_order() -> None:
    events = [JobArrives(at_s=5.0, job="a"), JobEnds(at_s=5.0, job="b"), fault(5.0, 2), fault(5.0, 1)]
    events += [NodeLeaves(at_s=5.0, node=3), NodeJoins(at_s=5.0, node=0), fault(1.0)]
    made = history(*events, absent=frozenset({0}))
    assert made.events == history(*reversed(events), absent=frozenset({0})).events
    assert [type(event).__name__ for event in made.events] == [
        *("FaultStruck", "NodeJoins", "NodeLeaves", "FaultStruck", "FaultStruck", "JobEnds", "JobArrives"),
    ]
    assert [each.node for each in made.faults] == [0, 1, 2]


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ((fault(101.0),), "outside of the history, which is from 0 to 100 s"),
        ((fault(-1.0),), "outside of the history"),
        ((fault(float("nan")),), "outside of the history"),
        ((fault(1.0, 4),), "there are nodes 0 to 3"),
        ((fault(1.0, repair_s=-1.0),), "a repair cannot be negative"),
        ((NodeJoins(at_s=1.0, node=0),), "the node is there already"),
        ((NodeLeaves(at_s=1.0, node=0), NodeLeaves(at_s=2.0, node=0)), "the node is not there"),
        ((NodeLeaves(at_s=1.0, node=0, notice_s=-2.0),), "a notice cannot be negative"),
        ((JobEnds(at_s=1.0, job=""),), "it names no job"),
    ],
)
def test_what_cannot_be_is_refused_with_the_event(events: tuple[Event, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as raised:
        history(*events)
    assert type(events[-1]).__name__ in str(raised.value)


def test_events_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="must be in their order"):
        History(name="h", duration_s=10.0, nodes=1, events=(fault(2.0), fault(1.0)), source="")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"nodes": 0}, "at least one"),
        ({"duration_s": 0.0}, "positive"),
        ({"duration_s": float("inf")}, "positive"),
        ({"absent": frozenset({1})}, r"absent are nodes \[1\]"),
    ],
)
def test_a_history_of_nothing_is_refused(values: dict[str, object], problem: str) -> None:
    usual: dict[str, object] = {"name": "h", "duration_s": 1.0, "nodes": 1, "events": (), "source": ""}
    with pytest.raises(ValueError, match=problem):
        History(**{**usual, **values})  # type: ignore[arg-type]


def test_measured_phases_add_up_if_all_are_known() -> None:
    phases = {"noticed_s": 0.5, "stopped_s": 0.25, "regrouped_s": 1.0, "first_step_s": 2.0}
    assert MeasuredFault(job="j", host="h", action="restart", **phases).total_s == 3.75
    assert MeasuredFault(job="j", host="h", action="restart", **{**phases, "first_step_s": None}).total_s is None
