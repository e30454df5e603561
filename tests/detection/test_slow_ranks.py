"""A rank that has become slow is told within ten steps, with its name where anything tells it, and so is its end."""

from __future__ import annotations

import math
import re

import pytest
from simulated import STEP_TIMES_S, Job, Script, Slowdown
from watcher import Watcher

from unicron_elastic.detection.sample import RankSample, Sample
from unicron_elastic.detection.state import PaceState
from unicron_elastic.detection.telling import Degraded, Hung, Recovered, Slow, Verdict
from unicron_elastic.detection.watch import observe

LOOK_S = 0.1  # between two looks at short steps


def begin_step(step_s: float) -> int:
    """The step at which the slowdown begins: after the detection has seen enough of the job."""
    return max(60, math.ceil(6.0 / step_s))


def slowed(watcher: Watcher, begin: int) -> tuple[Degraded | Slow, int]:
    """Waits for the word that steps take longer; it, and how many steps after the first slow one it was said."""
    watcher.run_to_step(begin - 1)
    assert watcher.said == []
    while not watcher.said and watcher.step < begin + 500:
        watcher.look()
    (verdict,) = watcher.said
    assert isinstance(verdict, Degraded | Slow)
    return verdict, watcher.step - begin


@pytest.mark.parametrize("step_s", STEP_TIMES_S)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("counts_collectives", [False, True])
def test_a_third_slower_is_told_within_ten_steps(step_s: float, seed: int, counts_collectives: bool) -> None:
    begin = begin_step(step_s)
    job = Job(Script(step_s=step_s, slowdowns=(Slowdown(1.3, begin, rank=2),)), seed)
    verdict, steps = slowed(Watcher(job, counts_collectives=counts_collectives), begin)
    assert isinstance(verdict, Degraded)
    assert verdict.ranks == (2,)
    assert verdict.factor == pytest.approx(1.28, abs=0.07)
    assert verdict.usual_s == pytest.approx(step_s, rel=0.1)
    # Where many steps pass between two looks, two more looks are as few steps as can be.
    assert steps <= max(10, 5 + 2 * LOOK_S / (1.3 * step_s))


@pytest.mark.parametrize("step_s", STEP_TIMES_S)
@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_who_waits_for_a_slow_device_is_named_by_its_lateness(step_s: float, factor: float) -> None:
    begin = begin_step(step_s)
    job = Job(Script(step_s=step_s, slowdowns=(Slowdown(factor, begin, rank=1, works=False),)))
    verdict, steps = slowed(Watcher(job, counts_collectives=True), begin)
    assert verdict.ranks == (1,)
    assert "it begins collectives" in verdict.reason
    assert steps <= max(10, 5 + 3 * LOOK_S / (factor * step_s))


@pytest.mark.parametrize("step_s", STEP_TIMES_S)
@pytest.mark.parametrize(("noise", "rank", "seed"), [(0.0, 2, 0), (0.03, None, 1), (0.03, None, 2), (0.03, None, 3)])
def test_a_tenth_slower_is_told_within_fifty_steps(step_s: float, noise: float, rank: int | None, seed: int) -> None:
    begin = begin_step(step_s)
    job = Job(Script(step_s=step_s, noise=noise, slowdowns=(Slowdown(1.1, begin, rank=rank),)), seed)
    verdict, steps = slowed(Watcher(job, counts_collectives=True), begin)
    assert isinstance(verdict, Degraded)
    assert verdict.ranks == (() if rank is None else (rank,))
    assert verdict.factor == pytest.approx(1.1, abs=0.03)
    assert steps <= 50


@pytest.mark.parametrize("seed", range(4))
def test_nobody_else_is_blamed(seed: int) -> None:
    """At a tenth more the signals are near their noise: the rank itself, or nobody."""
    script = Script(step_s=0.2, slowdowns=(Slowdown(1.15, 60, rank=2),))
    verdict, _ = slowed(Watcher(Job(script, seed), counts_collectives=seed % 2 == 0), 60)
    assert verdict.ranks in {(2,), ()}


@pytest.mark.parametrize("counts_collectives", [False, True])
def test_a_slow_network_is_nobodys_fault(counts_collectives: bool) -> None:
    script = Script(slowdowns=(Slowdown(1.3, 60),))
    verdict, steps = slowed(Watcher(Job(script), counts_collectives=counts_collectives), 60)
    assert verdict.ranks == ()
    assert steps <= 10


def test_counters_name_the_rank_even_if_those_that_wait_spin() -> None:
    script = Script(spins=True, slowdowns=(Slowdown(1.3, 60, rank=0),))
    verdict, steps = slowed(Watcher(Job(script), counts_collectives=True), 60)
    assert verdict.ranks == (0,)
    assert steps <= 10


def test_cpu_time_blames_nobody_if_those_that_wait_spin() -> None:
    script = Script(spins=True, slowdowns=(Slowdown(1.3, 60, rank=0),))
    verdict, _ = slowed(Watcher(Job(script)), 60)
    assert verdict.ranks == ()


@pytest.mark.parametrize("step_s", STEP_TIMES_S)
@pytest.mark.parametrize("counts_collectives", [False, True])
def test_four_times_slower_and_at_work_is_slow_and_no_hang(step_s: float, counts_collectives: bool) -> None:
    begin = begin_step(step_s)
    job = Job(Script(step_s=step_s, slowdowns=(Slowdown(4.0, begin, rank=1),)))
    watcher = Watcher(job, counts_collectives=counts_collectives)
    verdict, _ = slowed(watcher, begin)
    assert isinstance(verdict, Slow)
    assert verdict.ranks == (1,)
    watcher.run(300 * step_s)
    assert not any(isinstance(said, Hung) for said in watcher.said)


