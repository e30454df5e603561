"""Losses that meet others on their way: nobody is left, or somebody stays in a world in which it is not any more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from jobs_in_place import ELSEWHERE, InPlace, LateNode, TwoLogs, short
from scenario import CRASHED, KILLED, PEERS_FAULT, none, only

from unicron_elastic.base.world import World
from unicron_elastic.faults import HangKind
from unicron_elastic.recovery.commands import (
    AskToLeave,
    ChangeWorld,
    Command,
    FailJob,
    FinishJob,
    InviteMember,
    KillWorkers,
    LeaveJob,
    RecordIncident,
    ReplaceWorker,
    StartWorkers,
    StopWorkers,
    TellPeers,
)
from unicron_elastic.recovery.state import Phase, first_members, is_newcomer, living_members
from unicron_elastic.recovery.worker_loss import REPLACE_AFTER_S


def test_nodes_that_count_on_each_other_and_have_both_lost_all_begin_again() -> None:
    job = TwoLogs(1)
    only(job.exited(0, CRASHED), ChangeWorld)  # the others go on
    booked = only(job.log, RecordIncident).incident
    assert booked.action == "go on"
    job.world(2, job.member("4.0"))  # but they have written first that they are lost, and that this one goes on
    commands = job.later(REPLACE_AFTER_S)
    assert only(commands, TellPeers).reason == "All who had the training state are lost: all workers begin again."
    assert only(commands, StartWorkers).restarts_used == 1
    assert only(commands, RecordIncident).incident.action == "restart"
    assert none(job.log, FinishJob, FailJob, ReplaceWorker)
    assert job.state.phase is Phase.IDLE


def test_the_incident_of_who_is_told_to_begin_again_is_closed_by_its_workers_first_step() -> None:
    job = TwoLogs(1)
    only(job.exited(0, CRASHED), ChangeWorld)
    only(job.peer_failed(), StartWorkers)
    begun = only(job.start(), RecordIncident).incident
    assert (begun.action, begun.decision, begun.regrouped_at is None) == ("restart", PEERS_FAULT, False)
    assert only(job.stepped(0), RecordIncident).incident.first_step_at is not None
    assert job.state.incident is None


def test_who_ends_well_while_others_are_lost_has_not_lost_the_job() -> None:
    job = InPlace(2)
    job.exited(1, KILLED)
    assert only(job.exited(0), FinishJob)


def test_a_newcomer_that_ends_before_the_world_that_takes_it_in_is_there_is_left_out_of_it() -> None:
    job = TwoLogs(2)
    job.written(only(job.exited(1, KILLED), ChangeWorld))
    job.later(REPLACE_AFTER_S)
    job.entered(1)
    joins = only(job.fetched(1), ChangeWorld)
    only(job.exited(1, KILLED), ChangeWorld)  # which cannot leave out who is not in yet
    left_out = only(job.written(joins), ChangeWorld)
    assert short(left_out.lost) == ["5.1"]
    assert left_out.reason == "Members whose processes have ended meanwhile are left out."
    assert none(job.written(left_out), ChangeWorld)
    assert "5.1" not in job.names()


def test_who_has_made_its_last_step_is_not_left_out_for_having_ended() -> None:
    job = TwoLogs(2)
    job.parted(1)
    job.exited(1)
    assert job.state.world is not None
    changed = job.world(2, *job.state.world.members)
    assert all("have ended meanwhile" not in each.reason for each in changed if isinstance(each, ChangeWorld))


def test_those_who_live_are_those_who_are_not_lost() -> None:
    job = TwoLogs(3)
    job.raised(1, "broken", kind="OSError")  # it runs until it has torn down
    job.exited(2, KILLED)
    assert short(living_members(job.state)) == ["4.0"]


# -- a node on its way into a world in which others train ------------------------------------------------------------


def late() -> LateNode:
    """A node that knows of the world of the others before its workers have asked for a part."""
    job = LateNode()
    job.world(7, *job.there)
    assert job.state.came_late
    job.state = replace(job.state, why_stay="")
    return job


@pytest.mark.parametrize("fails", ["raises", "is killed"])
def test_what_fails_there_before_it_has_asked_for_a_part_begins_again_alone(fails: str) -> None:
    job = late()
    commands = job.exited(0, KILLED) if fails == "is killed" else job.raised(0, "no data", kind="OSError")
    assert none(commands, StopWorkers, TellPeers)
    if fails == "raises":
        job.exited(0, 1)
    assert only(job.later(REPLACE_AFTER_S), ReplaceWorker).local_rank == 0
    assert only(job.entered(0), InviteMember).local_rank == 0


def _fails_thrice(job: LateNode) -> list[Command]:
    """Before its first step, with the same exception at the same place."""
    for _ in range(2):
        job.raised(0, "no data", kind="OSError", step=0)
        job.exited(0, 1)
        job.later(REPLACE_AFTER_S)
    return [*job.raised(0, "no data", kind="OSError", step=0), *job.exited(0, 1), *job.terminated(1)]


def test_a_node_that_fails_again_and_again_on_its_way_leaves_the_job_to_the_others() -> None:
    job = late()
    only(_fails_thrice(job), AskToLeave)
    left = job.may_leave()
    assert only(left, LeaveJob).quarantine_s == 3600.0
    incident = only(left, RecordIncident).incident
    assert incident.action == "isolate"
    assert incident.decision.endswith("Others train without this node: it leaves the job.")
    assert none(job.log, TellPeers, FailJob)


def test_it_begins_again_if_others_have_left_meanwhile_and_it_is_needed() -> None:
    job = late()
    _fails_thrice(job)
    assert only(job.may_leave("the job needs all 2 of its nodes."), StartWorkers).restarts_used == 2


def test_all_that_run_there_are_taken_in_by_one_world() -> None:
    job = late()
    commands = job.entered(0)
    assert only(commands, InviteMember).local_rank == 0
    assert only(commands, ChangeWorld).joined == first_members(job.state)
    assert none(job.entered(1), ChangeWorld)
    job.exited(1, KILLED)
    assert none(job.entered(0), ChangeWorld)


def test_who_was_lost_there_is_not_taken_in_with_them() -> None:
    job = late()
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    assert none(job.entered(1), ChangeWorld)  # it takes the place of another, and gets the state first
    job = late()
    job.exited(1, KILLED)
    (taken_in,) = only(job.entered(0), ChangeWorld).joined
    assert taken_in.local_rank == 0


def test_what_is_stopped_there_is_a_newcomer_and_replaced() -> None:
    job = late()
    assert all(is_newcomer(job.state, worker) for worker in job.state.workers)
    job.hung(1, kind=HangKind.STOPPED)
    assert only(job.evidence(1), KillWorkers).local_ranks == (1,)
    assert none(job.log, StopWorkers, TellPeers)


def test_before_the_first_world_all_begin_again() -> None:
    job = InPlace(2, entered=False)
    assert only(job.exited(0, KILLED), StopWorkers).local_ranks == (1,)


def test_a_reason_of_many_losses_still_fits_into_a_world() -> None:
    world = World(number=1, members=ELSEWHERE, store="h:1")
    again = world.after(store="h:2", reason="n3 is lost: it does not answer. " * 400)
    assert World.parse(again.to_json()) == again
    assert again.reason.startswith("n3 is lost: it does not answer. n3")
