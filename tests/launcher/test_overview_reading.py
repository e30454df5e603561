"""The overview as it is made of what the store holds."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from plan_lab import NOW, node, publish, put_cluster, spec, two_jobs
from test_incident_picture import INCIDENT

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.launcher.view.cluster.overview import Overview
from unicron_elastic.launcher.view.cluster.plan import plan_reading
from unicron_elastic.launcher.view.cluster.reading import overview_of
from unicron_elastic.membership.rounds import JobMember, Place, Round
from unicron_elastic.planning.coordinate.node_status import NodeState
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus
from unicron_elastic.planning.model.measured import MeasuredJob, Now, Stay
from unicron_elastic.rendezvous.records import news
from unicron_elastic.rendezvous.records.cluster import (
    LEADER,
    LeaderRecord,
    NodeRecord,
    UnplannedJobSpec,
    leader_text,
    node_key,
    node_text,
    quarantine_key,
    quarantine_text,
    spec_text,
)
from unicron_elastic.rendezvous.records.job import JobKeys, lost_text, member_text, round_text
from unicron_elastic.rendezvous.records.plan import PhaseRecord, phase_text
from unicron_elastic.rendezvous.records.plan_keys import PlannedJobKeys
from unicron_elastic.rendezvous.store.interface import Store
from unicron_elastic.testing.memory_store import MemoryServer, MemoryStore

NEWS = news.JobNews(
    at_unix_s=NOW - 1.0,
    step=1842,
    step_s=0.4,
    stepped_unix_s=NOW - 1.2,
    world=2,
    nodes=3,
    workers=24,
    restarts_used=1,
    max_restarts=100,
)


@pytest.fixture
def store() -> Store:
    """With a coordinator."""
    opened = MemoryStore(MemoryServer(time.monotonic))
    leader = LeaderRecord(node_id="n1/agent", host="n1", address="10.0.0.1:4000", since_unix_s=NOW - 7200.0)
    opened.put(LEADER, leader_text(leader))
    return opened


def _read(store: Store, **more: object) -> Overview:
    found = overview_of(store.read_prefix(""), NOW, where="here", **more)  # type: ignore[arg-type]
    json.dumps(found.to_json(), allow_nan=False)
    return found


def _put_run(store: Store, run: str, hosts: str, waiting: str = "", number: int = 3) -> JobKeys:
    """One whose nodes are letters."""
    keys = JobKeys(run)
    if hosts:
        store.put(
            keys.round, round_text(Round(number=number, places=tuple(Place(f"{host}/7", host) for host in hosts)))
        )
    for host in hosts + waiting:
        member = JobMember(node_id=f"{host}/7", host=host, waits_for=number if host in hosts else number + 1)
        store.put(keys.member(member.node_id), member_text(member))
    return keys


def test_a_store_with_nothing_in_it_is_an_empty_cluster():
    found = _read(MemoryStore(MemoryServer(time.monotonic)))
    assert (found.verdict.level, found.jobs, found.nodes, found.coordinator, found.plan) == ("fine", (), (), None, None)


def test_planned_jobs_have_steps_rates_and_what_the_plan_expects(store):
    put_cluster(store, two_jobs())
    publish(store, plan_reading(store.read_prefix(""), NOW).snapshot, NOW - 60.0)
    measured = MeasuredJob().with_steps(
        3,
        Stay(since_unix_s=NOW - 500.0, step_s=0.4, steps=200),
        is_global_batch_fixed=True,
        now=Now(nodes=3, step_s=0.4, at_unix_s=NOW - 2.0),
    )
    store.put(PlannedJobKeys("chat").measured, measured.to_json())
    store.put(news.job_news_key("chat"), news.job_news_text(NEWS))
    _put_run(store, "chat@7", "abc")
    found = _read(store)
    chat, code = found.jobs
    assert (chat.job, chat.run_id, chat.state, chat.generation, chat.start, chat.world) == (
        "chat", "chat@7", "training", 3, 7, 2,
    )  # fmt: skip
    assert (chat.step, chat.steps_per_s, chat.restarts_used, chat.weight) == (1842, 2.5, 1, 1.5)
    assert chat.of_expected == pytest.approx(1.0)
    assert chat.weighted_flops == pytest.approx(1.5 * 3 * 3e12 * 0.94)
    assert chat.hosts == ("a", "b", "c")
    assert (code.step, code.of_expected, code.nodes, code.wanted_nodes) == (None, None, 2, 3)
    assert found.plan is not None
    assert found.plan.achieved_waf_flops == chat.weighted_flops
    assert found.plan.waf_flops > chat.weighted_flops


def test_a_job_by_hand_is_seen_with_who_trains_and_who_waits(store):
    keys = _put_run(store, "mine", "ab", waiting="c")
    told = UnplannedJobSpec(min_nodes=2, max_nodes=4, target_nodes=3, nproc_per_node=8, argv=("t.py",), cwd="/", env={})
    store.put(keys.spec, spec_text(told))
    store.put(news.job_news_key("mine"), news.job_news_text(NEWS))
    (job,) = _read(store).jobs
    assert (job.state, job.nodes, job.joining_nodes, job.wanted_nodes, job.workers) == ("training", 2, 1, 3, 16)
    assert (job.step, job.steps_per_s, job.is_planned, job.weight) == (1842, 2.5, False, None)


@pytest.mark.parametrize(("failed", "state"), [(None, "finished"), (b"rank 0 raised", "failed")])
def test_a_job_that_is_over_says_how(store, failed, state):
    keys = _put_run(store, "mine", "")
    store.put(keys.closed, b"The job has ended.")
    if failed is not None:
        store.put(keys.failed, failed)
    store.put(news.job_news_key("mine"), news.job_news_text(NEWS))
    (job,) = _read(store).jobs
    assert (job.state, job.step, job.is_incident_open) == (state, None, False)
    assert _read(store).verdict.level == ("degraded" if failed else "fine")


GOODBYES = {
    "a": lost_text("a/7", "a has left.", has_ended=True, is_orderly=True),
    "b": lost_text("b/7", "b has left.", has_ended=True, is_orderly=True),
}
LOST = lost_text("b/7", "b is lost: its process has ended.", has_ended=True)


@pytest.mark.parametrize(
    ("more", "waiting", "state", "level"),
    [
        ({}, "", "stopped", "fine"),
        ({"b": LOST}, "", "waiting", "critical"),
        ({"b": lost_text("b/7", "b has left.", has_ended=True)}, "", "waiting", "critical"),  # for an error
        ({"b": None}, "", "waiting", "critical"),
        (
            {"b": b'{"node": "b/7", "reason": "b has left.", "has_ended": true, "is_orderly": 1}'},
            "",
            "waiting",
            "critical",
        ),
        ({"c": LOST.replace(b"b", b"c")}, "", "stopped", "fine"),  # it was in a round before
        ({}, "c", "waiting", "critical"),
    ],
)
def test_a_job_by_hand_is_stopped_if_all_of_its_last_nodes_have_said_so(store, more, waiting, state, level):
    keys = _put_run(store, "mine", "ab")
    for host in "ab":
        store.delete(keys.member(f"{host}/7"))
    for host, text in {**GOODBYES, **more}.items():
        if text is not None:
            store.put(keys.lost(f"{host}/7"), text)
    if waiting:
        store.put(
            keys.member(f"{waiting}/7"), member_text(JobMember(node_id=f"{waiting}/7", host=waiting, waits_for=4))
        )
    found = _read(store)
    assert (found.jobs[0].state, found.verdict.level, found.odd) == (state, level, ())
    store.delete(LEADER)
    without = [problem.kind for problem in _read(store).verdict.problems]
    assert ("no coordinator" in without) == (state != "stopped")


def test_a_job_by_hand_that_never_began_or_was_ended_is_not_stopped(store):
    keys = _put_run(store, "mine", "")
    store.put(keys.lease, b"7")
    store.put(keys.lost("a/7"), GOODBYES["a"])
    assert _read(store).jobs[0].state == "waiting"
    store.put(keys.cancelled, b"cancelled by ada")
    assert _read(store).jobs[0].state == "cancelled"
    store.put(keys.closed, b"It has ended well on a.")
    assert _read(store).jobs[0].state == "finished"


def test_a_job_by_hand_that_never_began_is_no_problem_when_its_agents_have_gone(store):
    keys = _put_run(store, "mine", "")
    store.put(keys.lease, b"7")
    store.delete(LEADER)
    member = JobMember(node_id="a/7", host="a", waits_for=1)
    store.put(keys.member("a/7"), member_text(member))
    assert {each.kind for each in _read(store).verdict.problems} == {"no coordinator", "waits"}
    store.delete(keys.member("a/7"))
    assert (_read(store).jobs[0].state, _read(store).verdict.problems) == ("waiting", ())


@pytest.mark.parametrize(("exit_code", "state"), [(0, "finished"), (1, "failed")])
def test_a_planned_job_that_is_over_says_how(store, exit_code, state):
    put_cluster(store, two_jobs())
    record = PhaseRecord(phase=JobPhase.FINISHED, reason="It has ended.", exit_code=exit_code)
    store.put(PlannedJobKeys("chat").phase, phase_text(record))
    assert _read(store).jobs[0].state == state


def test_a_job_that_waits_tells_no_rate(store):
    waiting = ClusterSnapshot(nodes=(node("n1"),), jobs=(JobStatus(spec=spec("chat"), phase=JobPhase.SUBMITTED),))
    put_cluster(store, waiting)
    store.put(news.job_news_key("chat"), news.job_news_text(NEWS))
    (job,) = _read(store).jobs
    assert (job.state, job.steps_per_s, job.weighted_flops, job.step) == ("waiting", None, None, 1842)


def test_nodes_have_their_state_and_why_they_are_kept_out(store):
    put_cluster(store, ClusterSnapshot(nodes=(node("n1", "chat", NodeState.JOINING), node("n2")), jobs=two_jobs().jobs))
    for host, by in (("n2", "ada"), ("n9", "unicron-run")):
        entry = Quarantined(node=host, reason=f"{host} is bad", since=NOW - 60.0, until=NOW + 60.0, by=by)
        kept = replace(entry, is_broken=host == "n9")
        store.put(quarantine_key(host), quarantine_text(kept))
    found = {each.host: each for each in _read(store).nodes}
    assert [(each.host, each.health, each.state, each.job) for each in found.values()] == [
        ("n1", "well", "joining", "chat"),
        ("n2", "draining", "idle", ""),
        ("n9", "broken", "absent", ""),
    ]
    assert (found["n9"].reason, found["n9"].until_unix_s, found["n9"].by) == ("n9 is bad", NOW + 60.0, "unicron-run")
    assert found["n1"].is_coordinator


def test_what_runs_a_planned_job_is_shown_with_the_jobs_name(store):
    put_cluster(store, two_jobs())
    record = NodeRecord(node_id="x/9", host="x", job="chat@7", label="", pid=7)
    store.put(node_key("x/9"), node_text(record))
    assert next(each.job for each in _read(store).nodes if each.host == "x") == "chat"


def test_incidents_come_from_the_store_and_from_the_caller_the_newest_first(store):
    _put_run(store, "chat", "ab")
    earlier = replace(INCIDENT, number=1, time="2027-01-15T07:00:00+00:00")
    store.put(news.incidents_key("n2"), news.incidents_text([earlier, INCIDENT]))
    other = replace(INCIDENT, host="n5", run_id="old", time="2027-01-15T07:30:00+00:00", first_step_at=None)
    found = _read(store, incidents=[INCIDENT, other]).incidents
    assert [(each.host, each.number) for each in found] == [("n2", 2), ("n5", 2), ("n2", 1)]
    assert dict(found[0].phases_ms)["regrouped"] == pytest.approx(400.0)


@pytest.mark.parametrize(
    ("more", "stepped_unix_s", "is_open"),
    [
        ({}, None, False),
        ({"first_step_at": None}, None, True),
        ({"first_step_at": None}, NOW - 1.0, False),  # after it
        ({"first_step_at": None}, NOW - 9000.0, True),
        ({"first_step_at": None, "action": "observe"}, None, False),
        ({"first_step_at": None, "superseded_by": 3}, None, False),
        ({"first_step_at": None, "left": "The node has left the job."}, None, False),
        ({"first_step_at": None, "run_id": "over"}, None, False),
    ],
)
def test_an_incident_is_open_while_its_job_waits_for_a_step(store, more, stepped_unix_s, is_open):
    _put_run(store, "chat", "ab")
    store.put(news.job_news_key("chat"), news.job_news_text(replace(NEWS, stepped_unix_s=stepped_unix_s)))
    store.put(news.incidents_key("n2"), news.incidents_text([replace(INCIDENT, **more)]))
    assert _read(store).incidents[0].is_open == is_open


def test_what_cannot_be_read_is_told_and_costs_nothing_else(store):
    put_cluster(store, two_jobs())
    for key in ("nodes/x", "news/jobs/chat", "news/incidents/n1", "news/what", "plan/nodes/n9"):
        store.put(key, b"\xff nonsense")
    found = _read(store)
    assert len(found.odd) == 5
    assert [job.job for job in found.jobs] == ["chat", "code"]
    assert found.verdict.level == "degraded"
