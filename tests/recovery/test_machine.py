"""The recovery state machine as scenarios: every event is fed by hand, every invariant checked after it."""

from __future__ import annotations

import signal
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.faults import Failure
from unicron_elastic.incident import PHASES
from unicron_elastic.recovery.commands import (
    Command,
    FailJob,
    FinishJob,
    KillWorkers,
    RecordIncident,
    StartWorkers,
    StopWorkers,
    TellPeers,
    WakeAt,
)
from unicron_elastic.recovery.events import (
    Event,
    FirstStepDone,
    MembershipChanged,
    PeerFailed,
    StartedWorker,
    TimePassed,
    WorkerExited,
    WorkerRaised,
    WorkersStarted,
)
from unicron_elastic.recovery.machine import JobState, Phase, handle
from unicron_elastic.recovery.policy import Policy

GLOO_CLOSED = "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44696"
KILLED, TERMINATED, CRASHED = -int(signal.SIGKILL), -int(signal.SIGTERM), -int(signal.SIGSEGV)
FIRST_RANK = 4  # of this node, so that a rank is never mistaken for a local rank

_C = TypeVar("_C")


class Job:
    """Feeds a machine events and keeps the commands; time goes on by itself, a hundredth of a second per event."""

    def __init__(self, workers: int = 2, **policy: Any) -> None:
        self.state = JobState(policy=Policy(**{"max_restarts": 3, **policy}), run_id="r1", job="train.py", host="n1")
        self.now = 100.0
        self.log: list[Command] = []
        self.workers = workers

    def feed(self, event: Event) -> list[Command]:
        self.state, commands = handle(self.state, event)
        self.state.validate()
        self.log += commands
        return commands

    def _at(self, at: float | None) -> float:
        self.now = round(self.now + 0.01, 6)
        return self.now if at is None else at

    def pid(self, local_rank: int, generation: int | None = None) -> int:
        return 1000 * (self.state.generation if generation is None else generation) + local_rank

    def start(self, restarts_used: int = 0, at: float | None = None) -> list[Command]:
        generation = self.state.generation + 1
        workers = tuple(
            StartedWorker(local_rank=local, rank=FIRST_RANK + local, pid=self.pid(local, generation))
            for local in range(self.workers)
        )
        return self.feed(WorkersStarted(at=self._at(at), restarts_used=restarts_used, workers=workers))

    def exited(
        self,
        local_rank: int,
        code: int = 0,
        *,
        at: float | None = None,
        ended_at: float | None = None,
        step: Any = None,
    ) -> list[Command]:
        at = self._at(at)
        ended_at = at if ended_at is None else ended_at
        return self.feed(
            WorkerExited(at=at, ended_at=ended_at, local_rank=local_rank, exit_code=code, step=step),
        )

    def raised(
        self,
        local_rank: int,
        message: str = "bad input",
        *,
        kind: str = "ValueError",
        at: float | None = None,
        said_at: float | None = None,
        pid: int | None = None,
        step: int | None = None,
    ) -> list[Command]:
        at = self._at(at)
        failure = Failure(
            at=at if said_at is None else said_at,
            rank=FIRST_RANK + local_rank,
            local_rank=local_rank,
            pid=self.pid(local_rank) if pid is None else pid,
            exception_type=kind,
            message=message,
            location="train.py:88 in step",
            stack=f"Traceback\n{kind}: {message}\n",
            step=step,
        )
        return self.feed(WorkerRaised(at=at, failure=failure))

    def stepped(self, local_rank: int) -> list[Command]:
        return self.feed(FirstStepDone(at=self._at(None), local_rank=local_rank))

    def fail_once(self, code: int = 1, *, step: int | None = None) -> list[Command]:
        """One generation, from its start to its end, in which every worker exits with ``code``."""
        self.start(self.state.restarts_used if self.state.generation == 0 else self.started()[-1].restarts_used)
        commands: list[Command] = []
        for local_rank in range(self.workers):
            commands += self.exited(local_rank, code, step=step)
        return commands

    def started(self) -> list[StartWorkers]:
        return [command for command in self.log if isinstance(command, StartWorkers)]


