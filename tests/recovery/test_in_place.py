"""What is decided when workers can go on in their processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jobs_in_place import InPlace, LateNode, short
from scenario import CRASHED, FIRST_RANK, GLOO_CLOSED, HANGS, KILLED, none, only

from unicron_elastic.base.world import Member
from unicron_elastic.faults import HangKind
from unicron_elastic.recovery.commands import (
    ChangeWorld,
    Command,
    FailJob,
    FinishJob,
    InviteMember,
    KillWorkers,
    RecordIncident,
    ReplaceWorker,
    StartWorkers,
    StopWorkers,
    Tell,
    TellWorld,
    WakeAt,
)
from unicron_elastic.recovery.events import (
    NodesDepart,
    OtherNodesLost,
    TimePassed,
    WorldChanged,
)
from unicron_elastic.recovery.state import Part, Phase, first_members, member_of
from unicron_elastic.recovery.worker_loss import BREAK_GRACE_S, REPLACE_AFTER_S


def test_the_first_world_has_all_workers_and_each_hears_of_it() -> None:
    job = InPlace(3, entered=False)
    assert only(job.entered(1), ChangeWorld).lost == ()
    assert only(job.entered(0), TellWorld).local_rank == 0
    assert job.names() == ["4.0", "5.0", "6.0"]


def test_the_others_go_on_without_a_killed_worker_and_it_is_replaced() -> None:
    job = InPlace(3)
    commands = job.exited(1, KILLED)
    assert short(only(commands, ChangeWorld).lost) == ["5.0"]
    assert none(commands, StopWorkers, StartWorkers, ReplaceWorker)
    assert {c.local_rank for c in commands if isinstance(c, TellWorld)} == {0, 2}
    assert only(job.later(REPLACE_AFTER_S), ReplaceWorker).local_rank == 1
    assert only(job.entered(1), InviteMember).sources == (0, 2)
    assert only(job.fetched(1), ChangeWorld).joined[0].local_rank == 1
    assert job.names() == ["4.0", "5.1", "6.0"]
    assert job.state.restarts_used == 1


def test_it_is_replaced_at_once_when_the_others_have_stepped() -> None:
    job = InPlace(3)
    job.exited(1, KILLED)
    assert none(job.went_on(0, reused=2, recomputed=3), ReplaceWorker)
    assert only(job.went_on(2, reused=3, recomputed=3), ReplaceWorker).local_rank == 1
    closed = job.records(1)[-1]
    assert (closed.micro_batches_reused, closed.micro_batches_recomputed) == (5, 3)
    assert none(job.later(REPLACE_AFTER_S), ReplaceWorker)


def test_a_newcomer_that_is_not_where_the_others_are_leaves_and_comes_again_by_another_name() -> None:
    job = InPlace(3)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    job.entered(1)
    job.fetched(1)
    left = only(job.left(1), ChangeWorld)
    assert (short(left.lost), left.reason) == (["5.1"], "rank 5 comes later, when its script is where the others are.")
    assert job.names() == ["4.0", "6.0"]
    assert only(job.entered(1), InviteMember).sources == (0, 2)
    assert only(job.fetched(1), ChangeWorld).joined[0].local_rank == 1
    assert (job.names(), job.state.restarts_used) == (["4.0", "5.2", "6.0"], 1)


def test_a_newcomer_that_dies_between_two_attempts_is_replaced_like_any_other() -> None:
    job = InPlace(3)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    job.entered(1)
    job.fetched(1)
    job.left(1)
    commands = job.exited(1, KILLED)
    assert none(commands, StopWorkers, StartWorkers)
    assert job.names() == ["4.0", "6.0"]
    assert only([*commands, *job.later(REPLACE_AFTER_S)], ReplaceWorker).local_rank == 1


def test_who_raised_may_tear_down_before_it_is_killed_and_replaced() -> None:
    job = InPlace(2, teardown_timeout_s=5.0)
    assert none(job.raised(0), KillWorkers)
    assert none(job.later(1.0), ReplaceWorker, KillWorkers)
    assert only(job.later(5.0), KillWorkers).local_ranks == (0,)
    assert only(job.exited(0, KILLED), ReplaceWorker).local_rank == 0


def test_who_hangs_is_killed_at_once() -> None:
    job = InPlace(3)
    job.hung(1, kind=HangKind.STOPPED)
    commands = job.evidence(1)
    assert short(only(commands, ChangeWorld).lost) == ["5.0"]
    assert only(commands, KillWorkers).local_ranks == (1,)
    assert only(job.exited(1, KILLED) + job.later(REPLACE_AFTER_S), ReplaceWorker).local_rank == 1


def test_without_restarts_left_the_job_ends() -> None:
    job = InPlace(2, max_restarts=1)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    job.entered(1)
    job.fetched(1)
    assert only(job.exited(0, KILLED), StopWorkers).local_ranks == (1,)
    assert "all" in only(job.terminated(1), FailJob).reason or "only restart is used" in job.log[-1].reason


def test_all_begin_again_if_somebody_has_not_asked_to_go_on() -> None:
    job = InPlace(3, entered=False)
    job.entered(0)
    job.entered(1)
    assert only(job.exited(1, KILLED), StopWorkers).local_ranks == (0, 2)


def test_all_begin_again_if_nobody_with_state_is_left() -> None:
    job = InPlace(2)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    job.entered(1)
    assert only(job.exited(0, KILLED), StopWorkers).local_ranks == (1,)
    assert only(job.terminated(1), StartWorkers).restarts_used == 2


def test_a_newcomer_that_dies_is_replaced_once_more() -> None:
    job = InPlace(2)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    job.entered(1)
    assert none(job.exited(1, CRASHED), StopWorkers)
    job.later(REPLACE_AFTER_S)
    assert job.replaced == [1, 1]
    job.entered(1)
    job.fetched(1)
    assert job.names() == ["4.0", "5.2"]


@pytest.mark.parametrize("has_entered", [False, True])
def test_a_newcomer_that_is_stopped_on_its_way_is_replaced_and_nobody_else_is_bothered(has_entered: bool) -> None:
    job = InPlace(2)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    job.went_on(0)
    if has_entered:
        job.entered(1)
    job.hung(1, kind=HangKind.STOPPED)
    commands = job.evidence(1)
    assert only(commands, KillWorkers).local_ranks == (1,)
    assert none(commands, StopWorkers)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    assert job.replaced == [1, 1]
    job.entered(1)
    job.fetched(1)
    assert job.names() == ["4.0", "5.2"]


def test_newcomers_end_when_the_last_member_has_parted() -> None:
    job = InPlace(2)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    job.entered(1)
    assert only(job.parted(0), KillWorkers).local_ranks == (1,)
    job.exited(1, KILLED)
    assert only(job.exited(0), FinishJob)


def test_a_newcomer_that_was_ended_while_it_joined_is_left_out_again() -> None:
    job = InPlace(3)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    job.entered(1)
    joined = job.state.world.after(  # type: ignore[union-attr]
        store="h:1", reason="rank 5 is back.", lost=(), joined=(member_of(job.state, job.state.workers[1]),)
    )
    assert only(job.parted(0), KillWorkers).local_ranks == (1,)
    commands = job.feed(WorldChanged(at=job.now, world=joined, generation=job.state.generation))
    assert "5.1" in short(next(command.lost for command in commands if isinstance(command, ChangeWorld)))
    assert job.names() == ["6.0"]


def test_the_same_members_connect_anew_when_collectives_fail_and_nobody_is_gone() -> None:
    job = InPlace(2, retries=2)
    for attempt in (1, 2):
        assert none(job.broke(0), ChangeWorld)
        again = only(job.later(BREAK_GRACE_S), ChangeWorld)
        assert (again.lost, again.joined) == ((), ())
        assert f"attempt {attempt} of 2" in again.reason
    assert job.state.restarts_used == 0


def test_who_complains_too_often_is_replaced() -> None:
    job = InPlace(2, retries=1)
    job.broke(0)
    job.later(BREAK_GRACE_S)
    job.broke(0)
    commands = job.later(BREAK_GRACE_S)
    assert short(only(commands, ChangeWorld).lost) == ["4.0"]
    assert only(commands, KillWorkers).local_ranks == (0,)
    assert job.state.restarts_used == 1


def test_a_step_forgets_the_attempts_before() -> None:
    job = InPlace(2, retries=1)
    for _ in range(4):
        job.broke(0)
        assert "attempt 1 of 1" in only(job.later(BREAK_GRACE_S), ChangeWorld).reason
        job.went_on(0)
        job.went_on(1)


def test_a_death_explains_broken_collectives() -> None:
    job = InPlace(3)
    job.broke(0)
    assert short(only(job.exited(1, KILLED), ChangeWorld).lost) == ["5.0"]
    assert none(job.later(BREAK_GRACE_S), ChangeWorld)


def test_the_same_bug_of_one_rank_ends_the_job() -> None:
    job = InPlace(2, max_restarts=9, same_failure_limit=3)
    for _ in range(2):
        job.raised(1, "bad", step=7)
        job.exited(1, 1, step=7)
        job.later(REPLACE_AFTER_S)
        job.entered(1)
        job.fetched(1)
    assert only(job.raised(1, "bad", step=7), StopWorkers).local_ranks == (0,)
    job.exited(1, 1, step=7)
    assert "3 times in a row" in only(job.terminated(0), FailJob).reason


LOCAL = st.integers(0, 3)
HAPPENINGS = st.one_of(
    st.tuples(st.just("exited"), LOCAL, st.sampled_from([0, 1, KILLED, CRASHED])),
    st.tuples(st.just("raised"), LOCAL, st.sampled_from(["bad", GLOO_CLOSED])),
    st.tuples(
        st.sampled_from(["entered", "entered", "fetched", "went_on", "left", "parted", "broke", "hung", "evidence"]),
        LOCAL,
    ),
    st.tuples(st.just("later"), st.sampled_from([0.0, BREAK_GRACE_S, REPLACE_AFTER_S, 6.0, 400.0])),
)


def _happen(job: InPlace, happening: tuple[Any, ...]) -> None:
    if job.state.phase is Phase.IDLE:
        job.start(job.started()[-1].restarts_used)
        for local_rank in range(job.workers):
            job.entered(local_rank)
    name, first, *more = happening
    if name == "raised":
        job.raised(first, *more, kind="RuntimeError", step=3)
    else:
        getattr(job, name)(first, *more)


@given(st.integers(1, 4), st.integers(0, 4), st.lists(HAPPENINGS, max_size=40))
def test_in_any_order_the_job_stays_consistent(
    workers: int, max_restarts: int, happenings: list[tuple[Any, ...]]
) -> None:
    job = InPlace(workers, max_restarts=max_restarts)
    for happening in happenings:
        _happen(job, happening)  # validates after each event
        assert job.state.restarts_used <= max_restarts
    ends = [command for command in job.log if isinstance(command, FinishJob | FailJob)]
    assert len(ends) == (job.state.phase is Phase.FINISHED)


@given(st.integers(2, 4), st.lists(HAPPENINGS, max_size=40))
@example(2, [("exited", 1, 1), ("parted", 0), ("entered", 0)])
def test_whoever_is_lost_is_replaced_or_the_job_is_over(workers: int, happenings: list[tuple[Any, ...]]) -> None:
    job = InPlace(workers, max_restarts=50, same_failure_limit=0)
    for happening in happenings:
        _happen(job, happening)
    # Nothing but the ends of those that were killed and the wake-ups that were asked for comes any more.
    for _ in range(3):
        killed = {rank for c in job.log if isinstance(c, KillWorkers) for rank in c.local_ranks}
        for worker in job.state.running:
            if worker.local_rank in killed and worker.was_killed:
                job.exited(worker.local_rank, KILLED)
        for at in sorted({command.at for command in job.log if isinstance(command, WakeAt)}):
            job.now = max(job.now, at)
            job.feed(TimePassed(at=job.now))
    is_over = any(worker.part is Part.PARTED for worker in job.state.workers)  # then nobody is replaced any more
    if (
        job.state.phase is Phase.RUNNING
        and any(worker.part is Part.MEMBER for worker in job.state.running)
        and not is_over
    ):
        assert not [worker for worker in job.state.workers if worker.part in (Part.LOST, Part.REPLACING)]


def test_a_bug_that_all_ranks_meet_at_one_step_counts_once() -> None:
    job = InPlace(4, max_restarts=3, same_failure_limit=3)
    for local_rank in range(4):
        job.raised(local_rank, "nfs is away", kind="OSError", step=7)
    for local_rank in range(4):
        job.exited(local_rank, 1, step=7)
    assert job.started()[-1].restarts_used == 1


def test_who_fails_after_its_last_step_is_not_gone_on_without() -> None:
    job = InPlace(2)
    job.parted(1)
    assert only(job.raised(1), StopWorkers).local_ranks == (0,)


def test_nobody_is_told_of_a_world_with_one_that_has_parted() -> None:
    for happens in ("joins", "breaks", "dies"):
        job = InPlace(3)
        job.exited(1, KILLED)
        job.later(REPLACE_AFTER_S)
        job.entered(1)
        job.parted(2)
        before = len(job.log)
        if happens == "joins":
            job.fetched(1)
        elif happens == "breaks":
            job.broke(0)
            job.later(BREAK_GRACE_S)
        else:
            job.exited(1, KILLED)
        told = any(isinstance(command, TellWorld) for command in job.log[before:])
        assert not told or not any(name.startswith("6.0") for name in job.names()), happens


def test_newcomers_end_when_the_last_member_has_ended_without_a_word() -> None:
    job = InPlace(2)
    job.exited(1, KILLED)
    job.later(REPLACE_AFTER_S)
    job.entered(1)
    assert only(job.exited(0), KillWorkers).local_ranks == (1,)


def test_who_complains_again_and_again_without_a_restart_left_ends_the_job_at_once() -> None:
    job = InPlace(2, max_restarts=0, retries=1)
    job.broke(0)
    assert only(job.later(BREAK_GRACE_S), ChangeWorld).lost == ()
    job.broke(0)
    assert only(job.later(BREAK_GRACE_S), StopWorkers).local_ranks == (0, 1)


ELSEWHERE = Member(name="9.0#1", node="b#1", local_rank=0)


def test_a_node_that_loses_its_only_worker_waits_for_another_while_other_nodes_go_on() -> None:
    job = InPlace(1, elsewhere=(ELSEWHERE,))
    assert len(only(job.exited(0, KILLED), ChangeWorld).lost) == 1
    assert job.state.phase is Phase.RUNNING
    assert only(job.later(REPLACE_AFTER_S), ReplaceWorker).local_rank == 0
    assert only(job.entered(0), InviteMember).sources == ()  # its state comes from elsewhere, in the group
    assert only(job.fetched(0), ChangeWorld).joined[0].local_rank == 0
    incident = only(job.went_on(0), RecordIncident).incident
    assert incident.first_step_at is not None
    assert (incident.micro_batches_reused, incident.micro_batches_recomputed) == (None, None)


def test_it_begins_again_at_once_when_the_others_do() -> None:
    job = InPlace(1, elsewhere=(ELSEWHERE,))
    job.exited(0, KILLED)
    assert only(job.peer_failed(), StartWorkers).restarts_used == 2
    assert job.state.phase is Phase.IDLE


def test_it_begins_again_when_the_others_are_lost_too() -> None:
    job = InPlace(1, elsewhere=(ELSEWHERE,))
    job.exited(0, KILLED)
    lost = OtherNodesLost(at=job._at(None), nodes=("b",), reason="b is lost.", generation=job.state.generation)
    assert only(job.feed(lost), StartWorkers).restarts_used == 2


def test_what_a_newcomer_says_of_its_first_step_is_not_counted() -> None:
    job = InPlace(2)
    job.exited(0, KILLED)
    job.later(REPLACE_AFTER_S)
    job.entered(0)
    job.fetched(0)
    assert none(job.went_on(0, reused=5, recomputed=5), RecordIncident)
    incident = only(job.went_on(1, reused=3, recomputed=2), RecordIncident).incident
    assert (incident.micro_batches_reused, incident.micro_batches_recomputed) == (3, 2)


def test_who_has_joined_only_such_as_lost_the_state_does_not_begin_anew_beside_what_is_kept() -> None:
    """The member of another node went without a word, and this node's was replaced before that was noticed."""
    far = Member(name="far", node="far/1#x", local_rank=0)
    job = InPlace(1, elsewhere=(far,))
    job.exited(0, KILLED)
    job.time(job.now + REPLACE_AFTER_S)
    job.entered(0)
    job.fetched(0)
    commands = job.raised(0, "nobody has it", kind="unicron_elastic.training.group.speech.NoStateLeft")
    assert job.state.phase is Phase.STOPPING
    assert none(commands, ReplaceWorker, ChangeWorld)
    assert only(job.exited(0, 1), StartWorkers).restarts_used == 2


