"""Whether a cluster is well: one row for each rule, and what is no problem."""

from __future__ import annotations

from dataclasses import replace

import pytest
from overview_lab import NOW, incident, job, lost, node, overview

from unicron_elastic.launcher.view.cluster.overview import CRITICAL, DEGRADED, FINE, LEVELS, IncidentLine
from unicron_elastic.launcher.view.cluster.verdict import OPEN_S, STANDS_S

WAITS = "The job waits for 2 more nodes."

WELL = {
    "all train": {},
    "a job that a person has paused": {"jobs": (job(), job("code", "paused", nodes=0))},
    "a job that has never run and has to wait for others": {
        "jobs": (job(), job("code", "waiting", is_planned=True, nodes=0, wanted_nodes=0, min_nodes=1)),
    },
    "a job that is over": {"jobs": (job("code", "finished"), job("old", "cancelled"))},
    "a job by hand that was stopped": {
        "jobs": (job("mine", "stopped", nodes=0, has_run=True, why="All of its nodes were told to stop."),),
        "nodes": (),
        "coordinator": None,
    },
    "a node that a person drains": {"nodes": (node("n1"), node("n2", health="draining", reason="riser", by="ada"))},
    "a lost node that a person drains": {
        "nodes": (node("n1"), replace(lost("n2", NOW), health="draining", reason="riser", by="ada")),
    },
    "a job whose steps nobody knows": {"jobs": (job(stepped_unix_s=None, step=None),)},
    "an evaluation of some minutes": {"jobs": (job(stepped_unix_s=NOW - 500.0),)},
    "fewer FLOP/s within bounds": {"jobs": (job(of_expected=0.51),)},
    "nobody is there": {"jobs": (), "nodes": (), "coordinator": None},
}

UNWELL = [
    (CRITICAL, "Nobody coordinates", {"coordinator": None}),
    (CRITICAL, "chat has made no step for", {"jobs": (job(stepped_unix_s=NOW - 700.0),)}),
    (
        CRITICAL,
        "chat has not come back from a fault",
        {"jobs": (job(stepped_unix_s=NOW - 90.0, is_incident_open=True),)},
    ),
    (DEGRADED, "chat recovers from a fault.", {"jobs": (job(is_incident_open=True),)}),
    (CRITICAL, f"chat stands still: {WAITS}", {"jobs": (job(state="waiting", why=WAITS, has_run=True, nodes=0),)}),
    (DEGRADED, f"chat has not begun: {WAITS}", {"jobs": (job(state="waiting", why=WAITS, nodes=0),)}),
    (DEGRADED, "waits", {"jobs": (job(state="waiting", why=WAITS, is_planned=True, has_run=True, wanted_nodes=0),)}),
    (DEGRADED, "waits", {"jobs": (job(state="waiting", why=WAITS, is_planned=True, wanted_nodes=2),)}),
    (DEGRADED, "waits", {"jobs": (job(state="waiting", why=WAITS, is_planned=True, wanted_nodes=0, min_nodes=3),)}),
    (DEGRADED, "chat trains on 1 of 2 nodes, 1 on the way.", {"jobs": (job(nodes=1, joining_nodes=1),)}),
    (DEGRADED, "chat achieves 49% of what the plan promises.", {"jobs": (job(of_expected=0.49),)}),
    (DEGRADED, "chat has failed: exit code 1.", {"jobs": (job(state="failed", why="exit code 1"),)}),
    (DEGRADED, "chat has failed.", {"jobs": (job(state="failed"),)}),
    (DEGRADED, "chat has no restart left", {"jobs": (job(restarts_used=3, max_restarts=3),)}),
    (DEGRADED, "n2 is kept out: XID 79.", {"nodes": (node("n1"), node("n2", health="broken", reason="XID 79"))}),
    (DEGRADED, "n2 is lost: its process has ended, 90 s ago.", {"nodes": (node("n1"), lost("n2", NOW - 90.0))}),
    (DEGRADED, "n2 is lost: nobody was there to see why.", {"nodes": (node("n1"), lost("n2", None, ""))}),
    (DEGRADED, "n2 is lost: its process has ended", {"nodes": (lost("n2", NOW),), "jobs": (), "coordinator": None}),
    (DEGRADED, "what nobody can read: nodes/x", {"odd": ("nodes/x holds no agent",)}),
]


@pytest.mark.parametrize("what", WELL)
def test_it_is_fine(what):
    verdict = overview(**WELL[what]).verdict
    assert (verdict.level, verdict.problems) == (FINE, ())
    assert verdict.reason.endswith(".")


