"""A node that is well and is wanted elsewhere, and the nodes that go on without it."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import CRASHED, FELL_OFF, GLOO_CLOSED, KILLED, PEERS_FAULT, TERMINATED, Job, none, only
from test_in_place import InPlace

from unicron_elastic.base.world import Member
from unicron_elastic.recovery.commands import (
    AskToLeave,
    AwaitStep,
    ChangeWorld,
    Command,
    DepartWell,
    FailJob,
    FinishJob,
    KillWorkers,
    LeaveJob,
    MeetNodes,
    RecordIncident,
    StartWorkers,
    StopWorkers,
    Tell,
    TellPeers,
    WakeAt,
)
from unicron_elastic.recovery.departure import ASK_AGAIN_S, LEFT_OUT_WITHIN_S, STOP_AFTER_S
from unicron_elastic.recovery.events import (
    MembershipChanged,
    NodeRecalled,
    NodesDepart,
    StepEnded,
    WorldChanged,
)
from unicron_elastic.recovery.joins import JOIN_DELAY_S
from unicron_elastic.recovery.state import Phase

RECALLED = "Node n1 is recalled: job b gains more."
OTHER_RECALLED = "Node n2 is recalled: job b gains more."
DRAINED = "Node n1 is drained by ada: a loud fan."
ALL_NEEDED = "the job needs all 2 of its nodes."
ELSEWHERE = (Member(name="0.0#z", node="n2#z", local_rank=0),)


def recalled(job: Job, why_stay: str = "", reason: str = RECALLED, *, is_drained: bool = False) -> list[Command]:
    return job.feed(NodeRecalled(at=job._at(None), reason=reason, why_stay=why_stay, is_drained=is_drained))


def departs(job: Job) -> list[Command]:
    return job.feed(
        NodesDepart(at=job._at(None), nodes=("n2",), reason=OTHER_RECALLED, generation=job.state.generation)
    )


def step_ended(job: Job) -> list[Command]:
    return job.feed(StepEnded(at=job._at(None), generation=job.state.generation))


def left_out(job: InPlace) -> list[Command]:
    """The others have made a world without this node's members."""
    assert job.state.world is not None
    mine = [member.name for member in job.state.world.members if member.node == job.state.node]
    world = job.state.world.after(store="h:2", reason=RECALLED, lost=mine)
    return job.feed(WorldChanged(at=job._at(None), world=world, generation=job.state.generation))


def started(**policy: Any) -> Job:
    job = Job(**{"max_restarts": 0, **policy})
    job.start(why_stay="")
    return job


def in_place(**more: Any) -> InPlace:
    return InPlace(2, **{"elsewhere": ELSEWHERE, "max_restarts": 0, **more})


def test_it_stops_a_moment_after_the_others_and_leaves() -> None:
    job = started()
    asked = recalled(job)
    assert only(asked, AskToLeave).is_departure
    assert none(asked, StopWorkers)
    told = job.may_leave()
    assert only(told, Tell).reason == f"{RECALLED} This node leaves the job, which goes on."
    assert none(told, StopWorkers)
    assert only(job.time(only(told, WakeAt).at), StopWorkers).local_ranks == (0, 1)
    assert only(job.terminated(0, 1), DepartWell).reason == f"{RECALLED} It has left the job."
    assert job.state.phase is Phase.FINISHED
    assert none(job.log, TellPeers, RecordIncident, StartWorkers, FailJob, FinishJob)


def test_the_others_begin_again_without_it_and_count_nothing() -> None:
    job = started()
    (wakes,) = departs(job)
    assert isinstance(wakes, WakeAt)
    stopped = only(job.time(wakes.at), StopWorkers)
    assert stopped.reason == f"{OTHER_RECALLED} All workers restart without it."
    departs(job)
    start = only(job.terminated(0, 1), StartWorkers)
    assert (start.restarts_used, start.reason) == (0, stopped.reason)
    assert none(job.log, RecordIncident, TellPeers)


def test_workers_that_fail_because_it_stopped_first_are_no_fault() -> None:
    job = started()
    departs(job)
    only(job.raised(0, GLOO_CLOSED, kind="RuntimeError"), StopWorkers)
    job.exited(0, 1)
    assert only(job.terminated(1), StartWorkers).restarts_used == 0
    assert none(job.log, RecordIncident, TellPeers, FailJob)


def test_its_own_workers_may_fail_because_others_stopped_first() -> None:
    job = started()
    recalled(job)
    job.may_leave()
    only(job.raised(0, GLOO_CLOSED, kind="RuntimeError"), StopWorkers)
    job.exited(0, 1)
    only(job.terminated(1), DepartWell)
    assert none(job.log, RecordIncident, TellPeers)