def test_a_node_that_joined_and_left_in_the_same_moment_does_not_stay_in_the_world() -> None:
    """Its word that it leaves comes first, and then the world that it had made with itself in it."""
    far = Member(name="far", node="far/1#x", local_rank=0)
    job = InPlace(1)
    job.feed(NodesDepart(at=job.now, nodes=("far/1",), reason="Node far is recalled.", generation=job.state.generation))
    assert job.state.world is not None
    world = job.state.world.after(store="far:1", reason="it joins", joined=(far,))
    commands = job.changed(world)
    assert only(commands, ChangeWorld).lost == ("far",)
    assert job.state.world.rank_of("far") is None
    joined_later = job.state.world.after(
        store="far:1", reason="another", joined=(replace(far, name="new", node="n/2#y"),)
    )
    assert none(job.feed(WorldChanged(at=job.now, world=joined_later, generation=job.state.generation)), ChangeWorld)


# -- who hangs while others are lost ---------------------------------------------------------------------------------


def test_who_hung_before_another_was_lost_is_seen_again_and_then_lost_too_with_the_patience_that_is_left() -> None:
    job = InPlace(hang_patience_s=30.0)
    job.hung(1, at=200.0, kind=HangKind.AWAITED)
    job.evidence(1, at=200.4)
    assert only(job.time(205.0), Tell).reason == f"{HANGS} By now there has been no step for 5.1 s."
    job.exited(0, KILLED)
    job.watched_anew()
    assert none(job.time(500.0), KillWorkers)
    job.hung(1, at=501.0, since=199.9, kind=HangKind.AWAITED)
    commands = job.time(501.0)
    assert only(commands, KillWorkers).local_ranks == (1,)
    assert none(commands, StopWorkers)
    assert job.state.hang is None