def only(commands: list[Command], kind: type[_C]) -> _C:
    found = [command for command in commands if isinstance(command, kind)]
    assert len(found) == 1, commands
    return found[0]


def none(commands: list[Command], *kinds: type) -> bool:
    return not any(isinstance(command, kinds) for command in commands)


def test_clean_finish() -> None:
    job = Job()
    assert job.start() == []
    assert job.state.phase is Phase.RUNNING
    assert job.exited(1) == []
    assert job.state.phase is Phase.RUNNING
    assert job.exited(0) == [FinishJob(reason="All workers of this node ended well.")]
    assert job.state.phase is Phase.FINISHED


def test_a_killed_worker_costs_one_restart_and_one_incident() -> None:
    job = Job()
    job.start()
    job.stepped(0)
    job.stepped(1)
    noticed = job.exited(1, KILLED, at=200.005, ended_at=200.0, step=17)
    assert only(noticed, StopWorkers).local_ranks == (0,)
    assert only(noticed, StopWorkers).reason.startswith("rank 5 was killed by signal 9 (SIGKILL)")
    assert only(noticed, TellPeers).reason == only(noticed, StopWorkers).reason
    assert only(noticed, WakeAt).at == 200.005 + 30.0
    assert job.state.phase is Phase.STOPPING

    stopped = job.exited(0, TERMINATED, at=200.2)
    start = only(stopped, StartWorkers)
    assert start.restarts_used == 1
    assert start.reason == "Restart 1 of 3."  # what happened was said when the workers were stopped
    incident = only(stopped, RecordIncident).incident
    assert (incident.number, incident.generation, incident.rank, incident.exit_code) == (1, 1, 5, KILLED)
    assert (incident.run_id, incident.job, incident.host) == ("r1", "train.py", "n1")
    assert (incident.status, incident.severity, incident.step) == ("killed by signal", 2, 17)
    assert (incident.method, incident.action, incident.decision) == (
        "process supervision",
        "restart",
        "Restart 1 of 3.",
    )
    assert (incident.occurred_at, incident.noticed_at, incident.stopped_at) == (200.0, 200.005, 200.2)
    assert incident.regrouped_at is None
    assert incident.consequences == ()
    assert job.state.phase is Phase.IDLE

    regrouped = only(job.start(1, at=200.5), RecordIncident).incident
    assert (regrouped.number, regrouped.regrouped_at, regrouped.restarts_used) == (1, 200.5, 1)
    assert job.stepped(0) == []
    closed = only(job.stepped(1), RecordIncident).incident
    assert closed.number == 1
    assert closed.first_step_at == job.now
    assert [closed.phase_ms(phase) is not None for phase in PHASES] == [False, True, True, True, True]
    assert job.stepped(0) == []  # the incident is closed
    assert job.state.incident is None
    job.exited(0)
    assert only(job.exited(1), FinishJob)


def test_first_step_of_those_that_live_closes_the_incident() -> None:
    job = Job()
    job.fail_once(KILLED)
    job.start(1)
    job.exited(0, 0)
    assert only(job.stepped(1), RecordIncident).incident.first_step_at == job.now


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


