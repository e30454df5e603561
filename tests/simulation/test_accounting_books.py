"""Everything that is booked adds up to the ideal, and each incident gets what it has cost."""

from __future__ import annotations

import pytest

from unicron_elastic.faults import Severity, Status
from unicron_elastic.simulation.model.accounting import Books, IncidentEntry, Stall
from unicron_elastic.simulation.model.study_result import CurvePoint


def entry(node: int = 0) -> IncidentEntry:
    return IncidentEntry(at_s=0.0, node=node, kind=Status.ECC_ERROR, job="a", severity=Severity.SEV1)


def told(
    books: Books,
    at_s: float,
    name: str = "a",
    *,
    full: float = 100.0,
    gpus: float = 8.0,
    overhead: float = 0.0,
    stall: Stall | None = None,
    missing: tuple[tuple[IncidentEntry, float], ...] = (),
) -> None:
    books.job(at_s, name, full_waf=full, gpus=gpus, overhead=overhead, stall=stall, missing=missing)


def adds_up(books: Books) -> bool:
    return books.waf == pytest.approx(books.waf_ideal - books.lost_waf.total)


def test_a_job_that_stands_still_loses_all_in_the_phase_that_it_is_in() -> None:
    books, cost = Books(), entry()
    books.ideal(0.0, 100.0, 8.0)
    told(books, 0.0)
    told(books, 10.0, stall=Stall("detection", cost))
    told(books, 12.0, stall=Stall("transition", cost))
    told(books, 15.0)
    books.close(20.0)
    assert books.waf == 1500.0
    assert (books.lost_waf.detection, books.lost_waf.transition) == (200.0, 300.0)
    assert (books.lost_gpu_s.detection, books.lost_gpu_s.transition) == (16.0, 24.0)
    closed = cost.closed()
    assert (closed.detection_s, closed.transition_s, closed.sub_healthy_s, closed.lost_flop) == (2.0, 3.0, 0.0, 500.0)
    assert adds_up(books)


def test_what_is_missing_is_booked_on_the_incident_that_took_it_and_never_more_than_there_is() -> None:
    books, one, two = Books(), entry(0), entry(1)
    books.ideal(0.0, 100.0, 8.0)
    told(books, 0.0, missing=((one, 0.25), (two, 0.5)))
    told(books, 10.0, missing=((one, 0.75), (two, 0.75)))
    books.close(20.0)
    assert books.waf == 250.0
    assert one.lost_flop == pytest.approx(250.0 + 500.0)
    assert two.lost_flop == pytest.approx(500.0 + 500.0)
    assert one.closed().sub_healthy_s == 20.0
    assert adds_up(books)


def test_nodes_that_are_away_share_what_the_cluster_lacks() -> None:
    books, one, two = Books(), entry(0), entry(1)
    books.ideal(0.0, 100.0, 16.0)
    told(books, 0.0, full=100.0, gpus=16.0)
    books.away(10.0, one)
    told(books, 10.0, full=60.0)
    books.away(20.0, two)
    books.back(30.0, one)
    books.close(40.0)
    assert one.closed().lost_flop == pytest.approx(400.0 + 200.0)
    assert two.closed().lost_flop == pytest.approx(200.0 + 400.0)
    assert (one.closed().sub_healthy_s, two.closed().sub_healthy_s) == (20.0, 20.0)
    assert books.lost_gpu_s.sub_healthy == 8.0 * 30.0
    assert adds_up(books)


def test_overhead_is_what_a_policy_costs_without_faults() -> None:
    books = Books()
    books.ideal(0.0, 100.0, 8.0)
    told(books, 0.0, overhead=0.1)
    books.close(10.0)
    assert books.lost_waf.overhead == pytest.approx(100.0)
    assert adds_up(books)


def test_the_curve_has_a_point_for_each_change_and_none_between() -> None:
    books = Books()
    told(books, 0.0)
    told(books, 5.0)
    told(books, 7.0, stall=Stall("detection", None))
    told(books, 7.0, full=50.0)
    assert books.curve == (CurvePoint(0.0, 100.0), CurvePoint(7.0, 50.0))


def test_who_was_never_away_cannot_come_back() -> None:
    books, cost = Books(), entry()
    books.back(10.0, cost)
    assert cost.lost_flop == 0.0