def test_who_goes_on_in_the_new_world_does_not_hang() -> None:
    job = InPlace()
    job.hung(1, at=200.0, kind=HangKind.AWAITED)
    job.evidence(1, at=200.4)
    job.time(205.0)
    job.exited(0, KILLED)
    assert none(job.went_on(2), Tell)
    assert only(job.went_on(1), Tell).reason == f"rank {FIRST_RANK + 1} goes on in the new world."
    assert job.state.hang is None


def test_who_is_in_doubt_whether_it_hangs_is_stopped_like_the_others() -> None:
    job = InPlace()
    job.hung(1, at=200.0, kind=HangKind.AWAITED)
    job.exited(0, KILLED)
    assert job.state.hang is not None
    commands = job.peer_failed()
    assert none(commands, KillWorkers)
    assert 1 in only(commands, StopWorkers).local_ranks


def test_another_who_hangs_in_the_new_world_is_another_hang() -> None:
    job = InPlace(hang_patience_s=30.0)
    job.hung(1, at=200.0, kind=HangKind.AWAITED)
    job.exited(0, KILLED)
    job.hung(2, at=400.0, since=199.0, kind=HangKind.AWAITED)
    assert none(job.time(500.0), KillWorkers)
    assert only(job.time(700.0), KillWorkers).local_ranks == (2,)


