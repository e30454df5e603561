"""Whether a cluster is well: one row for each rule, and what is no problem."""

from __future__ import annotations

import pytest
from overview_lab import NOW, job, node, overview

from unicron_elastic.launcher.status.overview import CRITICAL, DEGRADED, FINE, LEVELS

WAITS = "The job waits for 2 more nodes."

WELL = {
    "all train": {},
    "a job that a person has paused": {"jobs": (job(), job("code", "paused", nodes=0))},
    "a job that has never run and has to wait for others": {
        "jobs": (job(), job("code", "waiting", is_planned=True, nodes=0, wanted_nodes=0, min_nodes=1)),
    },
    "a job that is over": {"jobs": (job("code", "finished"), job("old", "cancelled"))},
    "a node that a person drains": {"nodes": (node("n1"), node("n2", health="draining", reason="riser", by="ada"))},
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
    (DEGRADED, "chat has no restart left", {"jobs": (job(restarts_used=3, max_restarts=3),)}),
    (DEGRADED, "n2 is kept out: XID 79.", {"nodes": (node("n1"), node("n2", health="broken", reason="XID 79"))}),
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
