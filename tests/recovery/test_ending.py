"""What becomes of newcomers when the others have made their last step, which may be that of one epoch."""

from __future__ import annotations

import pytest
from jobs_in_place import InPlace, LateNode
from scenario import CRASHED, KILLED, none, only

from unicron_elastic.base.world import NO_END, Member
from unicron_elastic.recovery.commands import (
    ChangeWorld,
    Command,
    FinishJob,
    KillWorkers,
    RecordIncident,
    ReplaceWorker,
    StartWorkers,
    StopWorkers,
    Tell,
    TellPeers,
    TellWorld,
)
from unicron_elastic.recovery.events import OtherNodesLost, WorldChanged
from unicron_elastic.recovery.state import Part
from unicron_elastic.recovery.worker_loss import BREAK_GRACE_S, REPLACE_AFTER_S


def with_newcomer(workers: int = 3, *, is_ready: bool = True) -> InPlace:
    """A job whose worker 1 takes the place of another."""
    job = InPlace(workers)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    job.entered(1)
    if is_ready:
        job.fetched(1)
    return job


def number(job: InPlace) -> int:
    assert job.state.world is not None
    return job.state.world.number


def test_a_newcomer_waits_for_those_who_may_train_once_more() -> None:
    job = with_newcomer(is_ready=False)
    for local_rank in (0, 2):
        assert none(job.parted(local_rank, number(job)), KillWorkers)
    assert only(job.fetched(1), ChangeWorld).joined[0].local_rank == 1
    assert none(job.log, KillWorkers)
    assert job.names() == ["4.0", "5.1", "6.0"]  # none of them leaves for it
    job.entered(0)
    job.entered(2)
    assert [worker.part for worker in job.state.workers] == [Part.MEMBER] * 3


def test_newcomers_end_when_all_who_have_made_their_last_step_have_ended() -> None:
    for is_ready in (False, True):  # in the latter case it is in a world in which the others have not met it
        job = with_newcomer(is_ready=is_ready)
        parted_in = number(job) - is_ready
        for local_rank in (0, 2):
            job.parted(local_rank, parted_in)
        assert none(job.exited(0), KillWorkers, ChangeWorld)
        commands = job.exited(2)
        assert only(commands, KillWorkers).local_ranks == (1,)
        assert only(commands, ChangeWorld).over == parted_in
        last = job.exited(1, KILLED)
        assert only(last, FinishJob)
        assert none(last, ReplaceWorker)


def all_parted(workers: int = 3) -> InPlace:
    """A job in which all have made the last step of an epoch."""
    job = InPlace(workers)
    for local_rank in range(workers):
        job.parted(local_rank, number(job))
    return job


def left_out(commands: list[Command]) -> tuple[str, ...]:
    (change,) = [each for each in commands if isinstance(each, ChangeWorld) and each.lost]
    assert change.reason.endswith("the last step: the others go on without it.")
    return change.lost


def test_who_trains_once_more_does_so_without_a_rank_that_has_ended_instead() -> None:
    job = all_parted()
    assert none(job.exited(1), ChangeWorld, KillWorkers)  # nobody knows yet what the others want
    assert left_out(job.entered(0)) == ("5.0#here",)
    assert none(job.entered(2), ChangeWorld)
    assert job.names() == ["4.0", "6.0"]
    assert none(job.log, StopWorkers, ReplaceWorker)


def test_a_rank_that_ends_while_the_others_train_once_more_is_left_out_when_that_breaks() -> None:
    for is_heard_first in (False, True):
        job = all_parted()
        job.entered(0)
        job.entered(2)
        if is_heard_first:
            job.broke(0)
            commands = job.exited(1)
        else:
            job.exited(1)
            commands = job.broke(0)
        assert left_out(commands) == ("5.0#here",)
        assert none(job.later(BREAK_GRACE_S), RecordIncident)
        assert job.names() == ["4.0", "6.0"]


def test_who_is_seen_to_end_is_waited_for() -> None:
    job = all_parted()
    job.entered(0)
    job.entered(2)
    job.ending(1)
    job.broke(0)
    assert none(job.later(2 * BREAK_GRACE_S), ChangeWorld)
    assert left_out(job.exited(1)) == ("5.0#here",)


