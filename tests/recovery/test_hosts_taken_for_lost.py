"""A node that lives although the others took it for lost."""

from __future__ import annotations

from dataclasses import replace

from jobs_in_place import ELSEWHERE, InPlace, TwoLogs
from scenario import GLOO_CLOSED, KILLED, none, only

from unicron_elastic.recovery.commands import (
    ChangeWorld,
    Command,
    FailJob,
    KillWorkers,
    ReplaceWorker,
    StartWorkers,
    StopWorkers,
    TellPeers,
)
from unicron_elastic.recovery.events import NodeRecalled, StepEnded, TakenForLost
from unicron_elastic.recovery.state import Phase

WHY = "This node was taken out of the job: it answers neither on its connection nor on a new one."


def taken_for_lost(job: InPlace) -> list[Command]:
    return job.feed(TakenForLost(at=job._at(None), reason=WHY, generation=job.state.generation))


def ended(job: InPlace) -> list[Command]:
    """Those that were killed do."""
    return [command for worker in job.state.running for command in job.exited(worker.local_rank, KILLED)]


def test_its_workers_end_at_once_and_it_meets_the_others_again() -> None:
    job = TwoLogs(2)
    killed = job.world(2, *ELSEWHERE)
    assert only(killed, KillWorkers).local_ranks == (0, 1)
    assert none(killed, StopWorkers, TellPeers, ChangeWorld)
    commands = ended(job)
    assert only(commands, StartWorkers).restarts_used == 0  # the others have counted it, and tell when they meet
    assert none(job.log, ReplaceWorker)
    job.start(restarts_used=1)
    assert job.state.phase is Phase.RUNNING
    assert not job.state.is_left_out


def test_it_costs_nobody_the_last_restart() -> None:
    job = TwoLogs(1)
    job.state = replace(job.state, restarts_used=job.state.policy.max_restarts)  # which the others have used for it
    job.world(2, *ELSEWHERE)
    taken_for_lost(job)
    job.peer_failed()
    only(ended(job), StartWorkers)
    assert none(job.log, FailJob)


def test_what_its_workers_fail_of_then_is_no_fault_of_theirs() -> None:
    job = TwoLogs(1)
    job.world(2, *ELSEWHERE)
    job.raised(0, GLOO_CLOSED, kind="RuntimeError", said_at=job.now - 1.0)
    assert only(job.exited(0, 1), StartWorkers).restarts_used == 0
    assert none(job.log, TellPeers)


def test_it_may_hear_of_it_before_it_sees_the_world_of_the_others() -> None:
    job = TwoLogs(2)
    killed = only(taken_for_lost(job), KillWorkers)
    assert killed.reason.startswith(WHY)
    assert none(job.world(2, *ELSEWHERE), KillWorkers, ChangeWorld)
    assert only(ended(job), StartWorkers).restarts_used == 0


def test_a_newcomer_that_others_leave_out_at_once_does_not_try_for_ever() -> None:
    """They have not noticed that its node is there again."""
    job = TwoLogs(1)
    job.written(only(job.exited(0, KILLED), ChangeWorld))
    job.later(1.0)
    job.entered(0)
    joins = only(job.fetched(0), ChangeWorld)
    job.written(joins)
    only(job.world(9, *ELSEWHERE), KillWorkers)
    only(ended(job), StartWorkers)


def test_where_all_begin_again_without_it_that_counts() -> None:
    job = InPlace(2, entered=False)
    stopped = only(taken_for_lost(job), StopWorkers)
    assert stopped.reason == WHY
    assert only(job.terminated(0, 1), StartWorkers).restarts_used == 1


def test_alone_nobody_goes_on_without_it() -> None:
    job = InPlace(1)
    only(taken_for_lost(job), StopWorkers)
    assert only(job.terminated(0), StartWorkers).restarts_used == 1


def test_who_leaves_is_left_out_and_does_not_come_back() -> None:
    job = TwoLogs(1)
    job.feed(NodeRecalled(at=job._at(None), reason="Node n1 is recalled.", why_stay=""))
    job.feed(StepEnded(at=job._at(None), generation=job.state.generation))
    job.may_leave()
    job.world(2, *ELSEWHERE)
    assert none(job.terminated(0), StartWorkers)
    assert job.state.phase is Phase.FINISHED
