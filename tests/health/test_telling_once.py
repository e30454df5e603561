"""What people hear: each change once, and its end."""

from __future__ import annotations

from health_lab import only

from unicron_elastic.base.fault import Severity, Status
from unicron_elastic.base.finding import Finding, Level, finding
from unicron_elastic.health.finding_ledger import FindingLedger


def make(
    level: Level = Level.WARN,
    *,
    subject: str = "eth0",
    reason: str = "It is bad.",
    at: float = 0.0,
    severity: Severity | None = None,
) -> Finding:
    return finding("link", level, Status.OTHER_NETWORK_ERROR, subject, reason, at=at, severity=severity)


def test_what_lasts_is_told_once() -> None:
    ledger = FindingLedger()
    found = make()
    assert ledger.update("links", [found], 0.0) == [found]
    assert ledger.update("links", [make(reason="It is bad, and 5 s older.")], 5.0) == []
    assert only(ledger.current()).reason == "It is bad, and 5 s older."


def test_what_gets_worse_is_told_again() -> None:
    ledger = FindingLedger()
    ledger.update("links", [make()], 0.0)
    worse = make(Level.CRITICAL)
    assert ledger.update("links", [worse], 1.0) == [worse]
    assert ledger.update("links", [make()], 2.0) == []
    assert ledger.update("links", [worse], 3.0) == []
    worst = make(Level.CRITICAL, severity=Severity.SEV1)
    assert ledger.update("links", [worst], 4.0) == [worst]


def test_the_end_is_told_once_it_has_stayed_away() -> None:
    ledger = FindingLedger(calm_checks=2)
    ledger.update("links", [make()], 0.0)
    assert ledger.update("links", [], 1.0) == []
    assert ledger.update("links", [make()], 2.0) == []
    assert ledger.update("links", [], 3.0) == []
    over = only(ledger.update("links", [], 4.0))
    assert (over.level, over.status, over.severity, over.at) == (Level.OK, None, None, 4.0)
    assert (over.probe, over.subject, over.reason) == ("link", "eth0", "No longer so: It is bad.")
    assert ledger.update("links", [], 5.0) == []
    assert ledger.current() == []
    again = make()
    assert ledger.update("links", [again], 6.0) == [again]


def test_sources_do_not_end_what_others_found() -> None:
    ledger = FindingLedger(calm_checks=1)
    ledger.update("links", [make()], 0.0)
    assert ledger.update("clock", [], 1.0) == []
    assert len(ledger.current()) == 1


def test_the_worst_of_one_subject_counts() -> None:
    ledger = FindingLedger()
    worst = make(Level.CRITICAL)
    assert ledger.update("links", [make(), worst, make()], 0.0) == [worst]


def test_the_worst_comes_first() -> None:
    ledger = FindingLedger()
    ledger.update("links", [make(subject="a"), make(Level.CRITICAL, subject="b")], 0.0)
    assert [found.subject for found in ledger.current()] == ["b", "a"]


def test_an_ok_finding_is_no_finding() -> None:
    ledger = FindingLedger()
    well = Finding(probe="x", level=Level.OK, status=None, severity=None, subject="y", reason="Fine.", at=0.0)
    assert ledger.update("links", [well], 0.0) == []
    assert ledger.current() == []


def test_a_storm_of_one_event_is_told_once_a_minute() -> None:
    ledger = FindingLedger()
    told = [ledger.event(make(at=at)) for at in (0.0, 1.0, 59.0, 61.0)]
    assert told == [True, False, False, True]
    assert ledger.event(make(reason="Another.", at=61.0))
    assert ledger.current() == []


def test_an_event_and_the_state_it_left_are_told_once() -> None:
    ledger = FindingLedger()
    assert ledger.event(make(at=0.0))
    assert ledger.update("links", [make(at=1.0)], 1.0) == []
    assert len(ledger.current()) == 1
    assert not ledger.event(make(at=100.0))


def test_events_do_not_pile_up() -> None:
    ledger = FindingLedger()
    assert all(ledger.event(make(reason=f"{number}.", at=0.0)) for number in range(2500))