def test_a_member_that_is_seen_to_end_explains_what_broke_though_its_end_takes_its_time() -> None:
    job = InPlace(2)
    job.ending(1)
    job.broke(0)
    assert none(job.later(2 * BREAK_GRACE_S), ChangeWorld)
    assert only(job.exited(1, KILLED), ChangeWorld).lost == ("5.0#here",)
    assert job.state.reattempts == 0


def test_what_comes_after_it_was_left_out_is_answered_as_ever() -> None:
    job = all_parted()
    job.exited(1)
    job.entered(0)
    job.entered(2)
    assert only(job.exited(2, KILLED), ChangeWorld).lost == ("6.0#here",)
    assert only(job.later(REPLACE_AFTER_S), ReplaceWorker).local_rank == 2


def test_who_came_in_time_for_the_last_step_ends_by_itself() -> None:
    job = with_newcomer()
    for local_rank in (0, 2):
        job.parted(local_rank, number(job))
    job.exited(0)
    job.exited(2)
    assert none(job.log, KillWorkers)
    job.parted(1, number(job))
    assert only(job.exited(1), FinishJob)


def test_on_another_node_newcomers_end_when_it_hears_of_the_end() -> None:
    for has_asked in (False, True):
        job = LateNode()
        if has_asked:
            wish = only(job.entered(0), ChangeWorld)
            job.world(1, *job.there)
            job.world(2, *job.there, *wish.joined)
        ended = over(job, *job.there)
        assert only(ended, KillWorkers).local_ranks == (0, 1)
        assert none(ended, TellWorld, StopWorkers)
        last = [*job.exited(0, KILLED), *job.exited(1, KILLED)]
        assert only(last, FinishJob)
        assert none(job.log, StartWorkers, ReplaceWorker)


def over(job: LateNode, *members: Member) -> list[Command]:
    """Those elsewhere have made their last step in the first world, and begin to end."""
    before = job.state.world
    if before is None:
        job.world(1, *members)
        before = job.state.world
    assert before is not None
    world = before.after(store="h:1", reason="", over=1)
    return job.feed(WorldChanged(at=job._at(None), world=world, generation=job.state.generation))


def test_a_newcomer_that_nobody_waits_for_may_fail() -> None:
    job = with_newcomer(is_ready=False)
    used = job.state.restarts_used
    for local_rank in (0, 2):
        job.parted(local_rank, number(job))
    assert none(job.exited(1, CRASHED), StopWorkers, ReplaceWorker)
    assert none(job.later(REPLACE_AFTER_S), ReplaceWorker)
    assert job.state.restarts_used == used
    job.entered(0)
    assert only(job.entered(2), ReplaceWorker).local_rank == 1  # those who train once more want it again


def test_those_who_wait_for_the_end_of_their_steps_hear_that_others_have_left_it() -> None:
    job = InPlace(3)
    parted_in = number(job)
    job.parted(2, parted_in)
    job.broke(0)
    commands = job.later(BREAK_GRACE_S)
    assert [each.parted for each in commands if isinstance(each, ChangeWorld)] == [NO_END, (parted_in, 9)]
    assert job.names() == ["4.0", "5.0", "6.0"]


def test_connections_that_broke_before_others_joined_are_made_anew() -> None:
    job = InPlace(2)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    job.entered(1)
    broken = number(job)
    job.broke(0)
    assert none(job.fetched(1), TellWorld) or number(job) == broken + 1
    again = only(job.later(BREAK_GRACE_S), ChangeWorld)
    assert (again.lost, again.joined, again.of) == ((), (), broken + 1)
    assert job.state.world is not None
    assert job.state.world.anew == number(job)


@pytest.mark.parametrize("is_told_before", [True, False])
def test_connections_that_no_join_leaves_whole_are_not_made_anew_behind_one(is_told_before: bool) -> None:
    job = InPlace(2)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    job.entered(1)
    broken = number(job)
    if is_told_before:
        job.broke(0, outlives_joins=False)
    job.fetched(1)
    assert number(job) == broken + 1
    if not is_told_before:
        job.broke(0, broken, outlives_joins=False)
    assert none(job.later(BREAK_GRACE_S), ChangeWorld)
    job.broke(0, outlives_joins=False)
    assert only(job.later(BREAK_GRACE_S), ChangeWorld).of == broken + 1