@pytest.mark.parametrize("step_s", STEP_TIMES_S)
@pytest.mark.parametrize("factor", [1.3, 4.0])
def test_it_is_told_when_it_is_over(step_s: float, factor: float) -> None:
    begin = begin_step(step_s)
    end = begin + max(40, math.ceil(3.0 / step_s))
    watcher = Watcher(Job(Script(step_s=step_s, slowdowns=(Slowdown(factor, begin, end, rank=1),))))
    begun, _ = slowed(watcher, begin)
    watcher.run_to_step(end)
    over = watcher.wait_for(Recovered, 30 * step_s + 1.0)
    assert over.ranks == begun.ranks
    assert not over.is_new_usual
    assert watcher.said == [begun, over]
    watcher.run_to_step(end + 200)
    assert watcher.said == [begun, over]


def test_a_pace_that_lasts_becomes_the_usual_one() -> None:
    watcher = Watcher(Job(Script(slowdowns=(Slowdown(1.5, 60),))))
    begun, _ = slowed(watcher, 60)
    over = watcher.wait_for(Recovered, 60.0)
    assert over.is_new_usual
    assert over.at - begun.at >= 30.0
    assert over.reason.startswith("the job's steps have long taken 3")
    assert over.reason.endswith(" ms, which now counts as usual.")
    watcher.run(600.0)
    assert watcher.said == [begun, over]


def test_a_change_too_small_to_tell_becomes_usual_in_silence() -> None:
    watcher = Watcher(Job(Script(noise=0.01, slowdowns=(Slowdown(1.06, 60),))))
    watcher.run_to_step(400)
    assert watcher.said == []
    assert watcher.state.ranks[0].tempo.typical_s == pytest.approx(0.2 * 1.06, rel=0.02)


def test_ranks_that_do_not_wait_for_each_other_are_slow_alone() -> None:
    state, said = PaceState(), list[Verdict]()
    for number in range(1, 100):
        on_time = {"step": number, "step_at": number * 0.2}
        late = on_time
        if number > 60:
            steps = (number - 60) * 2 // 3
            late = {"step": 60 + steps, "step_at": 12.0 + steps * 0.3}
        ranks = [
            RankSample(rank=rank, step=int(seen["step"]), step_at=seen["step_at"])
            for rank, seen in enumerate((on_time, late, on_time))
        ]
        state, verdicts = observe(state, Sample(at=number * 0.2 + 0.01, ranks=tuple(ranks)))
        said += verdicts
    (verdict,) = said
    assert verdict.ranks == (1,)
    assert verdict.reason == (
        "rank 1 holds the job up: steps take 300 ms, 1.5x the usual 200 ms; the others step as usual."
    )


def test_the_reasons_are_sentences() -> None:
    script = Script(noise=0.0, slowdowns=(Slowdown(1.3, 60, 100, rank=2),))
    for counts_collectives, clause in (
        (True, "it begins collectives 60 ms later than usual"),
        (False, "the CPU time for a step has grown there and not elsewhere"),
    ):
        watcher = Watcher(Job(script), counts_collectives=counts_collectives)
        watcher.run_to_step(130)
        # The look at the last usual step counts among the slow ones, so the lateness is a little less than 60 ms.
        reasons = [re.sub(r"(5\d.\d|60) ms later", "60 ms later", said.reason) for said in watcher.said]
        assert reasons == [
            f"rank 2 holds the job up: steps take 260 ms, 1.3x the usual 200 ms; {clause}.",
            "the job's steps take the usual 200 ms again.",
        ]
    watcher = Watcher(Job(Script(noise=0.0, slowdowns=(Slowdown(1.3, 60),))))
    verdict, _ = slowed(watcher, 60)
    assert verdict.reason == "the job is slow: steps take 260 ms, 1.3x the usual 200 ms; no rank stands out."


@pytest.mark.parametrize("step_s", STEP_TIMES_S)
@pytest.mark.parametrize("factor", [1.21, 1.5, 2.5])
def test_a_pace_that_has_not_settled_is_not_judged(step_s: float, factor: float) -> None:
    """As of a job whose loader had read ahead until then."""
    begin = max(25, math.ceil(2.8 / step_s))
    watcher = Watcher(Job(Script(step_s=step_s, slowdowns=(Slowdown(factor, begin),))))
    watcher.run_to_step(begin + max(60, math.ceil(6.0 / (factor * step_s))))
    assert watcher.said == []
    assert watcher.state.ranks[0].tempo.typical_s == pytest.approx(factor * step_s, rel=0.05)


@pytest.mark.parametrize("step_s", STEP_TIMES_S)
def test_what_is_slower_than_a_pace_that_settled_late_is_told(step_s: float) -> None:
    early = max(25, math.ceil(2.8 / step_s))
    late = early + max(75, math.ceil(6.0 / step_s))
    script = Script(step_s=step_s, slowdowns=(Slowdown(1.5, early), Slowdown(1.5, late, rank=2)))
    verdict, _ = slowed(Watcher(Job(script), counts_collectives=True), late)
    assert verdict.ranks == (2,)
    assert isinstance(verdict, Degraded)
    assert verdict.usual_s == pytest.approx(1.5 * step_s, rel=0.05)