def test_it_stays_while_it_is_needed_and_says_so_once() -> None:
    job = started()
    told = recalled(job, ALL_NEEDED)
    assert only(told, Tell).reason == f"{RECALLED} The node stays: {ALL_NEEDED}"
    assert none(job.time(only(told, WakeAt).at), Tell, AskToLeave)
    only(recalled(job), AskToLeave)


def test_it_asks_again_when_others_were_faster() -> None:
    job = started()
    recalled(job)
    refused = job.may_leave("other nodes leave already.")
    assert only(refused, WakeAt).at == pytest.approx(job.now + ASK_AGAIN_S)
    assert only(refused, Tell).reason == f"{RECALLED} The node stays: other nodes leave already."
    assert none(job.time(job.now + ASK_AGAIN_S / 2), AskToLeave)
    only(job.time(job.now + ASK_AGAIN_S), AskToLeave)
    only(job.may_leave(), Tell)


def test_it_stays_when_it_is_not_recalled_any_more() -> None:
    job = started()
    recalled(job, ALL_NEEDED)
    only(recalled(job, reason=""), Tell)
    assert none(job.time(job.now + 2 * ASK_AGAIN_S), AskToLeave)
    assert recalled(job, reason="") == []
    assert job.state.phase is Phase.RUNNING


def test_a_drained_node_leaves_in_the_same_way_and_says_that_it_did_not_come_to_the_end() -> None:
    job = started()
    only(recalled(job, reason=DRAINED, is_drained=True), AskToLeave)
    job.may_leave()
    job.time(job.now + STOP_AFTER_S)
    assert only(job.terminated(0, 1), DepartWell) == DepartWell(
        reason=f"{DRAINED} It has left the job.", is_drained=True
    )
    assert none(job.log, TellPeers, RecordIncident, FailJob)


def test_a_drained_node_stays_in_a_job_that_is_only_observed() -> None:
    job = started(isolates=False)
    told = recalled(job, reason=DRAINED, is_drained=True)
    assert only(told, Tell).reason == f"{DRAINED} The node stays: --unicron-on-fault is observe."
    only(recalled(job), AskToLeave)  # which the plan wants, and no fault


def test_whether_the_job_needs_this_node_is_not_forgotten_when_the_recall_is() -> None:
    job = started()
    recalled(job, ALL_NEEDED)
    recalled(job, reason="")
    assert none(job.finds(reason=FELL_OFF), StopWorkers, TellPeers)


def test_a_fault_while_a_step_is_awaited_is_answered_as_ever() -> None:
    job = in_place(max_restarts=1)
    only(recalled(job), AwaitStep)
    only(job.finds(reason=FELL_OFF), StopWorkers)
    assert step_ended(job) == []
    assert only(job.terminated(0, 1), AskToLeave).is_departure is False
    only(job.may_leave(), LeaveJob)


def test_a_drain_takes_the_place_of_a_recall_and_can_be_lifted() -> None:
    job = started()
    recalled(job, ALL_NEEDED)
    assert only(recalled(job, ALL_NEEDED, DRAINED, is_drained=True), WakeAt)
    lifted = recalled(job, reason="")
    assert only(lifted, Tell).reason == "This node is not kept out any more: it stays."
    assert none(job.time(job.now + 2 * ASK_AGAIN_S), AskToLeave)


def test_once_the_others_know_it_leaves_all_the_same() -> None:
    job = started()
    recalled(job)
    job.may_leave()
    assert recalled(job, reason="") == []
    job.time(job.now + STOP_AFTER_S)
    only(job.terminated(0, 1), DepartWell)


def test_a_fault_before_it_has_asked_is_answered_as_ever() -> None:
    job = started(max_restarts=1)
    recalled(job, ALL_NEEDED)
    job.exited(0, KILLED)
    assert only(job.terminated(1), StartWorkers).restarts_used == 1
    job.start(1, why_stay="")
    only(recalled(job), AskToLeave)  # of which the new round tells


def test_a_fault_when_it_may_leave_makes_it_leave_sooner() -> None:
    job = started()
    recalled(job)
    job.may_leave()
    only(job.exited(0, KILLED), StopWorkers)
    only(job.exited(1, CRASHED), DepartWell)
    assert none(job.log, TellPeers, RecordIncident)


def test_an_incident_that_waits_for_its_first_step_is_closed_when_the_node_leaves() -> None:
    job = started(max_restarts=1)
    job.exited(0, KILLED)
    job.terminated(1)
    job.start(1, why_stay="")
    recalled(job)
    told = job.may_leave()
    job.time(only(told, WakeAt).at)
    incident = only(job.terminated(0, 1), RecordIncident).incident
    assert (incident.number, incident.action, incident.first_step_at) == (1, "restart", None)
    assert incident.left == f"{RECALLED} It has left the job."
    assert incident.is_closed


