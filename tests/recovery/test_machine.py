"""Faults of this node as scenarios: every event is fed by hand, every invariant checked after it."""

from __future__ import annotations

import signal

import pytest
from scenario import GLOO_CLOSED, KILLED, TERMINATED, Job, none, only

from unicron_elastic.faults import Status
from unicron_elastic.recovery.commands import (
    FailJob,
    FinishJob,
    KillWorkers,
    RecordIncident,
    StartWorkers,
    StopWorkers,
    WakeAt,
)
from unicron_elastic.recovery.events import TimePassed
from unicron_elastic.recovery.state import Phase


def test_clean_finish() -> None:
    job = Job()
    assert job.start() == []
    assert job.state.phase is Phase.RUNNING
    assert job.exited(1) == []
    assert job.state.phase is Phase.RUNNING
    assert job.exited(0) == [FinishJob(reason="All workers of this node ended well.")]
    assert job.state.phase is Phase.FINISHED


def test_exception_is_noticed_before_the_exit() -> None:
    job = Job(teardown_timeout_s=2.0)
    job.start()
    noticed = job.raised(0, at=10.002, said_at=10.0)
    assert only(noticed, StopWorkers).local_ranks == (1,)  # the one that raised ends by itself
    assert sorted(wake.at for wake in noticed if isinstance(wake, WakeAt)) == [12.002, 40.002]
    assert none(job.exited(1, TERMINATED), StartWorkers, FailJob)
    commands = job.exited(0, 1)
    assert only(commands, StartWorkers).restarts_used == 1
    incident = only(commands, RecordIncident).incident
    assert incident.method == "exception propagation"
    assert (incident.occurred_at, incident.noticed_at) == (10.0, 10.002)
    assert (incident.exception_type, incident.message, incident.exit_code) == ("ValueError", "bad input", 1)
    assert (incident.location, incident.stack) == ("train.py:88 in step", "Traceback\nValueError: bad input\n")


def test_two_that_die_at_once_count_one_restart() -> None:
    job = Job(workers=3)
    job.start()
    first = job.exited(2, KILLED, at=5.0)
    assert only(first, StopWorkers).local_ranks == (0, 1)
    assert job.exited(0, KILLED, at=5.001, ended_at=4.9999) == []  # died by itself, just before
    commands = job.exited(1, TERMINATED)
    assert only(commands, StartWorkers).restarts_used == 1
    incident = only(commands, RecordIncident).incident
    assert incident.number == 1
    assert incident.rank == 4
    assert len(incident.consequences) == 1
    assert job.state.incidents == 1


def test_who_ignores_sigterm_is_killed_at_the_deadline() -> None:
    job = Job(stop_timeout_s=3.0)
    job.start()
    kill_at = only(job.exited(0, KILLED), WakeAt).at
    assert kill_at == job.now + 3.0
    assert job.feed(TimePassed(at=kill_at - 0.001)) == []
    kill = only(job.feed(TimePassed(at=kill_at)), KillWorkers)
    assert kill.local_ranks == (1,)
    assert "Worker 1" in kill.reason
    assert "SIGKILL" in kill.reason
    assert only(job.exited(1, KILLED, at=kill_at + 0.1), StartWorkers).restarts_used == 1


def test_who_raised_and_hangs_in_its_teardown_is_stopped_then_killed() -> None:
    job = Job(stop_timeout_s=30.0, teardown_timeout_s=5.0)
    job.start()
    job.raised(0, at=10.0)
    job.exited(1, TERMINATED, at=10.1)
    assert job.feed(TimePassed(at=14.9)) == []
    stop = only(job.feed(TimePassed(at=15.0)), StopWorkers)
    assert stop.local_ranks == (0,)
    assert stop.reason == "The 5 s for an end of its own are over. SIGTERM to worker 0 in teardown."
    assert job.feed(TimePassed(at=15.1)) == []  # once
    assert only(job.feed(TimePassed(at=40.0)), KillWorkers).local_ranks == (0,)
    commands = job.exited(0, KILLED, at=40.1)
    incident = only(commands, RecordIncident).incident
    assert (incident.exception_type, incident.status) == ("ValueError", "other software error")
    assert only(commands, StartWorkers).restarts_used == 1


