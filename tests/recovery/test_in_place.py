"""What is decided when workers can go on in their processes."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from jobs_in_place import InPlace, LateNode
from scenario import CRASHED, GLOO_CLOSED, KILLED, none, only

from unicron_elastic.base.world import Member
from unicron_elastic.recovery.commands import (
    ChangeWorld,
    FailJob,
    FinishJob,
    InviteMember,
    KillWorkers,
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
        st.sampled_from(
            ["entered", "entered", "fetched", "went_on", "left", "parted", "broke", "hung", "evidence", "ending"]
        ),
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


# -- a node that comes later -----------------------------------------------------------------------------------------


def test_who_is_in_the_first_world_is_no_newcomer() -> None:
    job = LateNode()
    wish = only(job.entered(0), ChangeWorld)
    assert only(job.world(1, *job.there, *wish.joined), TellWorld).local_rank == 0
    assert only(job.entered(1), TellWorld).local_rank == 1
    assert none(job.log, InviteMember)