def test_the_cause_wins_over_a_consequence_that_came_first() -> None:
    job = Job()
    job.start()
    job.raised(0, GLOO_CLOSED, kind="RuntimeError", at=10.002, said_at=10.0)
    assert none(job.raised(1, "index 7 is out of range", kind="IndexError", at=10.004, said_at=9.99), StopWorkers)
    job.exited(0, 1)
    commands = job.exited(1, 1)
    incident = only(commands, RecordIncident).incident
    assert (incident.rank, incident.exception_type) == (5, "IndexError")
    assert len(incident.consequences) == 1
    assert incident.consequences[0].startswith("rank 4 raised RuntimeError: Connection closed by peer")
    assert only(commands, StartWorkers).reason.startswith("rank 5 failed first: it raised IndexError")
    assert incident.noticed_at == 10.002  # the incident was noticed by its first report
    assert incident.occurred_at == 9.99  # and began with its cause


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
    assert kill.reason == "Worker 1 did not end within 3 s of SIGTERM: SIGKILL."
    assert only(job.exited(1, KILLED, at=kill_at + 0.1), StartWorkers).restarts_used == 1


def test_who_raised_and_hangs_in_its_teardown_is_stopped_then_killed() -> None:
    job = Job(stop_timeout_s=30.0, teardown_timeout_s=5.0)
    job.start()
    job.raised(0, at=10.0)
    job.exited(1, TERMINATED, at=10.1)
    assert job.feed(TimePassed(at=14.9)) == []
    stop = only(job.feed(TimePassed(at=15.0)), StopWorkers)
    assert stop.local_ranks == (0,)
    assert stop.reason == "Worker 0 raised an exception but did not end by itself: SIGTERM."
    assert job.feed(TimePassed(at=15.1)) == []  # once
    assert only(job.feed(TimePassed(at=40.0)), KillWorkers).local_ranks == (0,)
    commands = job.exited(0, KILLED, at=40.1)
    incident = only(commands, RecordIncident).incident
    assert (incident.exception_type, incident.status) == ("ValueError", "other software error")
    assert only(commands, StartWorkers).restarts_used == 1


def test_a_short_stop_time_bounds_the_teardown_too() -> None:
    job = Job(stop_timeout_s=1.0, teardown_timeout_s=5.0)
    job.start()
    job.raised(0, at=10.0)
    assert only(job.feed(TimePassed(at=11.0)), KillWorkers).local_ranks == (0, 1)


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
    assert failed.reason.endswith("No restart: rank 5 exited with code 93, which means do not restart.")
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
    assert only(job.fail_once(KILLED, step=49), FailJob)


def test_a_membership_change_restarts_without_counting() -> None:
    job = Job(max_restarts=0)
    job.start()
    commands = job.feed(MembershipChanged(at=10.0, nodes_waiting=2))
    stop = only(commands, StopWorkers)
    assert stop.local_ranks == (0, 1)
    assert stop.reason == "2 node(s) wait to join: all workers restart with the new membership."
    assert only(commands, WakeAt).at == 40.0
    job.exited(0, TERMINATED)
    commands = job.exited(1, 1)  # what a script does with SIGTERM is its own affair
    assert commands == [StartWorkers(restarts_used=0, reason=stop.reason)]
    assert job.start(0) == []


def test_a_peers_fault_counts() -> None:
    job = Job(max_restarts=1)
    job.start()
    assert only(job.feed(PeerFailed(at=10.0, reason="node n2 is gone.")), StopWorkers).reason == "node n2 is gone."
    job.exited(0, TERMINATED)
    assert only(job.exited(1, TERMINATED), StartWorkers) == StartWorkers(restarts_used=1, reason="node n2 is gone.")
    job.start(1)
    job.feed(PeerFailed(at=20.0, reason="node n2 is gone."))
    job.exited(0, TERMINATED)
    failed = only(job.exited(1, TERMINATED), FailJob)
    assert failed == FailJob(cause=None, reason="node n2 is gone. No restart: all 1 restarts are used.")


def test_a_peers_fault_and_ones_own_are_one_restart() -> None:
    job = Job()
    job.start()
    job.exited(0, KILLED)
    assert job.feed(PeerFailed(at=job.now, reason="node n2 is gone.")) == []
    assert only(job.exited(1, TERMINATED), StartWorkers).restarts_used == 1