def test_sentences_are_good_english_for_one_worker_and_for_several() -> None:
    job = Job(workers=4, stop_timeout_s=30.0, teardown_timeout_s=5.0)
    job.start()
    # Rank 3 is told to stop while 0 and 2 tear down: its own end, noticed late, is why they failed.
    job.raised(0, GLOO_CLOSED, kind="RuntimeError", at=10.0)
    job.raised(2, GLOO_CLOSED, kind="RuntimeError", at=10.0, said_at=9.99)
    job.terminated(1)
    stop = only(job.exited(3, KILLED, at=10.1), StopWorkers)
    assert stop.local_ranks == (0,)
    assert stop.reason == "rank 7 was killed by signal 9 (SIGKILL). SIGTERM to worker 0 in teardown."
    kill = only(job.feed(TimePassed(at=40.0)), KillWorkers)
    assert kill.reason == "Workers 0, 2 did not end within 30 s of SIGTERM: SIGKILL."
    assert job.feed(TimePassed(at=41.0)) == []  # once


def test_a_short_stop_time_bounds_the_teardown_too() -> None:
    job = Job(stop_timeout_s=1.0, teardown_timeout_s=5.0)
    job.start()
    commands = job.raised(0, at=10.0)
    assert {command.at for command in commands if isinstance(command, WakeAt)} == {11.0}
    assert only(job.feed(TimePassed(at=11.0)), KillWorkers).local_ranks == (0, 1)


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


def test_exit_code_93_ends_the_job() -> None:
    job = Job()
    job.start()
    job.exited(1, 93)
    commands = job.exited(0, TERMINATED)
    failed = only(commands, FailJob)
    assert failed.cause is not None
    assert failed.cause.fault.failure.rank == 5
    assert failed.reason.endswith("No restart: rank 5 exited with code 93, by which a script asks not to be restarted.")
    incident = only(commands, RecordIncident).incident
    assert (incident.action, incident.restarts_used) == ("fail", 0)
    assert job.state.phase is Phase.FINISHED


def test_without_restarts_the_first_fault_ends_the_job() -> None:
    job = Job(workers=1, max_restarts=0)
    commands = job.fail_once(1)
    reason = only(commands, FailJob).reason
    assert "exited with code 1" in reason
    assert reason.endswith(" No restart: --max-restarts is 0.")
    assert none(commands, StartWorkers)


def test_the_last_restart_is_used_before_the_job_fails() -> None:
    job = Job(workers=1, max_restarts=2)
    assert only(job.fail_once(KILLED), StartWorkers).restarts_used == 1
    assert only(job.fail_once(KILLED), StartWorkers).restarts_used == 2
    failed = only(job.fail_once(KILLED), FailJob)
    assert failed.reason.endswith("No restart: all 2 restarts are used.")
    assert job.state.incidents == 3


def test_the_same_failure_without_progress_ends_the_job_early() -> None:
    job = Job(max_restarts=100, same_failure_limit=3)
    assert only(job.fail_once(1, step=7), StartWorkers)
    assert only(job.fail_once(1, step=7), StartWorkers)
    failed = only(job.fail_once(1, step=7), FailJob)
    assert failed.reason.endswith("No restart: the same failure came 3 times in a row after 7 steps, without progress.")


def test_progress_starts_the_count_of_equal_failures_anew() -> None:
    job = Job(max_restarts=100, same_failure_limit=2)
    for step in (7, 8, 7, 9, 10):
        assert only(job.fail_once(1, step=step), StartWorkers)
    assert only(job.fail_once(1, step=10), FailJob)


def test_a_job_whose_steps_are_unknown_keeps_all_of_its_restarts() -> None:
    job = Job(max_restarts=6, same_failure_limit=2)
    for used in range(1, 7):
        assert only(job.fail_once(1), StartWorkers).restarts_used == used
    assert only(job.fail_once(1), FailJob).reason.endswith("No restart: all 6 restarts are used.")


def test_an_exception_that_comes_back_before_the_first_step_ends_the_job_early() -> None:
    job = Job(workers=1, max_restarts=100, same_failure_limit=3)
    for used in (0, 1, 2):
        job.start(used)
        job.raised(0, f"no file part-{used}", step=0)
        commands = job.exited(0, 1, step=0)
    end = "No restart: the same failure came 3 times in a row before the first step, without progress."
    assert only(commands, FailJob).reason.endswith(end)


def test_sigkill_never_counts_as_the_same_failure() -> None:
    job = Job(max_restarts=100, same_failure_limit=2)
    for _ in range(5):
        assert only(job.fail_once(KILLED, step=7), StartWorkers)


def test_a_limit_of_zero_never_stops_early() -> None:
    job = Job(max_restarts=100, same_failure_limit=0)
    for _ in range(6):
        assert only(job.fail_once(1, step=7), StartWorkers)