def test_a_sick_node_that_leaves_is_not_stopped_for_that() -> None:
    job = started()
    recalled(job)
    job.may_leave()
    assert job.finds(reason=FELL_OFF) == []


def test_it_does_not_leave_when_its_part_is_ending() -> None:
    job = started()
    job.exited(0)
    assert only(recalled(job), Tell).reason.endswith("The node stays: its part of the job is ending.")
    only(job.exited(1), FinishJob)


def test_it_does_not_meet_those_who_wait() -> None:
    job = started()
    heard_at = job.now + 0.01
    job.feed(MembershipChanged(at=heard_at, nodes_waiting=1, generation=1))
    recalled(job)
    job.may_leave()
    assert job.time(job.now + JOIN_DELAY_S) == []
    job.time(job.now + STOP_AFTER_S)
    only(job.terminated(0, 1), DepartWell)


def test_in_place_it_leaves_when_a_step_has_ended_and_the_others_have_their_world() -> None:
    job = in_place()
    asked = recalled(job)
    only(asked, AwaitStep)
    assert none(asked, AskToLeave)
    assert only(step_ended(job), AskToLeave).have_state == ("n2",)
    assert none(job.may_leave(), StopWorkers, ChangeWorld)
    assert only(left_out(job), StopWorkers).local_ranks == (0, 1)
    only(job.terminated(0, 1), DepartWell)
    assert none(job.log, KillWorkers, RecordIncident, TellPeers, FailJob)


def test_in_place_it_does_not_wait_for_a_world_for_ever() -> None:
    job = in_place()
    recalled(job)
    step_ended(job)
    granted = job.may_leave()
    assert none(job.time(job.now + LEFT_OUT_WITHIN_S / 2), StopWorkers, MeetNodes)
    only(job.time(only(granted, WakeAt).at), StopWorkers)
    only(job.terminated(0, 1), DepartWell)


def test_in_place_the_others_go_on_and_count_nothing() -> None:
    job = in_place(elsewhere=(Member(name="0.0#z", node="n2#z", local_rank=0),))
    change = only(departs(job), ChangeWorld)
    assert change.lost == ("0.0#z",)
    assert change.restarts_used == 0
    assert change.reason == f"{OTHER_RECALLED} 2 ranks go on without it."
    assert none(departs(job), ChangeWorld)
    assert none(job.log, RecordIncident, StopWorkers)
    assert job.state.phase is Phase.RUNNING


def test_in_place_a_recall_is_told_again_when_the_nodes_have_met() -> None:
    job = in_place()
    recalled(job, ALL_NEEDED)
    job.nodes_wait()
    assert none(job.time(job.now + 2 * ASK_AGAIN_S), AskToLeave, AwaitStep)
    only(recalled(job), AwaitStep)


def test_in_place_it_stays_if_nobody_else_has_the_state() -> None:
    job = in_place(elsewhere=())
    assert only(recalled(job), Tell).reason.endswith("The node stays: no other node has the training state yet.")


def test_in_place_a_recall_may_end_while_a_step_is_waited_for() -> None:
    job = in_place()
    recalled(job)
    recalled(job, reason="")
    assert step_ended(job) == []


def test_in_place_it_stays_if_that_is_needed_by_the_end_of_the_step() -> None:
    job = in_place()
    recalled(job)
    recalled(job, ALL_NEEDED)
    assert none(step_ended(job), AskToLeave)


def test_who_is_not_in_the_world_yet_begins_again() -> None:
    job = InPlace(1, entered=False, elsewhere=ELSEWHERE, max_restarts=0)
    job.time(only(departs(job), WakeAt).at)
    assert only(job.exited(0, TERMINATED), StartWorkers).restarts_used == 0


def test_a_fault_of_a_peer_counts_also_while_a_node_leaves() -> None:
    job = started(max_restarts=1)
    job.time(only(departs(job), WakeAt).at)
    job.peer_failed()
    start = only(job.terminated(0, 1), StartWorkers)
    assert (start.restarts_used, start.reason) == (1, PEERS_FAULT)


def test_a_node_found_broken_before_its_leave_is_granted_is_isolated_all_the_same() -> None:
    job = started(max_restarts=1)
    only(recalled(job), AskToLeave)
    only(job.finds(reason=FELL_OFF), StopWorkers)
    job.may_leave()  # as it was asked before the finding
    told = job.terminated(0, 1)
    assert only(told, LeaveJob).reason.startswith(FELL_OFF)
    assert only(told, RecordIncident).incident.action == "isolate"
    assert job.state.phase is Phase.FINISHED