def test_a_membership_change_after_a_peers_fault_still_counts() -> None:
    job = Job()
    job.start()
    job.feed(PeerFailed(at=10.0, reason="node n2 is gone."))
    assert job.feed(MembershipChanged(at=10.1, nodes_waiting=1)) == []
    job.exited(0, TERMINATED)
    assert only(job.exited(1, TERMINATED), StartWorkers).restarts_used == 1


def test_a_peers_fault_while_stopping_for_a_membership_change_counts() -> None:
    job = Job()
    job.start()
    job.feed(MembershipChanged(at=10.0, nodes_waiting=1))
    job.feed(PeerFailed(at=10.1, reason="node n2 is gone."))
    job.exited(0, TERMINATED)
    assert only(job.exited(1, TERMINATED), StartWorkers).restarts_used == 1


def test_late_events_of_an_old_generation_change_nothing() -> None:
    job = Job()
    job.fail_once(KILLED)
    idle = job.state
    assert job.raised(0, pid=job.pid(0, 1)) == []
    assert job.exited(0, KILLED) == []
    assert job.stepped(0) == []
    assert job.feed(MembershipChanged(at=1e6, nodes_waiting=1)) == []
    assert job.feed(PeerFailed(at=1e6, reason="node n2 is gone.")) == []
    assert job.state == idle
    job.start(1)
    running = job.state
    assert job.raised(0, pid=job.pid(0, 1)) == []
    assert job.state == running


def test_an_exception_is_counted_once() -> None:
    job = Job()
    job.start()
    job.raised(0, "first")
    assert job.raised(0, "second") == []
    job.exited(0, 1)
    assert only(job.exited(1, TERMINATED), RecordIncident).incident.message == "first"


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


def test_our_own_sigkill_is_no_fault() -> None:
    job = Job(max_restarts=0)
    job.start()
    job.feed(MembershipChanged(at=10.0, nodes_waiting=1))
    job.feed(TimePassed(at=40.0))
    job.exited(0, KILLED)
    assert only(job.exited(1, KILLED), StartWorkers).restarts_used == 0


def test_the_other_nodes_are_told_of_faults_here_and_of_nothing_else() -> None:
    job = Job()
    job.start()
    assert none(job.feed(PeerFailed(at=10.0, reason="node n2 is gone.")), TellPeers)
    job.exited(0, TERMINATED)
    job.exited(1, TERMINATED)
    job.start(1)
    assert none(job.feed(MembershipChanged(at=20.0, nodes_waiting=1)), TellPeers)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
def test_after_sigterm_a_crash_is_a_fault_all_the_same(number: int) -> None:
    job = Job()
    job.start()
    job.feed(MembershipChanged(at=job.now, nodes_waiting=1))
    job.exited(0, TERMINATED)
    start = only(job.exited(1, -int(number)), StartWorkers)
    assert start.restarts_used == 1
    assert f"was killed by signal {int(number)}" in start.reason


def test_every_fault_that_costs_a_restart_is_recorded() -> None:
    job = Job()
    job.start()
    job.feed(MembershipChanged(at=job.now, nodes_waiting=1))
    job.exited(0, TERMINATED)
    commands = job.exited(1, CRASHED)
    assert only(commands, StartWorkers).restarts_used == 1
    assert only(commands, RecordIncident).incident.exit_code == CRASHED


def test_a_later_fault_does_not_overwrite_an_open_incident() -> None:
    job = Job()
    job.start()
    job.exited(0, KILLED)
    job.exited(1, TERMINATED)
    job.start(1)
    job.feed(MembershipChanged(at=job.now, nodes_waiting=1))  # before the first step: incident 1 is still open
    job.exited(0, TERMINATED)
    job.exited(1, CRASHED)
    ends_of = {
        command.incident.number: command.incident.exit_code
        for command in job.log
        if isinstance(command, RecordIncident)
    }
    assert ends_of[1] == KILLED


