"""Nobody hangs while a person is at a rank's debugger or terminal, however long that takes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unicron_elastic.detection.policy import PacePolicy
from unicron_elastic.detection.sample import GroupPosition, RankSample, Sample
from unicron_elastic.detection.state import PaceState
from unicron_elastic.detection.telling import Attended, Hung, Recovered, Verdict
from unicron_elastic.detection.watch import next_look_at, observe

STEP_S = 0.05
STEPS = 60


@dataclass
class Job:
    """Ranks that step together, and then wait for one that does not."""

    ranks: int
    halts: int
    state: PaceState
    now: float = 0.0

    def look(self, person: str) -> list[Verdict]:
        self.now = max(self.now + 1e-3, next_look_at(self.state))
        step = min(int(self.now / STEP_S), STEPS)
        begun = [step + (rank != self.halts and step == STEPS) for rank in range(self.ranks)]
        seen = tuple(
            RankSample(
                rank=rank,
                step=step,
                step_at=step * STEP_S or None,
                step_time_s=STEP_S,
                cpu_time_s=min(self.now, STEPS * STEP_S),
                runnable=False,
                in_io=False,
                collective=begun[rank],
                waiting=begun[rank] > step,
                groups=(GroupPosition(name="0", begun=begun[rank], ended=step),),
                person=person if rank == self.halts and step == STEPS else "",
            )
            for rank in range(self.ranks)
        )
        self.state, verdicts = observe(self.state, Sample(at=self.now, ranks=seen))
        return verdicts

    def run(self, seconds: float, person: str) -> list[Verdict]:
        end, said = self.now + seconds, []
        while next_look_at(self.state) < end:
            said += self.look(person)
        return said


def _job(ranks: int = 2, halts: int = 0) -> Job:
    return Job(ranks=ranks, halts=halts, state=PaceState(policy=PacePolicy(), whole_job=True))


@given(st.integers(1, 5), st.integers(0, 4), st.sampled_from(["debugger", "terminal"]), st.floats(10.0, 400.0))
@example(3, 1, "debugger", 4000.0)
def test_a_person_is_told_once_and_nobody_hangs(ranks: int, halts: int, place: str, seconds: float) -> None:
    halts %= ranks
    said = _job(ranks, halts).run(STEPS * STEP_S + seconds, place)
    assert [type(verdict) for verdict in said] == [Attended]
    assert said[0].reason.startswith(f"a person is at rank {halts}'s {place}")


def test_who_waits_for_a_person_is_told() -> None:
    (said,) = _job(3, 1).run(30.0, "debugger")
    assert said.reason == "a person is at rank 1's debugger; ranks 0 and 2 wait for that."


@pytest.mark.parametrize("before_s", [0.0, 60.0])
def test_without_a_person_it_is_a_hang_also_after_one_has_left(before_s: float) -> None:
    job = _job()
    if before_s:
        job.run(STEPS * STEP_S + before_s, "debugger")
    said = job.run(60.0, "")
    assert isinstance(said[0], Hung)
    assert said[0].ranks == (0,)


def test_a_hang_that_turns_out_to_be_a_person_is_taken_back() -> None:
    job = _job()
    assert isinstance(job.run(STEPS * STEP_S + 2.0, "")[-1], Hung)
    said = job.run(60.0, "terminal")
    assert isinstance(said[0], Recovered)
    assert said[0].was_hung
    assert [type(verdict) for verdict in said[1:]] == [Attended]
