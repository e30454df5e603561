"""Any events in any order."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from scenario import CRASHED, GLOO_CLOSED, KILLED, TERMINATED, Job

from unicron_elastic.faults import HangKind, Severity
from unicron_elastic.recovery.commands import (
    Command,
    DepartWell,
    FailJob,
    FinishJob,
    KillWorkers,
    LeaveJob,
    StartWorkers,
    StopWorkers,
    WakeAt,
)
from unicron_elastic.recovery.events import Event, NodeRecalled, NodesDepart, PeerFailed, StepEnded, TimePassed
from unicron_elastic.recovery.state import JobState, Phase

CODES = [0, 0, 1, 2, 93, KILLED, TERMINATED, CRASHED, 143]
LOCAL = st.integers(0, 3)
AGO = st.sampled_from([None, None, 0, 1, 2])  # generations; None: the event does not say
HAPPENINGS = st.one_of(
    st.tuples(st.just("exited"), LOCAL, st.sampled_from(CODES), st.sampled_from([None, 0, 5, 60]), AGO),
    st.tuples(st.just("raised"), LOCAL, st.sampled_from(["bad", GLOO_CLOSED]), st.integers(0, 2)),
    st.tuples(st.just("ending"), LOCAL, AGO),
    st.tuples(st.just("out of step"), LOCAL, AGO),
    st.tuples(st.just("stepped"), LOCAL, AGO),
    st.tuples(st.just("peer"), AGO),
    st.tuples(st.just("membership"), AGO),
    st.tuples(st.just("time"), st.sampled_from([0.0, 1.0, 6.0, 31.0, 301.0])),
    st.tuples(st.just("hung"), LOCAL, st.sampled_from(HangKind), AGO),
    st.tuples(st.just("goes on"), AGO),
    st.tuples(st.just("watched anew"), AGO),
    st.tuples(st.just("evidence"), LOCAL, AGO),
    st.tuples(st.just("end all"), st.sampled_from(CODES)),
    st.tuples(st.just("started")),
    st.tuples(st.just("may leave"), st.booleans()),
    st.tuples(st.just("recalled"), st.sampled_from(["it is wanted.", ""]), st.sampled_from(["it must.", ""])),
    st.tuples(st.just("departs"), AGO),
    st.tuples(st.just("step ended"), AGO),
    st.tuples(st.just("finds"), st.sampled_from([Severity.SEV1, Severity.SEV2])),
)
POLICIES = st.fixed_dictionaries(
    {
        "max_restarts": st.integers(0, 4),
        "same_failure_limit": st.integers(0, 3),
        "reset_after_steps": st.sampled_from([0, 50]),
        "teardown_timeout_s": st.sampled_from([0.5, 5.0, 60.0]),
        "isolates": st.booleans(),
        "isolate_after": st.sampled_from([0, 1, 3]),
    }
)


class Watched(Job):
    """A job that keeps what each event did, and starts workers when it is told to, as the agent does."""

    def __init__(self, workers: int, policy: dict[str, Any]) -> None:
        super().__init__(workers, **policy)
        self.why_stay = "" if workers == 2 else "it must."
        self.turns: list[tuple[JobState, Event, list[Command]]] = []
        self.start(why_stay=self.why_stay)

    def feed(self, event: Event) -> list[Command]:
        before = self.state
        commands = super().feed(event)
        self.turns.append((before, event, commands))
        return commands

    def happen(self, happening: tuple[Any, ...]) -> None:
        if self.state.phase is Phase.IDLE:
            assert isinstance(self.log[-1], StartWorkers)
            self.start(self.log[-1].restarts_used, why_stay=self.why_stay)
        match happening:
            case ("exited", local, code, step, ago):
                ended_at = self.now - 0.5 if code == KILLED else None
                self.exited(local, code, step=step, ended_at=ended_at, generation=self._ago(ago))
            case ("raised", local, message, ago):
                pid = self.pid(local, self.state.generation - ago)
                self.raised(local, message, kind="RuntimeError", pid=pid, said_at=self.now - 0.2)
            case ("ending", local, ago):
                self.ending(local, generation=self._ago(ago))
            case ("stepped", local, ago):
                self.stepped(local, generation=self._ago(ago))
            case ("peer", ago):
                self.peer_failed(generation=self._ago(ago))
            case ("membership", ago):
                self.nodes_wait(generation=self._ago(ago))
            case ("time", seconds):
                self.now += seconds
                self.feed(TimePassed(at=self.now))
            case ("end all", code):
                for local in range(self.workers):
                    self.exited(local, code)
            case ("started",):  # by mistake
                self.start(self.state.restarts_used, why_stay=self.why_stay)
            case _:
                self._happen_about_others(happening)

    def _happen_about_others(self, happening: tuple[Any, ...]) -> None:
        match happening:
            case ("recalled", reason, why_stay):
                self.feed(NodeRecalled(at=self._at(None), reason=reason, why_stay=why_stay))
            case ("departs", ago):
                at, generation = self._at(None), self._ago(ago)
                self.feed(NodesDepart(at=at, nodes=("n2",), reason="n2 is wanted.", generation=generation))
            case ("step ended", ago):
                self.feed(StepEnded(at=self._at(None), generation=self._ago(ago)))
            case _:
                self._happen_about_hang(happening)

    def _happen_about_hang(self, happening: tuple[Any, ...]) -> None:
        match happening:
            case ("out of step", local, ago):
                self.out_of_step(local, generation=self._ago(ago))
            case ("hung", local, kind, ago):
                self.hung(local, kind=kind, generation=self._ago(ago))
            case ("goes on", ago):
                self.goes_on(generation=self._ago(ago))
            case ("watched anew", ago):
                self.watched_anew(generation=self._ago(ago))
            case ("may leave", may):
                self.may_leave("" if may else "it must.")
            case ("finds", severity):
                self.finds(severity=severity)
            case ("evidence", local, ago):
                self.evidence(local, generation=self._ago(ago))

    def _ago(self, generations: int | None) -> int | None:
        return None if generations is None else self.state.generation - generations


def _watched(workers: int, policy: dict[str, Any], happenings: list[tuple[Any, ...]]) -> Watched:
    job = Watched(workers, policy)
    for happening in happenings:
        job.happen(happening)
    return job


@given(st.integers(1, 3), POLICIES, st.lists(HAPPENINGS, max_size=30))
def test_the_job_stays_consistent(workers: int, policy: dict[str, Any], happenings: list[tuple[Any, ...]]) -> None:
    job = _watched(workers, policy, happenings)
    for before, _, commands in job.turns:
        if before.phase is Phase.FINISHED:
            assert commands == []
    terminal = [command for command in job.log if isinstance(command, FinishJob | FailJob | LeaveJob | DepartWell)]
    assert len(terminal) == (job.state.phase is Phase.FINISHED)
    if terminal:
        assert job.log[-1] is terminal[0]
    for command in job.log:
        if isinstance(command, StopWorkers | KillWorkers | StartWorkers | FailJob | LeaveJob | FinishJob):
            assert command.reason.endswith(".")
    # Restarts never exceed what the user allowed, whatever the count was reset to.
    assert all(start.restarts_used <= policy["max_restarts"] for start in job.started())


@given(st.integers(1, 3), POLICIES, st.lists(HAPPENINGS, max_size=30))
def test_every_fault_that_costs_a_restart_is_one_incident(
    workers: int, policy: dict[str, Any], happenings: list[tuple[Any, ...]]
) -> None:
    job = _watched(workers, policy, happenings)
    records = [record for record in job.records() if record.action != "observe"]
    assert [record.number for record in records] == sorted(record.number for record in records)
    known = {record.number for record in job.records()}
    assert known >= set(range(1, job.state.incidents))  # the last may be undecided
    of_generation = {record.generation: record.number for record in records}
    assert len(of_generation) == len({record.number for record in records})
    for before, _, commands in job.turns:
        ends = [command for command in commands if isinstance(command, StartWorkers | FailJob | LeaveJob)]
        if not ends:
            continue
        if before.generation in of_generation:  # one fault here, one restart
            action = {StartWorkers: "restart", FailJob: "fail", LeaveJob: "isolate"}[type(ends[0])]
            assert next(r for r in records if r.number == of_generation[before.generation]).action == action
        elif isinstance(ends[0], FailJob) or ends[0].restarts_used > before.restarts_used:
            assert _heard_of_a_peers_fault(job, before.generation)


@given(st.integers(1, 3), POLICIES, st.lists(HAPPENINGS, max_size=30))
def test_later_records_of_an_incident_change_nothing_that_was_decided(
    workers: int, policy: dict[str, Any], happenings: list[tuple[Any, ...]]
) -> None:
    job = _watched(workers, policy, happenings)
    for number in range(1, job.state.incidents + 1):
        records = [record for record in job.records(number) if record.action != "observe"]
        decided = {(r.generation, r.rank, r.exit_code, r.reason, r.action, r.decision, r.stopped_at) for r in records}
        assert len(decided) <= 1
        for earlier, later in pairwise(records):
            assert earlier.regrouped_at in (None, later.regrouped_at)
            assert earlier.first_step_at is None  # nothing is said of an incident once it is over
            assert earlier.superseded_by is None
            assert earlier.left is None


@given(st.integers(1, 3), POLICIES, st.lists(HAPPENINGS, max_size=30))
def test_no_worker_is_lost(workers: int, policy: dict[str, Any], happenings: list[tuple[Any, ...]]) -> None:
    job = _watched(workers, policy, happenings)
    if job.state.phase is not Phase.STOPPING:
        return
    # Nothing but the wake-ups that were asked for comes any more.
    wakes = sorted({command.at for command in job.log if isinstance(command, WakeAt)})
    for at in wakes:
        job.now = max(job.now, at)
        job.feed(TimePassed(at=job.now))
    left = {worker.local_rank for worker in job.state.running}
    assert left == _killed(job, job.state.generation) & left
    for local_rank in left:
        job.exited(local_rank, KILLED)
    assert job.state.phase in (Phase.IDLE, Phase.LEAVING, Phase.FINISHED)


def _heard_of_a_peers_fault(job: Watched, generation: int) -> bool:
    return any(
        isinstance(event, PeerFailed) and before.generation == generation and event.generation in (None, generation)
        for before, event, _ in job.turns
    )


def _killed(job: Watched, generation: int) -> set[int]:
    return {
        local_rank
        for before, _, commands in job.turns
        if before.generation == generation
        for command in commands
        if isinstance(command, KillWorkers)
        for local_rank in command.local_ranks
    }