# -- a node that comes later -----------------------------------------------------------------------------------------


def test_who_is_taken_in_by_its_nodes_wish_for_a_first_world_is_told_that_it_is_a_newcomer() -> None:
    job = LateNode()
    wish = only(job.entered(0), ChangeWorld)
    assert wish.joined == first_members(job.state)
    invitation = only(job.world(1, *job.there), InviteMember)
    assert (invitation.local_rank, invitation.sources) == (0, ())
    assert only(job.world(2, *job.there, *wish.joined), TellWorld).local_rank == 0
    assert only(job.fetched(0), TellWorld).local_rank == 0  # it is ready, and waits for a world

    late = job.entered(1)  # its other worker, which is in that world already
    assert [type(command) for command in late] == [InviteMember, TellWorld]
    assert {command.local_rank for command in late if isinstance(command, InviteMember | TellWorld)} == {1}
    assert only(job.fetched(1), TellWorld).local_rank == 1


def test_who_is_in_the_first_world_is_no_newcomer() -> None:
    job = LateNode()
    wish = only(job.entered(0), ChangeWorld)
    assert only(job.world(1, *job.there, *wish.joined), TellWorld).local_rank == 0
    assert only(job.entered(1), TellWorld).local_rank == 1
    assert none(job.log, InviteMember)


class Apart(InPlace):
    """A job whose agents cannot agree on the next world while the store is ``away``."""

    away = False

    def _change(self, command: ChangeWorld) -> list[Command]:
        return [] if self.away else super()._change(command)


def test_who_is_back_before_the_lost_have_left_is_counted_once() -> None:
    job = Apart(3)
    job.away = True
    for local_rank in (0, 2):
        job.exited(local_rank, KILLED)
    job.later(REPLACE_AFTER_S)
    assert job.replaced == [0, 2]
    job.entered(2)
    assert only(job.fetched(2), ChangeWorld).reason == f"rank {FIRST_RANK + 2} is back: 2 ranks train together."