@pytest.mark.parametrize(("level", "sentence", "what"), UNWELL)
def test_it_is_not(level, sentence, what):
    verdict = overview(**what).verdict
    assert verdict.level == level
    assert sentence in verdict.reason
    assert len(verdict.problems) == 1


def _fault(seconds_ago: float, **more: object) -> IncidentLine:
    return incident(seconds_ago=seconds_ago, is_open=True, total_ms=None, **more)


@pytest.mark.parametrize(
    ("seconds_ago", "level", "sentence"),
    [
        (OPEN_S - 1.0, DEGRADED, "chat recovers from a fault."),
        (OPEN_S + 1.0, CRITICAL, "chat has not come back from a fault: no step for 61 s."),
        (STANDS_S + 60.0, CRITICAL, "chat has made no step for 11 minutes."),
    ],
)
def test_a_planned_job_of_which_no_step_is_known_has_not_come_back_since_its_fault(seconds_ago, level, sentence):
    stands = job(stepped_unix_s=None, step=None, is_incident_open=True, is_planned=True, has_run=True)
    verdict = overview(jobs=(stands,), incidents=(_fault(seconds_ago),)).verdict
    assert [(problem.level, problem.sentence) for problem in verdict.problems] == [(level, sentence)]


def test_a_job_has_not_come_back_since_the_oldest_of_its_open_faults():
    faults = (
        _fault(5.0),
        _fault(OPEN_S + 30.0, host="n2"),
        incident(seconds_ago=9000.0),
        _fault(9000.0, run_id="code"),
    )
    stands = job(stepped_unix_s=None, step=None, is_incident_open=True, is_planned=True, has_run=True)
    verdict = overview(jobs=(stands,), incidents=faults).verdict
    assert [problem.sentence for problem in verdict.problems] == [
        "chat has not come back from a fault: no step for 90 s."
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"is_incident_open": True},  # it may have none that anybody sees
        {"is_planned": True, "has_run": True},  # it says that it has no open one: that was an earlier job's of its name
        {"is_planned": True, "is_incident_open": True},  # it has never measured any
    ],
)
def test_a_job_that_may_not_count_its_steps_is_not_said_to_stand(more):
    stands = job(stepped_unix_s=None, step=None, **more)
    assert overview(jobs=(stands,), incidents=(_fault(9000.0),)).verdict.level == FINE


def test_a_step_that_is_known_counts_although_the_fault_came_later():
    stands = job(stepped_unix_s=NOW - 90.0, is_incident_open=True)
    verdict = overview(jobs=(stands,), incidents=(_fault(80.0),)).verdict
    assert verdict.reason == "chat has not come back from a fault: no step for 90 s."


@pytest.mark.parametrize("moment", ["", "in the morning", "1969-12-31T00:00:00+00:00", "9999-99-99T00:00:00"])
def test_a_fault_of_which_nobody_knows_the_time_is_never_critical(moment):
    stands = job(stepped_unix_s=None, step=None, is_incident_open=True, is_planned=True, has_run=True)
    verdict = overview(jobs=(stands,), incidents=(replace(_fault(0.0), time=moment),)).verdict
    assert [(problem.level, problem.kind) for problem in verdict.problems] == [(DEGRADED, "recovers")]


def test_the_worst_is_told_first_and_the_others_are_counted():
    found = overview(coordinator=None, jobs=(job(nodes=1), job("code", restarts_used=1, max_restarts=1)))
    assert [problem.level for problem in found.verdict.problems] == [CRITICAL, DEGRADED, DEGRADED]
    assert found.verdict.level == CRITICAL
    assert found.verdict.reason.endswith(" And 2 more.")


def test_a_slow_job_that_lacks_nodes_has_one_problem():
    verdict = overview(jobs=(job(nodes=1, of_expected=0.4),)).verdict
    assert [problem.sentence for problem in verdict.problems] == ["chat trains on 1 of 2 nodes."]


def test_places_in_the_list_of_levels_are_the_exit_codes():
    assert LEVELS == (FINE, DEGRADED, CRITICAL)


def test_reasons_that_others_wrote_stay_on_one_line():
    reason = overview(jobs=(job(state="failed", why="a\x1b[2Jb\nc"),)).verdict.reason
    assert reason.isprintable()


def test_a_job_that_has_failed_says_so_once() -> None:
    why = "chat has failed, as n1 says: rank 1 raised ValueError: bad data."
    (problem,) = overview(jobs=(job(state="failed", why=why),)).verdict.problems
    assert problem.sentence == why
