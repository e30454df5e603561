"""Whatever the samples say, the detection does not raise, does not grow, and asks to be called again later."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_elastic.detection.arrivals import Arrivals
from unicron_elastic.detection.sample import MEET, SPARE, TRAIN, RankSample, Sample
from unicron_elastic.detection.state import PaceState
from unicron_elastic.detection.telling import Hung, Recovered, Slow
from unicron_elastic.detection.watch import forget, needs_evidence, next_look_at, observe

NUMBERS = st.one_of(
    st.sampled_from([-1.0, 0.0, 1e-9, 0.5, 1.0, 1.5, 100.0, 1e9, -1e12, 1e12]),
    st.floats(-1e12, 1e12, allow_nan=False),
)
MAYBE = st.one_of(st.none(), NUMBERS)
COUNTS = st.one_of(st.none(), st.integers(0, 5), st.integers(0, 2**53))
FLAGS = st.sampled_from([None, False, True])
RANKS = st.builds(
    RankSample,
    rank=st.integers(0, 4),
    step=COUNTS,
    step_at=MAYBE,
    step_time_s=MAYBE,
    phase=st.one_of(st.sampled_from([TRAIN, MEET, SPARE]), st.text("abcdefgh", min_size=1, max_size=2)),
    phase_since=MAYBE,
    cpu_time_s=MAYBE,
    collective=COUNTS,
    arrivals=st.one_of(
        st.none(),
        st.builds(Arrivals, first=st.integers(0, 9), at_s=st.lists(NUMBERS, max_size=9).map(tuple)),
    ),
    waiting=FLAGS,
    stopped=st.booleans(),
    runnable=FLAGS,
    in_io=FLAGS,
    gpu_utilisation=MAYBE,
)
SAMPLES = st.builds(Sample, at=NUMBERS, ranks=st.lists(RANKS, max_size=5, unique_by=lambda rank: rank.rank).map(tuple))


def size(value: object) -> int:
    """How many plain values a state holds."""
    if is_dataclass(value):
        return sum(size(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, tuple):
        return sum(size(each) for each in value)
    return 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(SAMPLES, st.none()), max_size=25), st.booleans())
def test_nothing_raises(samples: list[Sample | None], whole_job: bool) -> None:
    state = PaceState(whole_job=whole_job)
    for sample in samples:
        if sample is None:
            state = forget(state)
            continue
        before = state
        state, verdicts = observe(state, sample)
        assert isinstance(needs_evidence(state), bool)
        if state is not before:
            assert next_look_at(state) > sample.at
        for verdict in verdicts:
            assert verdict.at == sample.at
            assert verdict.reason.endswith(".")
            assert set(verdict.ranks) <= {rank.rank for rank in sample.ranks}
            if isinstance(verdict, Hung | Slow | Recovered):
                assert verdict.reason
        assert len(state.ranks) <= 5
        assert size(state) < 5 * 250 + 300


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-3, 10.0), st.booleans(), st.booleans()), min_size=100, max_size=300))
def test_a_job_of_any_rhythm_is_told_of_in_turns(rhythm: list[tuple[float, bool, bool]]) -> None:
    """Steps come or not, ranks are at work or not: a hang is never told twice without going on between."""
    state, at, step, step_at, cpu_time_s = PaceState(), 0.0, 0, 0.0, 0.0
    told: list[str] = []
    for seconds, steps, works in rhythm:
        at += seconds
        if steps:
            step, step_at = step + 1, at
        cpu_time_s += seconds if works else 0.0
        ranks = tuple(
            RankSample(rank=rank, step=step, step_at=step_at, cpu_time_s=cpu_time_s, runnable=works, in_io=False)
            for rank in range(2)
        )
        state, verdicts = observe(state, Sample(at=at, ranks=ranks))
        told += [type(verdict).__name__ for verdict in verdicts]
    assert size(state) < 2 * 250 + 300
    hangs = [name for name in told if name in {"Hung", "Recovered"}]
    assert all(pair != ("Hung", "Hung") for pair in pairwise(hangs))