def test_who_is_lost_between_epochs_is_replaced_when_the_others_train_once_more() -> None:
    job = InPlace(3)
    for local_rank in range(3):
        job.parted(local_rank, number(job))
    commands = job.exited(1, KILLED)
    assert none(commands, StopWorkers, StartWorkers, ReplaceWorker)
    (without, all_had_come) = (each for each in commands if isinstance(each, ChangeWorld))
    assert "2 ranks go on with what they do between steps." in without.reason
    assert all_had_come.parted == (1, 9)
    assert {each.local_rank for each in commands if isinstance(each, TellWorld)} == {0, 2}
    assert none(job.later(REPLACE_AFTER_S), ReplaceWorker)
    job.entered(0)
    assert only(job.entered(2), ReplaceWorker).local_rank == 1
    job.entered(1)
    job.fetched(1)
    for local_rank in range(3):
        job.went_on(local_rank)
        job.parted(local_rank, number(job))
    job.exited(0)
    job.exited(2)
    assert only(job.exited(1), FinishJob)
    assert job.state.restarts_used == 1


def test_who_is_lost_after_the_last_step_of_all_has_the_others_begin_again_when_they_end() -> None:
    for parts_first in (True, False):  # or it was lost as it waited for the end of that step
        job = InPlace(3)
        for local_rank in (0, 1, 2) if parts_first else (0, 2):
            job.parted(local_rank, number(job))
        assert none(job.exited(1, KILLED), StopWorkers)
        commands = job.exited(0)
        assert only(commands, TellPeers).reason == only(commands, StopWorkers).reason
        assert only(commands, StopWorkers).reason.startswith("rank 5 was lost after the last step, and nobody does")
        assert only(job.terminated(2), StartWorkers)


def test_who_was_lost_in_the_last_step_has_nobody_begin_again() -> None:
    job = InPlace(3)
    job.exited(1, KILLED)
    for local_rank in (0, 2):  # which made it in the next world
        job.went_on(local_rank)
        job.parted(local_rank, number(job))
    job.exited(0)
    job.exited(2)
    assert none(job.log, TellPeers, StopWorkers)


def test_who_is_lost_after_its_last_step_on_another_node_has_all_begin_again_if_those_here_end() -> None:
    job = LateNode()
    here = only(job.entered(0), ChangeWorld).joined
    job.world(1, *here, Member(name="0.0#there", node="other#there", local_rank=0))
    job.entered(1)
    for local_rank in (0, 1):
        job.parted(local_rank, 1)
    lost = OtherNodesLost(at=job._at(None), nodes=("other",), reason="other is lost.", generation=job.state.generation)
    assert only(job.feed(lost), ChangeWorld).lost == ("0.0#there",)
    job.others_agree(lost="0.0#there", lost_in=1)
    assert none(job.log, StopWorkers)
    reason = only(job.exited(0), TellPeers).reason
    assert reason.startswith("a rank of another node was lost after the last step")


def test_a_replacement_that_never_trained_is_not_missed_at_the_end() -> None:
    job = with_newcomer()
    for local_rank in (0, 2):  # which had come to the end before it joined
        job.parted(local_rank, number(job) - 1)
    job.exited(1, KILLED)
    job.exited(0)
    job.exited(2)
    assert none(job.log, TellPeers, StopWorkers)


def test_a_newcomer_that_is_stopped_and_that_nobody_needs_is_ended() -> None:
    job = with_newcomer(is_ready=False)
    job.went_on(0)
    job.went_on(2)  # so that no incident is open
    job.parted(0, number(job))
    job.hung(1)
    assert only(job.evidence(1), KillWorkers).local_ranks == (1,)
    assert none(job.log, StopWorkers)


def test_what_is_said_of_a_world_that_nobody_knows_ends_nobody_else() -> None:
    job = InPlace(2, entered=False, do_others_train=True)
    job.parted(0, 1)
    assert none(job.exited(1, CRASHED), KillWorkers)


def test_a_newcomer_that_ends_before_it_has_come_is_spoken_of() -> None:
    job = with_newcomer(is_ready=False)
    assert only(job.exited(1), Tell).reason.startswith("rank 5 ended by itself before it came to the others")
