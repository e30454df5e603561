"""Faults of this node as scenarios: every event is fed by hand, every invariant checked after it."""

from __future__ import annotations

import signal

import pytest
from scenario import KILLED, TERMINATED, Job, only

from unicron_elastic.recovery.commands import (
    FailJob,
    RecordIncident,
    StartWorkers,
    StopWorkers,
    WakeAt,
)
from unicron_elastic.recovery.events import TimePassed
from unicron_elastic.recovery.state import Phase


def test_workers_nobody_asked_for_are_not_taken_for_the_jobs() -> None:
    job = Job()
    job.start()
    running = job.state
    assert job.start(1) == []  # those that run must not be forgotten
    assert job.state == running
    job.exited(0)
    job.exited(1)
    finished = job.state
    assert finished.phase is Phase.FINISHED
    assert job.start(0) == []  # nor is a job revived that is over
    assert job.state == finished


def test_late_time_changes_nothing() -> None:
    job = Job(stop_timeout_s=3.0)
    job.start()
    kill_at = only(job.exited(0, KILLED), WakeAt).at
    job.exited(1, TERMINATED)
    assert job.feed(TimePassed(at=kill_at)) == []  # between two generations
    job.start(1)
    assert job.feed(TimePassed(at=kill_at + 1)) == []  # in the next one


def test_progress_starts_the_count_of_equal_failures_anew() -> None:
    job = Job(max_restarts=100, same_failure_limit=2)
    for step in (7, 8, 7, 9, 10):
        assert only(job.fail_once(1, step=step, kind="KeyError"), StartWorkers)
    assert only(job.fail_once(1, step=10, kind="KeyError"), FailJob)


def test_a_job_whose_steps_are_unknown_keeps_all_of_its_restarts() -> None:
    job = Job(max_restarts=6, same_failure_limit=2)
    for used in range(1, 7):
        assert only(job.fail_once(1), StartWorkers).restarts_used == used
    assert only(job.fail_once(1), FailJob).reason.endswith("No restart: all 6 restarts are used.")


def test_sigkill_never_counts_as_the_same_failure() -> None:
    job = Job(max_restarts=100, same_failure_limit=2)
    for _ in range(5):
        assert only(job.fail_once(KILLED, step=7), StartWorkers)


def test_a_limit_of_zero_never_stops_early() -> None:
    job = Job(max_restarts=100, same_failure_limit=0)
    for _ in range(6):
        assert only(job.fail_once(1, step=7, kind="KeyError"), StartWorkers)


def test_the_steps_of_those_that_did_not_fail_count_as_progress() -> None:
    job = Job(max_restarts=1, reset_after_steps=50)
    for _ in range(3):
        job.start(1)
        job.exited(0, KILLED)  # its page is unreadable
        assert only(job.exited(1, TERMINATED, step=50), StartWorkers).restarts_used == 1


@pytest.mark.parametrize("code", [TERMINATED, 1, 143, 0])
def test_after_sigterm_a_worker_may_end_as_it_likes(code: int) -> None:
    job = Job()
    job.start()
    job.exited(0, KILLED)
    job.raised(1, "stopped", kind="KeyboardInterrupt")
    commands = job.exited(1, code)
    assert only(commands, RecordIncident).incident.consequences == ()
    assert only(commands, StartWorkers)


def test_who_has_been_ending_for_long_is_told_to_stop() -> None:
    job = Job()
    job.start()
    job.ending(1, at=job.now)
    job.now += 2.0
    assert only(job.exited(0, KILLED), StopWorkers).local_ranks == (1,)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
def test_after_sigterm_a_crash_is_a_fault_all_the_same(number: int) -> None:
    job = Job()
    job.start()
    job.nodes_wait()
    job.exited(0, TERMINATED)
    start = only(job.exited(1, -int(number)), StartWorkers)
    assert start.restarts_used == 1
    assert f"was killed by signal {int(number)}" in start.reason


def test_a_worker_that_has_never_existed_is_ignored() -> None:
    job = Job()
    job.start()
    running = job.state
    assert job.exited(7, KILLED) == []
    assert job.stepped(7) == []
    assert job.state == running
