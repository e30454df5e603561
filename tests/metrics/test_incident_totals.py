"""What incidents come to: each counts once, counters never fall, and a ledger read again comes to the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metric_values import CLOSED, DECIDED, INCIDENT, REGROUPED, totals

from unicron_elastic.base.incident import PHASES, Incident
from unicron_elastic.faults import SEVERITY_OF, Status
from unicron_elastic.metrics.definitions import RECOVERY_BUCKETS_S
from unicron_elastic.metrics.figures import IncidentFigures

UNFOLDING = (INCIDENT, DECIDED, REGROUPED, CLOSED)


def _counted(figures: IncidentFigures) -> dict[tuple[int, str], int]:
    return {(severity, status): count for severity, status, count in figures.counts if count}


def test_an_incident_counts_once_it_is_decided_what_to_do() -> None:
    assert _counted(totals(INCIDENT).figures()) == {}
    for number in range(2, len(UNFOLDING) + 1):
        assert _counted(totals(*UNFOLDING[:number]).figures()) == {(2, "killed by signal"): 1}


def test_an_incident_that_another_one_closes_before_a_decision_counts() -> None:
    assert _counted(totals(replace(INCIDENT, superseded_by=2)).figures()) == {(2, "killed by signal"): 1}


def test_it_stays_counted_as_what_it_was() -> None:
    found = totals(DECIDED, replace(DECIDED, severity=1, status="ECC error")).figures()
    assert _counted(found) == {(2, "killed by signal"): 1}


def test_every_status_has_a_zero_for_each_severity_that_it_can_have() -> None:
    zeros = {(severity, status): count for severity, status, count in totals().figures().counts}
    assert set(zeros.values()) == {0}
    assert {(int(severity), status.value) for status, severity in SEVERITY_OF.items()} <= set(zeros)
    assert zeros.keys() >= {(1, status.value) for status in Status}
    assert len(zeros) < 50


def test_each_phase_is_lost_by_all_workers_of_the_node() -> None:
    assert totals(*UNFOLDING).figures().lost_gpu_s == (
        ("noticed", 2.0), ("stopped", 4.0), ("regrouped", 8.0), ("first_step", 16.0),
    )  # fmt: skip
    assert totals(INCIDENT, DECIDED).figures().lost_gpu_s[1:] == (
        ("stopped", 4.0), ("regrouped", 0.0), ("first_step", 0.0),
    )  # fmt: skip


@pytest.mark.parametrize("known", [{"action": "observe"}, {"workers": None}])
def test_nothing_is_lost_where_nothing_was_done_or_nobody_knows_of_how_many(known: dict[str, object]) -> None:
    found = totals(replace(CLOSED, **known)).figures()
    assert [lost_s for _, lost_s in found.lost_gpu_s] == [0.0] * 4
    assert sum(_counted(found).values()) == 1


def test_the_time_of_a_recovery_falls_into_its_bucket() -> None:
    found = totals(*UNFOLDING).figures().recovery  # 7.5 s
    assert found.total == 7.5
    assert [bound for bound, count in zip(RECOVERY_BUCKETS_S, found.counts, strict=False) if count] == [10.0]
    on_bound = totals(replace(CLOSED, occurred_at=97.5)).figures().recovery
    assert on_bound.counts == found.counts
    beyond = totals(replace(CLOSED, occurred_at=-1e6)).figures().recovery
    assert beyond.counts[-1] == 1


def test_micro_batches_count_when_the_step_is_made() -> None:
    kept = replace(CLOSED, micro_batches_reused=6, micro_batches_recomputed=2)
    found = totals(replace(DECIDED, micro_batches_reused=6), kept, kept).figures()
    assert (found.reused, found.recomputed) == (6, 2)


def test_the_same_number_of_another_launch_is_another_incident() -> None:
    other = replace(CLOSED, time="2026-02-02T03:04:05.678+01:00")
    assert _counted(totals(CLOSED, other).figures()) == {(2, "killed by signal"): 2}


_MOMENTS = st.one_of(st.none(), st.floats(0, 1e6))
_RECORDS = st.builds(
    lambda number, action, status, severity, moments: replace(
        INCIDENT,
        number=number,
        action=action,
        status=status,
        severity=severity,
        **{f"{phase}_at": moment for phase, moment in zip(PHASES, moments, strict=True)},
    ),
    st.integers(1, 3),
    st.sampled_from(["", "restart", "go on", "observe", "fail"]),
    st.sampled_from(["task hang", "ECC error", "of a later version"]),
    st.integers(1, 3),
    st.tuples(*[_MOMENTS] * len(PHASES)),
)


def _numbers(figures: IncidentFigures) -> list[float]:
    known = {(severity, status): count for severity, status, count in figures.counts}
    counts = [known.get((severity, "task hang"), 0) for severity in (1, 2, 3)]
    lost = [lost_s for _, lost_s in figures.lost_gpu_s]
    return [*counts, sum(known.values()), *lost, *figures.recovery.counts, figures.recovery.total]


@given(st.lists(_RECORDS, max_size=12))
def test_whatever_is_recorded_counters_never_fall_and_a_replay_adds_nothing(records: list[Incident]) -> None:
    found = totals()
    before = _numbers(found.figures())
    for record in records:
        found.add(record)
        now = _numbers(found.figures())
        assert all(new >= old for new, old in zip(now, before, strict=True))
        before = now
    assert totals(*records).figures() == found.figures()
    for record in records:  # what is in the ledger and came live as well
        found.add(record)
    assert _numbers(found.figures()) == before
