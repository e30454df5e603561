"""No job that comes further is ended for a failure that comes again; one that does not, is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.faults import Failure
from unicron_elastic.recovery.commands import FailJob
from unicron_elastic.recovery.events import StartedWorker, WorkerExited, WorkerRaised, WorkersStarted
from unicron_elastic.recovery.machine import handle
from unicron_elastic.recovery.policy import Policy
from unicron_elastic.recovery.state import JobState, Phase

RESTARTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How one generation fared, as a script knows it: ``began`` and ``saved`` are steps of the job."""

    began: int
    made: int
    saved: int
    lived_s: float

    @property
    def goes_further(self) -> bool:
        return self.saved > self.began


def _ended_after(history: list[Generation], is_counted: bool = True, nodes: int = 1) -> int | None:
    """Return after how many generations the job was ended; None if it was not."""
    state, at = JobState(policy=Policy(max_restarts=RESTARTS)), 0.0
    for number, each in enumerate(history):
        started = (StartedWorker(local_rank=0, rank=0, pid=number),)
        state, _ = handle(state, WorkersStarted(at=at, restarts_used=number, workers=started, nodes=nodes))
        at += each.lived_s
        step = each.made if is_counted else None
        failure = Failure(
            at=at, rank=0, local_rank=0, pid=number, exception_type="ValueError", message="2 GiB", step=step
        )
        state, _ = handle(state, WorkerRaised(at=at, failure=failure))
        exited = WorkerExited(
            at=at,
            ended_at=at,
            local_rank=0,
            exit_code=1,
            step=step,
            has_saved=each.goes_further,
            has_restored=each.began > 0,
        )
        state, commands = handle(state, exited)
        if any(isinstance(command, FailJob) for command in commands):
            return number + 1
        assert state.phase is Phase.IDLE
    return None


@st.composite
def histories(draw: st.DrawFn) -> list[Generation]:
    """Jobs that save before each failure, and go on from there, sometimes further and sometimes not so far."""
    began, found = 0, []
    made = draw(st.integers(1, 30))
    for _ in range(RESTARTS):
        made = draw(st.sampled_from([made, made, made, 7]))
        saved = began + draw(st.integers(1, made))
        found.append(Generation(began=began, made=made, saved=saved, lived_s=draw(st.floats(0.1, 50.0))))
        began = saved
    return found


@given(histories(), st.booleans(), st.sampled_from([1, 2]))
def test_a_job_that_goes_on_from_what_it_saved_keeps_its_restarts(
    history: list[Generation], is_counted: bool, nodes: int
) -> None:
    assert _ended_after(history, is_counted, nodes) is None


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("began", [0, 20])
def test_a_bug_from_the_same_beginning_ends_the_job(began: int, is_counted: bool) -> None:
    same = Generation(began=began, made=5, saved=began, lived_s=2.0)
    assert _ended_after([same] * RESTARTS, is_counted) == (3 if is_counted else 2)  # none known: before the first one


def test_a_script_that_saves_and_never_reads_it_makes_no_progress() -> None:
    assert _ended_after([Generation(began=0, made=25, saved=20, lived_s=2.0)] * RESTARTS) == 3


def test_a_bug_behind_the_last_checkpoint_ends_the_job() -> None:
    first = Generation(began=0, made=25, saved=20, lived_s=2.0)
    assert _ended_after([first, *[Generation(began=20, made=5, saved=20, lived_s=1.0)] * 9]) == 4


def test_of_unknown_steps_who_lives_longer_and_longer_comes_further() -> None:
    history = [Generation(began=0, made=0, saved=0, lived_s=4.0 * 2.0**each) for each in range(RESTARTS)]
    assert _ended_after(history, is_counted=False) is None
    assert _ended_after([Generation(began=0, made=0, saved=0, lived_s=90.0)] * RESTARTS, is_counted=False) is None