def test_enough_steps_reset_the_count_of_restarts() -> None:
    job = Job(max_restarts=1, reset_after_steps=50)
    for _ in range(3):
        assert only(job.fail_once(KILLED, step=50), StartWorkers).restarts_used == 1
    assert only(job.fail_once(KILLED, step=49), FailJob).reason.endswith("No restart: the only restart is used.")


def test_the_steps_of_those_that_did_not_fail_count_as_progress() -> None:
    job = Job(max_restarts=1, reset_after_steps=50)
    for _ in range(3):
        job.start(1)
        job.exited(0, KILLED)  # its page is unreadable
        assert only(job.exited(1, TERMINATED, step=50), StartWorkers).restarts_used == 1


def test_an_exception_is_counted_once() -> None:
    job = Job()
    job.start()
    job.raised(0, "first")
    assert job.raised(0, "second") == []
    job.exited(0, 1)
    incident = only(job.exited(1, TERMINATED), RecordIncident).incident
    assert (incident.message, incident.consequences) == ("first", ())


@pytest.mark.parametrize("code", [TERMINATED, 1, 143, 0])
def test_after_sigterm_a_worker_may_end_as_it_likes(code: int) -> None:
    job = Job()
    job.start()
    job.exited(0, KILLED)
    job.raised(1, "stopped", kind="KeyboardInterrupt")
    commands = job.exited(1, code)
    assert only(commands, RecordIncident).incident.consequences == ()
    assert only(commands, StartWorkers)


def test_a_kill_that_became_known_after_sigterm_is_a_fault() -> None:
    # The kernel tells of a killed process late, so its peers' errors, and our SIGTERM, may come first.
    job = Job()
    job.start()
    job.raised(0, GLOO_CLOSED, kind="RuntimeError", at=10.0)
    job.exited(0, 1, at=10.01)
    commands = job.exited(1, KILLED, at=10.02)
    incident = only(commands, RecordIncident).incident
    assert (incident.rank, incident.exit_code) == (5, KILLED)
    assert "rank 5 failed first" in only(commands, StartWorkers).reason


def test_an_exit_that_had_begun_before_sigterm_is_a_fault() -> None:
    job = Job()
    job.start()
    job.ending(1)
    # It is left to end by itself, as the one that raised is, so that its exit code is its own.
    assert only(job.raised(0, GLOO_CLOSED, kind="RuntimeError"), StopWorkers).local_ranks == ()
    assert only(job.exited(1, 7), StopWorkers).local_ranks == (0,)
    incident = only(job.exited(0, TERMINATED), RecordIncident).incident
    assert (incident.rank, incident.exit_code, incident.status) == (5, 7, Status.EXITED_ABNORMALLY)


def test_who_is_ending_but_does_not_end_is_stopped_then_killed() -> None:
    job = Job()
    job.start()
    job.ending(1)
    assert only(job.exited(0, KILLED), StopWorkers).local_ranks == ()
    assert only(job.time(job.now + 1.0), StopWorkers).local_ranks == (1,)
    assert only(job.time(job.now + 30.0), KillWorkers).local_ranks == (1,)


def test_who_shuts_down_has_less_time_than_who_handles_an_error() -> None:
    job = Job(workers=3)
    job.start()
    job.ending(1, at=10.0)
    job.raised(0, at=10.0)
    job.exited(2, TERMINATED, at=10.1)
    assert only(job.time(11.0), StopWorkers).local_ranks == (1,)
    assert job.time(14.9) == []
    assert only(job.time(15.0), StopWorkers).local_ranks == (0,)


def test_even_in_a_short_time_who_is_ending_hears_sigterm_before_sigkill() -> None:
    job = Job(stop_timeout_s=1.0)
    job.start()
    job.ending(1, at=10.0)
    job.exited(0, KILLED, at=10.0)
    assert only(job.time(10.5), StopWorkers).local_ranks == (1,)
    assert only(job.time(11.0), KillWorkers).local_ranks == (1,)


def test_the_exit_of_one_that_followed_does_not_cut_short_the_error_of_the_first() -> None:
    job = Job()
    job.start()
    job.raised(1, "bad input", at=10.0)  # and saves what it can
    job.ending(0, at=10.0)
    assert none(job.exited(0, 3, at=10.1), StopWorkers)
    assert none(job.time(11.0), StopWorkers)  # what rank 4 had left is over, but not what rank 5 has
    incident = only(job.exited(1, 1, at=11.0), RecordIncident).incident
    assert (incident.rank, incident.exit_code) == (5, 1)


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
