"""A rank that hangs is told, and named where anything tells it from those that wait for it, within three steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from simulated import ASLEEP, BUSY, DISK, PREEMPTED, STEP_TIMES_S, STOPPED, Job, Script, Trouble
from watcher import Watcher

from unicron_elastic.detection.sample import SPARE, TRAIN, RankSample, Sample
from unicron_elastic.detection.state import PaceState
from unicron_elastic.detection.telling import Hung, Recovered, Slow, Verdict, Waiting
from unicron_elastic.detection.watch import forget, next_look_at, observe
from unicron_elastic.faults import HangKind

HANG_STEP = 45  # of steps long enough to be seen one by one
SKIPPED = 1.0  # a share of the computation: the rank has done all of it and does not come to the collective
EVALUATING = Script(evaluate_every=20, evaluate_s=3.0)


def hang_step(step_s: float) -> int:
    """The step of the hang: after two seconds, or the detection knows too little."""
    return max(HANG_STEP, math.ceil(2.0 / step_s))


def hung(watcher: Watcher) -> tuple[Hung, float]:
    """Waits for the hang; it, and how long after it began it was told."""
    step_s = watcher.job.script.step_s
    watcher.run_to_step(HANG_STEP - 2)
    assert watcher.said == []
    verdict = watcher.wait_for(Hung, 30 * step_s + 30.0)
    assert watcher.job.trouble_at is not None
    return verdict, verdict.at - watcher.job.trouble_at


@pytest.mark.parametrize("step_s", STEP_TIMES_S)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("counts_collectives", [False, True])
@pytest.mark.parametrize(("kind", "after"), [(STOPPED, 0.02), (ASLEEP, 0.02), (ASLEEP, 0.6), (ASLEEP, SKIPPED)])
def test_a_hang_is_told_within_three_steps(
    step_s: float, seed: int, counts_collectives: bool, kind: tuple[float, str], after: float
) -> None:
    script = Script(step_s=step_s, troubles=(Trouble(hang_step(step_s), 2, kind, after=after),))
    watcher = Watcher(Job(script, seed), counts_collectives=counts_collectives)
    verdict, latency_s = hung(watcher)
    assert latency_s <= 3.0 * step_s * 1.05 + 0.1  # the noise makes the usual step up to 5 % longer
    assert verdict.ranks == ((2,) if counts_collectives or kind == STOPPED else (0, 1, 2, 3))
    watcher.run(100 * step_s)
    assert watcher.said[0] == verdict
    later = [again for again in watcher.said if isinstance(again, Hung)]
    assert later == watcher.said
    assert {again.ranks for again in later} == {verdict.ranks}
    kinds = [again.kind for again in later]
    assert kinds == sorted(set(kinds))  # told again only if it got surer
    if kind == STOPPED:
        assert kinds[-1] is HangKind.STOPPED
    else:
        assert kinds[-1] is (HangKind.AWAITED if counts_collectives else HangKind.UNCLEAR)


@pytest.mark.parametrize("step_s", [0.02, 2.0])
def test_counters_name_the_rank_even_if_those_that_wait_spin(step_s: float) -> None:
    script = Script(step_s=step_s, spins=True, troubles=(Trouble(hang_step(step_s), 1, ASLEEP),))
    verdict, latency_s = hung(Watcher(Job(script), counts_collectives=True))
    assert verdict.ranks == (1,)
    assert latency_s <= 3.0 * step_s * 1.05 + 0.1


@pytest.mark.parametrize("step_s", STEP_TIMES_S)
def test_a_rank_that_skipped_the_collective_and_went_on_is_named(step_s: float) -> None:
    script = Script(step_s=step_s, runs_ahead=(hang_step(step_s), 3))
    verdict, latency_s = hung(Watcher(Job(script), counts_collectives=True))
    assert verdict.ranks == (3,)
    assert "gone past the collective in which the others wait" in verdict.reason
    assert latency_s <= 3.0 * step_s * 1.05 + 0.1


def frozen(state: PaceState, begin: float, seconds: float, ranks: Iterable[RankSample]) -> Verdict | None:
    """What is said first if ranks stay as they are from ``begin`` on; None if it is nothing for so many seconds."""
    at, ranks = begin, tuple(ranks)
    while at < begin + seconds:
        state, verdicts = observe(state, Sample(at=at, ranks=ranks))
        if verdicts:
            return verdicts[0]
        at = state.next_at
    return None


def test_a_stuck_network_names_everybody() -> None:
    watcher = Watcher(Job(Script()), counts_collectives=True)
    watcher.run_to_step(HANG_STEP)
    waiting = (
        replace(pace.seen, collective=50, waiting=True, runnable=False, in_io=False) for pace in watcher.state.ranks
    )
    verdict = frozen(watcher.state, watcher.now + 0.01, 5.0, waiting)
    assert isinstance(verdict, Hung)
    assert verdict.ranks == (0, 1, 2, 3)
    assert verdict.reason.endswith("; all wait in the same collective, and nobody is missing from it.")


def test_a_rank_whose_gpu_works_is_at_work() -> None:
    watcher = Watcher(Job(Script()))
    watcher.run_to_step(HANG_STEP)
    idle = [replace(pace.seen, runnable=False, in_io=False) for pace in watcher.state.ranks]
    computing = [replace(seen, gpu_utilisation=0.9) for seen in idle]
    assert isinstance(frozen(watcher.state, watcher.now + 0.01, 100.0, idle), Hung)
    assert frozen(watcher.state, watcher.now + 0.01, 100.0, computing) is None


@pytest.mark.parametrize(
    ("used_s", "within_s", "is_work"), [(0.01, 0.032, False), (0.02, 0.032, True), (0.01, 1.0, False), (0.3, 1.0, True)]
)
def test_one_tick_of_the_clock_is_no_work_of_those_who_hang(used_s: float, within_s: float, is_work: bool) -> None:
    # Linux counts CPU time in ticks of 10 ms, a whole one to whoever is awake when it comes.
    watcher = Watcher(Job(Script()))
    watcher.run_to_step(HANG_STEP)
    idle = tuple(replace(pace.seen, runnable=False, in_io=False) for pace in watcher.state.ranks)
    state, at, verdicts = watcher.state, watcher.now + 0.01, []
    while not verdicts:
        state, verdicts = observe(state, Sample(at=at, ranks=idle))
        at = at if verdicts else state.next_at
    assert isinstance(verdicts[0], Hung)
    awake = tuple(replace(seen, cpu_time_s=(seen.cpu_time_s or 0.0) + used_s) for seen in idle)
    _, verdicts = observe(state, Sample(at=at + within_s, ranks=awake))
    assert [type(verdict) for verdict in verdicts] == ([Recovered] if is_work else [])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("phases_are_named", [False, True])
def test_evaluations_do_not_make_hangs_late(seed: int, phases_are_named: bool) -> None:
    script = replace(EVALUATING, troubles=(Trouble(HANG_STEP, 2, ASLEEP),), phases_are_named=phases_are_named)
    verdict, latency_s = hung(Watcher(Job(script, seed), counts_collectives=True))
    assert verdict.ranks == (2,)
    assert latency_s <= 3.0 * script.step_s * 1.05 + 0.1


def test_a_hang_in_a_named_phase_is_told_after_three_times_its_usual_length() -> None:
    watcher = Watcher(Job(replace(EVALUATING, phases_are_named=True)))
    watcher.run_to_step(75)
    begin = watcher.now + 0.01
    asleep = (
        replace(pace.seen, phase="evaluate", phase_since=begin, runnable=False, in_io=False)
        for pace in watcher.state.ranks
    )
    verdict = frozen(watcher.state, begin, 60.0, asleep)
    assert isinstance(verdict, Hung)
    assert 3 * 2.4 <= verdict.standing_s <= 3 * 3.6
    assert 'of phase "evaluate"; ' in verdict.reason


def test_a_rank_at_work_is_slow_however_long_it_takes() -> None:
    watcher = Watcher(Job(Script(troubles=(Trouble(HANG_STEP, 0, BUSY),))))
    watcher.run_to_step(HANG_STEP - 2)
    slow = watcher.wait_for(Slow, 200.0)
    assert slow.ranks == (0,)
    assert 180.0 < slow.standing_s < 183.0
    watcher.run(4000.0)
    assert all(isinstance(verdict, Slow) for verdict in watcher.said)


@pytest.mark.parametrize("kind", [BUSY, DISK, PREEMPTED])
@pytest.mark.parametrize("step_s", [0.005, 0.2])
def test_a_rank_at_work_does_not_hang_and_a_short_wait_for_it_is_not_told(
    kind: tuple[float, str], step_s: float
) -> None:
    script = Script(step_s=step_s, troubles=(Trouble(HANG_STEP, 0, kind, seconds=30.0),))
    watcher = Watcher(Job(script))
    watcher.run_to_step(HANG_STEP + 60)
    assert watcher.said == []


@pytest.mark.parametrize("kind", [STOPPED, ASLEEP])
def test_a_hang_that_goes_on_is_taken_back_and_not_told_again_for_the_same(kind: tuple[float, str]) -> None:
    troubles = tuple(Trouble(step, 1, kind, seconds=4.0) for step in (50, 80, 110, 140))
    watcher = Watcher(Job(Script(troubles=troubles)))
    watcher.run_to_step(160)
    first, second = watcher.said
    assert isinstance(first, Hung)
    assert isinstance(second, Recovered)
    assert second.ranks == first.ranks
    assert " on after 4." in second.reason


@pytest.mark.parametrize("counts_collectives", [False, True])
def test_a_part_of_a_job_waits_if_what_is_missing_is_elsewhere(counts_collectives: bool) -> None:
    job = Job(Script(troubles=(Trouble(HANG_STEP, 3, ASLEEP),)))
    watcher = Watcher(job, counts_collectives=counts_collectives, ranks=(0, 1))
    watcher.run_to_step(HANG_STEP - 2)
    verdict = watcher.wait_for(Waiting, 5.0)
    assert verdict.ranks == (0, 1)
    assert verdict.reason.startswith("ranks 0 and 1 wait for what is not on this node: no step for ")
    assert verdict.reason.endswith(", and nobody is at work here.")
    watcher.run(60.0)
    assert watcher.said == [verdict]


@pytest.mark.parametrize(("kind", "counts_collectives"), [(STOPPED, False), (STOPPED, True), (ASLEEP, True)])
def test_a_part_of_a_job_hangs_if_the_rank_is_here(kind: tuple[float, str], counts_collectives: bool) -> None:
    job = Job(Script(troubles=(Trouble(HANG_STEP, 1, kind),)))
    verdict, _ = hung(Watcher(job, counts_collectives=counts_collectives, ranks=(0, 1)))
    assert verdict.ranks == (1,)


@pytest.mark.parametrize(
    ("kind", "counts_collectives", "reason"),
    [
        (STOPPED, False, "rank 2 hangs: no step for {}; stopped by a signal, it is not at work."),
        (ASLEEP, True, "rank 2 hangs: no step for {}; at collective 45 while others are at 46, it is not at work."),
        (ASLEEP, False, "ranks 0, 1, 2 and 3 hang: no step for {}; they are not at work."),
    ],
)
def test_the_reason_is_one_sentence(kind: tuple[float, str], counts_collectives: bool, reason: str) -> None:
    script = Script(noise=0.0, troubles=(Trouble(HANG_STEP, 2, kind),))
    verdict, _ = hung(Watcher(Job(script), counts_collectives=counts_collectives))
    assert verdict.reason == reason.format("600 ms, 3x the usual 200 ms")


def test_new_workers_start_with_what_was_usual() -> None:
    """A start that takes much longer than the one before is a hang, although no step was seen."""
    watcher = Watcher(Job(Script(compile_s=30.0)))
    watcher.run_to_step(HANG_STEP)
    asleep = (RankSample(rank=rank, cpu_time_s=3.0, runnable=False, in_io=False) for rank in range(4))
    verdict = frozen(forget(watcher.state), 5000.0, 200.0, asleep)
    assert isinstance(verdict, Hung)
    assert verdict.standing_s == pytest.approx(3 * 35.2, abs=2.0)
    assert "of the start" in verdict.reason


def test_the_first_start_may_take_for_ever() -> None:
    asleep = RankSample(rank=0, cpu_time_s=3.0, runnable=False, in_io=False)
    assert frozen(PaceState(), 0.0, 5000.0, [asleep]) is None


def test_who_sees_only_steps_waits_longer() -> None:
    watcher = Watcher(Job(Script()))
    watcher.run_to_step(HANG_STEP)
    bare = (RankSample(rank=pace.seen.rank, step=HANG_STEP, step_at=watcher.now) for pace in watcher.state.ranks)
    verdict = frozen(watcher.state, watcher.now + 0.01, 100.0, bare)
    assert isinstance(verdict, Hung)
    assert 30.0 <= verdict.standing_s < 31.5


def test_the_end_of_a_job_is_no_hang() -> None:
    """Some ranks have ended; the last one sends the model away, asleep."""
    watcher = Watcher(Job(Script()))
    watcher.run_to_step(HANG_STEP)
    last = replace(watcher.state.ranks[0].seen, runnable=False, in_io=False)
    assert frozen(watcher.state, watcher.now + 0.01, 300.0, [last]) is None


def test_ranks_that_do_not_wait_for_each_other_hang_alone() -> None:
    state, said = PaceState(), list[Verdict]()
    for number in range(1, 400):
        at = number * 0.1
        done = min(number, 200)
        ranks = (
            RankSample(rank=0, step=done, step_at=done * 0.1, cpu_time_s=done * 0.1, runnable=False, in_io=False),
            RankSample(rank=1, step=number // 2, step_at=number // 2 * 0.2, cpu_time_s=at, runnable=True, in_io=False),
        )
        state, verdicts = observe(state, Sample(at=at, ranks=ranks))
        said += verdicts
    (verdict,) = said
    assert isinstance(verdict, Hung)
    assert verdict.ranks == (0,)
    assert verdict.at < 20.0 + 0.7


def test_a_phase_may_take_what_the_script_allows_it() -> None:
    watcher = Watcher(Job(Script(step_s=0.2)))
    watcher.run_to_step(30)
    begin = watcher.now
    idle = [
        replace(pace.seen, phase="setup", phase_since=begin, phase_limit_s=40.0, runnable=False, in_io=False)
        for pace in watcher.state.ranks
    ]
    said: list[Verdict] = []
    while not said and watcher.now < begin + 700.0:
        watcher.now = max(watcher.now + 0.01, next_look_at(watcher.state))
        watcher.state, said = observe(watcher.state, Sample(at=watcher.now, ranks=tuple(idle)))
    assert watcher.now == pytest.approx(begin + 40.0, abs=1.5)  # and not the 600 s of a phase that is new
    assert 'of phase "setup", where 40 s are allowed' in said[0].reason


def test_a_spare_waits_as_long_as_it_likes_and_is_not_blamed_for_the_others() -> None:
    state, said = PaceState(), list[Verdict]()
    for number in range(1, 3000):
        at = number * 0.1
        done = min(number, 2900)  # the others stop in the end
        others = tuple(
            RankSample(rank=rank, step=done, step_at=done * 0.1, cpu_time_s=done * 0.1, runnable=False, in_io=False)
            for rank in (0, 1)
        )
        spare_step = min(number, 40) if number < 2899 else 2899  # no more than a step from the others
        spare = RankSample(
            rank=2,
            step=spare_step,
            step_at=min(number, 40) * 0.1,
            phase=SPARE if number > 40 else TRAIN,
            phase_since=4.0 if number > 40 else None,
            cpu_time_s=4.0,
            runnable=False,
            in_io=False,
        )
        state, verdicts = observe(state, Sample(at=at, ranks=(*others, spare)))
        said += verdicts
    assert [(type(verdict), verdict.ranks) for verdict in said] == [(Hung, (0, 1))]
