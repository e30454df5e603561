"""Ordinary training, noisy and interrupted, makes the detection say nothing at all; and looking is cheap."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from simulated import ASLEEP, Job, Script, Trouble
from watcher import Watcher

from unicron_elastic.detection.sample import Sample
from unicron_elastic.detection.watch import next_look_at, observe

# A second of the test's time is hours of training with long steps, and minutes with short ones.
ORDINARY = {
    0.005: (Script(step_s=0.005, evaluate_every=2000, evaluate_s=3.0, checkpoint_every=5000, checkpoint_s=2.0), 150.0),
    0.02: (Script(step_s=0.02, evaluate_every=500, evaluate_s=8.0, checkpoint_every=1500, checkpoint_s=4.0), 600.0),
    0.2: (Script(step_s=0.2, evaluate_every=100, evaluate_s=20.0, checkpoint_every=250, checkpoint_s=10.0), 1200.0),
    2.0: (Script(step_s=2.0, evaluate_every=50, evaluate_s=40.0, checkpoint_every=120, checkpoint_s=20.0), 7200.0),
    30.0: (Script(step_s=30.0, evaluate_every=20, evaluate_s=100.0, checkpoint_every=30, checkpoint_s=60.0), 43200.0),
}


@pytest.mark.parametrize("step_s", ORDINARY)
@pytest.mark.parametrize("counts_collectives", [False, True])
@pytest.mark.parametrize("phases_are_named", [False, True])
def test_ordinary_training_is_silent(step_s: float, counts_collectives: bool, phases_are_named: bool) -> None:
    script, seconds = ORDINARY[step_s]
    script = replace(script, phases_are_named=phases_are_named, mishap_every_s=60.0)
    seed = 2 * counts_collectives + phases_are_named
    watcher = Watcher(Job(script, seed), counts_collectives=counts_collectives)
    watcher.run(seconds)
    assert watcher.step > 0.4 * seconds / step_s
    assert watcher.said == []


@pytest.mark.parametrize("every", [2, 3, 5, 7, 10, 16])
def test_a_long_step_every_few_steps_is_usual(every: int) -> None:
    watcher = Watcher(Job(Script(evaluate_every=every, evaluate_s=0.5), every))
    watcher.run(300.0)
    assert watcher.said == []


@pytest.mark.parametrize("noise", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("step_s", [0.02, 0.2])
def test_noise_is_no_degradation(noise: float, step_s: float) -> None:
    watcher = Watcher(Job(Script(step_s=step_s, noise=noise, mishap_every_s=60.0), seed=1))
    watcher.run(400.0)
    assert watcher.said == []


def test_a_very_long_evaluation_that_nobody_named_is_slow_once() -> None:
    watcher = Watcher(Job(Script(evaluate_every=50, evaluate_s=300.0)))
    watcher.run(2400.0)
    slow, over = watcher.said
    assert slow.reason.startswith("ranks 0, 1, 2 and 3 are slow, not hung: no step for ")
    assert slow.reason.endswith(", but rank 0 used 60% of a core.")
    assert " go on after " in over.reason


@pytest.mark.parametrize(("step_s", "looks_per_s"), [(0.005, 17.0), (0.02, 12.5), (0.2, 10.5), (2.0, 2.0), (30.0, 0.2)])
def test_a_healthy_job_is_looked_at_seldom(step_s: float, looks_per_s: float) -> None:
    watcher = Watcher(Job(Script(step_s=step_s)))
    watcher.run_to_step(40)
    watcher.looks, seconds = 0, max(60.0, 100 * step_s)
    watcher.run(seconds)
    assert watcher.looks / seconds <= looks_per_s


def test_a_standstill_is_looked_at_seldom_once_it_was_told() -> None:
    watcher = Watcher(Job(Script(step_s=0.02, troubles=(Trouble(300, 0, ASLEEP),))))
    watcher.run(60.0)
    assert len(watcher.said) == 1
    watcher.looks = 0
    watcher.run(100.0)
    assert watcher.looks <= 101


@pytest.mark.parametrize("step_s", [0.02, 0.2])
def test_a_look_costs_little(step_s: float, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job(Script(step_s=step_s, ranks=8))
    watcher = Watcher(job, counts_collectives=True)
    watcher.run_to_step(300)
    state = watcher.state
    samples = []
    for _ in range(300):
        watcher.look()
        samples.append(Sample(at=watcher.now, ranks=tuple(pace.seen for pace in watcher.state.ranks)))
    begin = time.perf_counter()
    for sample in samples:
        state, _ = observe(state, sample)
        next_look_at(state)
    spent_s = (time.perf_counter() - begin) / len(samples)
    with capsys.disabled():
        print(f"\none look at 8 ranks, steps of {step_s * 1e3:.0f} ms: {spent_s * 1e6:.0f} us")
    assert spent_s < 0.005