def test_a_new_fault_before_the_first_step_is_an_incident_of_its_own() -> None:
    job = Job(workers=1)
    job.fail_once(KILLED)
    job.start(1)
    incident = only(job.exited(0, 1), RecordIncident).incident
    assert (incident.number, incident.generation, incident.restarts_used) == (2, 2, 1)
    assert incident.regrouped_at is None


def test_a_worker_that_has_never_existed_is_ignored() -> None:
    job = Job()
    job.start()
    running = job.state
    assert job.exited(7, KILLED) == []
    assert job.stepped(7) == []
    assert job.state == running


CODES = [0, 0, 1, 2, 93, KILLED, TERMINATED, CRASHED, 143]
LOCAL = st.integers(0, 3)
HAPPENINGS = st.one_of(
    st.tuples(st.just("exited"), LOCAL, st.sampled_from(CODES), st.sampled_from([None, 0, 5, 60])),
    st.tuples(st.just("raised"), LOCAL, st.sampled_from(["bad", GLOO_CLOSED]), st.integers(0, 2)),
    st.tuples(st.just("stepped"), LOCAL),
    st.tuples(st.just("peer")),
    st.tuples(st.just("membership")),
    st.tuples(st.just("time"), st.sampled_from([0.0, 1.0, 6.0, 31.0])),
    st.tuples(st.just("end all"), st.sampled_from(CODES)),
)
POLICIES = st.fixed_dictionaries(
    {
        "max_restarts": st.integers(0, 4),
        "same_failure_limit": st.integers(0, 3),
        "reset_after_steps": st.sampled_from([0, 50]),
        "teardown_timeout_s": st.sampled_from([0.5, 5.0, 60.0]),
    }
)


def _events(job: Job, happening: tuple[Any, ...]) -> None:
    match happening:
        case ("exited", local, code, step):
            job.exited(local, code, step=step, ended_at=job.now - 0.5 if code == KILLED else None)
        case ("raised", local, message, generations_ago):
            pid = job.pid(local, job.state.generation - generations_ago)
            job.raised(local, message, kind="RuntimeError", pid=pid, said_at=job.now - 0.2)
        case ("stepped", local):
            job.stepped(local)
        case ("peer",):
            job.feed(PeerFailed(at=job.now, reason="node n2 is gone."))
        case ("membership",):
            job.feed(MembershipChanged(at=job.now, nodes_waiting=1))
        case ("time", seconds):
            job.now += seconds
            job.feed(TimePassed(at=job.now))
        case ("end all", code):
            for local in range(job.workers):
                job.exited(local, code)


@given(st.integers(1, 3), POLICIES, st.lists(HAPPENINGS, max_size=30))
def test_whatever_happens_the_job_stays_consistent(
    workers: int, policy: dict[str, Any], happenings: list[tuple[Any, ...]]
) -> None:
    job = Job(workers=workers, **policy)
    job.start()
    for happening in happenings:
        if job.state.phase is Phase.IDLE:  # the agent starts workers when it is told to
            assert isinstance(job.log[-1], StartWorkers)
            job.start(job.log[-1].restarts_used)
        was_finished, before = job.state.phase is Phase.FINISHED, len(job.log)
        _events(job, happening)
        if was_finished:
            assert job.log[before:] == []
            assert job.state.phase is Phase.FINISHED
    terminal = [command for command in job.log if isinstance(command, FinishJob | FailJob)]
    assert len(terminal) == (job.state.phase is Phase.FINISHED)
    if terminal:
        assert job.log[-1] is terminal[0]
    for command in job.log:
        if isinstance(command, StopWorkers | KillWorkers | StartWorkers | FailJob | FinishJob):
            assert command.reason.endswith(".")
    # Restarts never exceed what the user allowed, whatever the count was reset to.
    assert all(start.restarts_used <= max(policy["max_restarts"], 0) for start in job.started())
    numbers = [command.incident.number for command in job.log if isinstance(command, RecordIncident)]
    assert numbers == sorted(numbers)
