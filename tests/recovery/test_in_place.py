"""What is decided when workers can go on in their processes."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from jobs_in_place import InPlace, LateNode
from scenario import CRASHED, FIRST_RANK, GLOO_CLOSED, HANGS, KILLED, none, only

from unicron_elastic.base.world import Member
from unicron_elastic.faults import HangKind
from unicron_elastic.recovery.commands import (
    ChangeWorld,
    FailJob,
    FinishJob,
    InviteMember,
    KillWorkers,
    StopWorkers,
    Tell,
    TellWorld,
    WakeAt,
)
from unicron_elastic.recovery.events import (
    TimePassed,
)
from unicron_elastic.recovery.state import Part, Phase
from unicron_elastic.recovery.worker_loss import BREAK_GRACE_S, REPLACE_AFTER_S

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


ELSEWHERE = Member(name="9.0#1", node="b#1", local_rank=0)


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


def test_who_is_in_the_first_world_is_no_newcomer() -> None:
    job = LateNode()
    wish = only(job.entered(0), ChangeWorld)
    assert only(job.world(1, *job.there, *wish.joined), TellWorld).local_rank == 0
    assert only(job.entered(1), TellWorld).local_rank == 1
    assert none(job.log, InviteMember)
