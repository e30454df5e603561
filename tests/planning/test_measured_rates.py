"""What a job's agents have measured, as a record, and the rates that follow from it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.planning.model.configurations import Workload
from unicron_elastic.planning.model.jobs import GivenRates, JobSpec, MeasuredSteps, Modelled, Throughput
from unicron_elastic.planning.model.measured import (
    ENOUGH_STEPS,
    NUMBERS_MAX,
    STAYS_MAX,
    STEP_FLOPS_MAX,
    TRANSITIONS_MAX,
    MeasuredJob,
    Now,
    OnNodes,
    Stay,
    achieved_flops_now,
    are_flops_told,
    filled,
    first_rates,
    newest_rates,
    transition_of,
)
from unicron_elastic.planning.model.tasks import Transition
from unicron_elastic.planning.model.throughput import ThroughputModel, observed, rates

WORKLOAD = Workload(global_batch=64, gpus_per_unit=2, flops_per_sample=1e12)


def job(throughput: Throughput, **others: Any) -> JobSpec:
    return JobSpec(name="job", command=("python", "train.py"), directory="/", throughput=throughput, **others)


def measured(*times: tuple[int, float], is_fixed: bool = True, flops: float | None = None) -> MeasuredJob:
    """By (nodes, seconds per step), in this order."""
    found = MeasuredJob()
    for number, (nodes, step_s) in enumerate(times):
        found = found.with_steps(
            nodes,
            Stay(since_unix_s=float(number), step_s=step_s, steps=100, flops_per_step=flops),
            is_global_batch_fixed=is_fixed,
            now=Now(nodes=nodes, step_s=step_s, at_unix_s=1000.0 + number),
        )
    return found


# -- the record ----------------------------------------------------------------------------------------------------


def test_a_stay_that_goes_on_is_told_anew() -> None:
    record = MeasuredJob()
    for steps, step_s in ((5, 2.0), (9, 1.0)):
        stay = Stay(since_unix_s=7.0, step_s=step_s, steps=steps)
        record = record.with_steps(4, stay, is_global_batch_fixed=True, now=Now(nodes=4, step_s=step_s, at_unix_s=8.0))
    assert record.steps == (OnNodes(nodes=4, stays=(stay,)),)
    assert record.now == Now(nodes=4, step_s=1.0, at_unix_s=8.0)


def test_short_stays_are_taken_together_and_a_long_one_stands_for_itself() -> None:
    short = [Stay(since_unix_s=float(number), step_s=1.0 + number, steps=10) for number in range(STAYS_MAX + 3)]
    nodes = OnNodes(nodes=2, stays=(short[0],))
    for each in short[1:]:
        nodes = nodes.with_stay(each)
    assert nodes.stays == tuple(short[-STAYS_MAX:])
    assert nodes.step_s == short[-STAYS_MAX // 2].step_s
    long = Stay(since_unix_s=100.0, step_s=9.0, steps=ENOUGH_STEPS)
    assert nodes.with_stay(long).stays == (long,)


def test_only_so_many_numbers_of_nodes_are_kept_and_the_first_of_all() -> None:
    record = measured(*((nodes, 1.0) for nodes in range(1, NUMBERS_MAX + 4)))
    assert [each.nodes for each in record.steps] == [1, *range(5, NUMBERS_MAX + 4)]


def test_steps_of_another_kind_of_batch_are_forgotten() -> None:
    record = measured((1, 1.0), (2, 0.5))
    stay, now = Stay(since_unix_s=9.0, step_s=1.0, steps=5), Now(nodes=2, step_s=1.0, at_unix_s=9.0)
    assert [each.nodes for each in record.with_steps(2, stay, is_global_batch_fixed=False, now=now).steps] == [2]


def test_the_newest_transitions_are_kept() -> None:
    record = MeasuredJob()
    for number in range(TRANSITIONS_MAX + 5):
        record = record.with_transition("grow", float(number)).with_transition("shrink", 3.0)
    assert record.grow_s == tuple(map(float, range(5, TRANSITIONS_MAX + 5)))
    assert record.shrink_s == (3.0,)  # the very same is what was written twice


def test_it_is_written_and_read() -> None:
    record = measured((2, 0.5), (4, 0.25), flops=1e15).with_transition("replace", 2.5)
    assert MeasuredJob.from_json(record.to_json()) == record
    assert MeasuredJob.from_json(MeasuredJob().to_json()) == MeasuredJob()


def test_the_largest_record_can_be_read() -> None:
    record = MeasuredJob()
    for nodes in range(NUMBERS_MAX):
        for number in range(STAYS_MAX):
            stay = Stay(since_unix_s=1.8e9 + number / 7, step_s=1 / 3, steps=49, flops_per_step=1e16 / 3)
            now = Now(nodes=nodes + 10**5, step_s=1 / 3, at_unix_s=1.8e9)
            record = record.with_steps(nodes + 10**5, stay, is_global_batch_fixed=True, now=now)
    for number in range(TRANSITIONS_MAX):
        for kind in ("grow", "shrink", "replace"):
            record = record.with_transition(kind, number / 7)
    assert MeasuredJob.from_json(record.to_json()) == record


def _with(path: str, value: object) -> bytes:
    """A good record with one value in it changed, by ``a.0.b``."""
    told = json.loads(measured((2, 0.5), flops=1e15).with_transition("grow", 1.0).to_json())
    *way, last = path.split(".")
    place = told
    for each in way:
        place = place[int(each) if each.isdigit() else each]
    place[int(last) if last.isdigit() else last] = value
    return json.dumps(told).encode()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("steps", {}),
        ("steps", [7]),
        ("steps.0", None),
        ("steps.0.nodes", 0),
        ("steps.0.nodes", 2.5),
        ("steps.0.nodes", True),
        ("steps.0.nodes", 10**9),
        ("steps.0.stays", []),
        ("steps.0.stays", 3),
        ("steps.0.stays.0", "x"),
        ("steps.0.stays.0.step_s", 0.0),
        ("steps.0.stays.0.step_s", -1.0),
        ("steps.0.stays.0.step_s", math.nan),
        ("steps.0.stays.0.step_s", math.inf),
        ("steps.0.stays.0.step_s", 10**400),
        ("steps.0.stays.0.step_s", "1"),
        ("steps.0.stays.0.step_s", True),
        ("steps.0.stays.0.step_s", None),
        ("steps.0.stays.0.steps", 0),
        ("steps.0.stays.0.steps", 2**60),
        ("steps.0.stays.0.flops_per_step", 0.0),
        ("steps.0.stays.0.flops_per_step", "many"),
        ("steps.0.stays.0.flops_per_step", 1e300),
        ("steps.0.stays.0.since_unix_s", -1.0),
        ("steps.0.stays.0.since_unix_s", []),
        ("steps.0.stays.0.more", 1),
        ("now", 5),
        ("now", {}),
        ("now.nodes", 0),
        ("now.at_unix_s", math.nan),
        ("grow_s", 1.0),
        ("grow_s", [-1.0]),
        ("grow_s", ["1"]),
        ("grow_s", [math.inf]),
        ("grow_s", [1.0] * (TRANSITIONS_MAX + 1)),
        ("is_global_batch_fixed", 1),
        ("more", 1),
    ],
)
def test_what_is_wrong_in_it_is_told(path: str, value: object) -> None:
    with pytest.raises(ValueError):
        MeasuredJob.from_json(_with(path, value))


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 50_000, b'{"a":' * 9_000, b" " * 10**6, b"1" * 9999]
)
def test_what_is_no_record_is_told(text: bytes) -> None:
    with pytest.raises(ValueError):
        MeasuredJob.from_json(text)


def test_a_number_of_nodes_comes_once() -> None:
    entry = json.loads(measured((2, 0.5)).to_json())
    entry["steps"] *= 2
    with pytest.raises(ValueError, match="twice"):
        MeasuredJob.from_json(json.dumps(entry))


@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.floats(), st.lists).map(json.dumps))
def test_garbage_is_a_value_error(text: bytes | str) -> None:
    with pytest.raises(ValueError):
        MeasuredJob.from_json(text)


# -- rates ---------------------------------------------------------------------------------------------------------


def test_before_anything_is_measured() -> None:
    assert first_rates(job(GivenRates((0.0, 1.0, 3.0))), 1) == (0.0, 1.0)
    assert first_rates(job(GivenRates((0.0, 1.0, 3.0))), 4) == (0.0, 1.0, 3.0, 0.0, 0.0)
    modelled = job(Modelled(WORKLOAD), nproc_per_node=2)
    assert first_rates(modelled, 8) == rates(ThroughputModel(workload=WORKLOAD), 8)
    assert first_rates(job(MeasuredSteps(1e12), nproc_per_node=8, unit_nodes=2), 2) == (0.0, 16e12, 32e12)
    assert first_rates(job(MeasuredSteps()), 0) == (0.0,)


@pytest.mark.parametrize("throughput", [GivenRates((0.0, 1.0)), Modelled(WORKLOAD), MeasuredSteps()])
def test_without_measurements_the_newest_rates_are_the_first(throughput: Throughput) -> None:
    spec = job(throughput, nproc_per_node=2)
    for record in (None, MeasuredJob(), MeasuredJob().with_transition("grow", 1.0)):
        assert newest_rates(spec, record, 4) == first_rates(spec, 4)


def test_given_rates_stay() -> None:
    spec = job(GivenRates((0.0, 1.0, 2.0)))
    assert newest_rates(spec, measured((1, 0.5)), 2) == (0.0, 1.0, 2.0)


def test_modelled_rates_are_corrected_by_what_was_measured() -> None:
    spec = job(Modelled(WORKLOAD), nproc_per_node=2)
    found = newest_rates(spec, measured((4, 2.0)), 8)
    model = observed(ThroughputModel(workload=WORKLOAD), 4, 64e12 / 2.0, weight=100.0)
    assert found == rates(model, 8)
    assert found[4] == 32e12


def test_a_modelled_job_may_not_know_its_flops() -> None:
    spec = job(Modelled(Workload(global_batch=64, gpus_per_unit=2)), nproc_per_node=2)
    found = newest_rates(spec, measured((4, 2.0), (8, 1.25)), 8)
    assert found[4] == pytest.approx(8 * 125e12)
    assert found[8] == pytest.approx(1.6 * 8 * 125e12)


def test_the_first_nodes_to_be_measured_count_as_their_gpus() -> None:
    spec = job(MeasuredSteps(1e12), nproc_per_node=8)
    found = newest_rates(spec, measured((4, 1.0), (2, 1.6)), 4)
    assert found[4] == pytest.approx(32e12)
    assert found[2] == pytest.approx(20e12)
    assert found[1] == pytest.approx(32e12 / 2.8)  # a = 0.4, b = 2.4
    assert newest_rates(spec, measured((2, 1.6)), 4) == first_rates(spec, 4)


def test_with_a_batch_per_worker_more_nodes_have_more_samples() -> None:
    spec = job(MeasuredSteps(1e12))
    found = newest_rates(spec, measured((1, 1.0), (2, 1.25), is_fixed=False), 2)
    assert found[1:] == pytest.approx((1e12, 1.6e12))


@pytest.mark.parametrize(("is_fixed", "expected"), [(True, 4e15), (False, 8e15)])
def test_the_word_of_the_script_holds_also_for_steps_before_it(is_fixed: bool, expected: float) -> None:
    record = measured((2, 0.5), is_fixed=is_fixed)
    stay = Stay(since_unix_s=9.0, step_s=1.0, steps=100, flops_per_step=2e15)
    now = Now(nodes=1, step_s=1.0, at_unix_s=9.0)
    record = record.with_steps(1, stay, is_global_batch_fixed=is_fixed, now=now)
    found = newest_rates(job(MeasuredSteps(1.0)), record, 2)
    assert found[1] == 2e15
    assert found[2] == expected


def test_numbers_of_nodes_that_are_no_units_say_nothing() -> None:
    spec = job(MeasuredSteps(1e12), unit_nodes=2)
    assert newest_rates(spec, measured((3, 1.0)), 2) == first_rates(spec, 2)
    assert newest_rates(spec, measured((3, 9.0), (2, 1.0), (4, 0.625)), 2)[1:] == pytest.approx((2e12, 3.2e12))


def test_unseen_numbers_follow_the_line_through_what_was_seen() -> None:
    def amdahl(units: int) -> float:
        return 1.0 / (0.05 + 0.95 / units)

    found = filled({units: amdahl(units) for units in (1, 4, 16)}, 64)
    assert found[1:] == pytest.approx([amdahl(units) for units in range(1, 65)])


def test_one_point_is_a_straight_line_and_more_than_that_is_not_believed() -> None:
    assert filled({3: 6.0}, 5) == pytest.approx((0.0, 2.0, 4.0, 6.0, 8.0, 10.0))
    assert filled({1: 1.0, 2: 2.2}, 4) == pytest.approx((0.0, 1.0, 2.2, 3.3, 4.4))
    assert filled({}, 2) == (0.0, 0.0, 0.0)
    assert filled({7: 7.0}, 0) == (0.0,)


def test_neighbours_that_differ_by_noise_bend_nothing() -> None:
    assert filled({7: 7.0, 8: 7.9}, 64)[64] == pytest.approx(8 * 7.9)


def test_an_outlier_bends_nothing_far_away() -> None:
    points = {units: float(units) for units in (1, 2, 4, 16, 32)} | {8: 5.0}
    found = filled(points, 64)
    assert found[8] == 5.0
    assert found[64] == pytest.approx(64.0)


POINTS = st.lists(
    st.tuples(st.integers(1, 40), st.floats(1e-6, 1e9)), min_size=1, max_size=8, unique_by=lambda point: point[0]
)


@given(
    times=POINTS,
    record_of=st.fixed_dictionaries(
        {"is_fixed": st.booleans(), "flops": st.none() | st.floats(1e-300, STEP_FLOPS_MAX)}
    ),
    x_max=st.integers(0, 24),
    gpu_flops=st.floats(1e-300, 1e300),
    unit_nodes=st.integers(1, 3),
)
def test_rates_can_always_be_planned_with(
    times: list[tuple[int, float]], record_of: dict[str, Any], x_max: int, gpu_flops: float, unit_nodes: int
) -> None:
    record = measured(*times, **record_of)
    found = newest_rates(job(MeasuredSteps(gpu_flops), unit_nodes=unit_nodes), record, x_max)
    assert len(found) == x_max + 1
    assert found[0] == 0.0
    assert all(math.isfinite(rate) and rate > 0.0 for rate in found[1:])
    seen = {nodes // unit_nodes for nodes, _ in times if nodes % unit_nodes == 0}
    for units in range(1, x_max + 1):
        below = max((each for each in seen if each < units), default=0)
        if units not in seen and below:
            assert found[units] <= found[below] * units / below * (1 + 1e-9)


@given(times=POINTS, x_max=st.integers(0, 24))
def test_so_can_those_of_modelled_jobs(times: list[tuple[int, float]], x_max: int) -> None:
    found = newest_rates(job(Modelled(WORKLOAD), nproc_per_node=2), measured(*times), x_max)
    assert len(found) == x_max + 1
    assert found[0] == 0.0
    assert all(math.isfinite(rate) and rate >= 0.0 for rate in found)


# -- standing still, and now ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unsaved_s", "counted_s"), [(0.0, 0.0), (59.0, 0.0), (70.0, 64.0), (1000.0, 512.0)])
def test_what_was_not_saved_is_counted_coarsely(unsaved_s: float, counted_s: float) -> None:
    stay, now = (
        Stay(since_unix_s=9.0, step_s=1.0, steps=5),
        Now(nodes=2, step_s=1.0, at_unix_s=9.0, unsaved_s=unsaved_s),
    )
    record = MeasuredJob().with_steps(2, stay, is_global_batch_fixed=True, now=now)
    assert transition_of(MeasuredJob.from_json(record.to_json())).unsaved_s == counted_s


def test_an_agent_that_says_nothing_of_saves_is_understood() -> None:
    stay, now = Stay(since_unix_s=9.0, step_s=1.0, steps=5), Now(nodes=2, step_s=1.0, at_unix_s=9.0)
    told = json.loads(MeasuredJob().with_steps(2, stay, is_global_batch_fixed=True, now=now).to_json())
    del told["now"]["unsaved_s"]
    assert MeasuredJob.from_json(json.dumps(told)).now == now


def test_transitions_are_the_median_of_what_was_measured() -> None:
    assert transition_of(None) == transition_of(MeasuredJob()) == Transition.of(60.0)
    record = MeasuredJob()
    for stood_s in (1.0, 100.0, 2.0):
        record = record.with_transition("shrink", stood_s)
    assert transition_of(record) == Transition.of(2.0)  # the other kinds are taken to be alike
    record = record.with_transition("grow", 90.0)
    assert transition_of(record) == Transition(grow_s=90.0, shrink_s=2.0, replace_s=90.0, stop_s=90.0)
    record = record.with_transition("replace", 0.0)
    assert transition_of(record) == Transition(grow_s=90.0, shrink_s=2.0, replace_s=0.0, stop_s=90.0)


def test_what_is_achieved_now() -> None:
    record = measured((2, 1.0), (4, 0.5))  # the latter at 1001
    relative = job(MeasuredSteps(1e12))
    assert achieved_flops_now(relative, record, (), 1010.0) == pytest.approx(4e12)
    assert achieved_flops_now(relative, record, (), 1000.0) == pytest.approx(4e12)  # a clock that is a little slow
    assert achieved_flops_now(relative, record, (), 1031.0) == 0.0
    assert achieved_flops_now(relative, None, (), 1010.0) == 0.0
    assert achieved_flops_now(relative, MeasuredJob(), (), 1010.0) == 0.0
    told = measured((2, 1.0), (4, 0.5), flops=3e15)
    assert achieved_flops_now(relative, told, (), 1010.0) == 6e15
    assert achieved_flops_now(job(Modelled(WORKLOAD), nproc_per_node=2), record, (), 1010.0) == 128e12
    given_rates = (0.0, 1.0, 2.0, 3.0, 4.0)
    assert achieved_flops_now(job(GivenRates(given_rates)), record, given_rates, 1010.0) == 4.0
    assert achieved_flops_now(job(GivenRates(given_rates)), record, given_rates[:3], 1010.0) == 0.0
    assert achieved_flops_now(job(MeasuredSteps(1e12), unit_nodes=3), record, (), 1010.0) == pytest.approx(4e12)


def test_flops_are_known_where_somebody_tells_them() -> None:
    nobody, told = measured((2, 0.5)), measured((2, 0.5), flops=1e15)
    assert not are_flops_told(job(MeasuredSteps()), None)
    assert not are_flops_told(job(MeasuredSteps()), nobody)
    assert are_flops_told(job(MeasuredSteps()), told)
    assert are_flops_told(job(GivenRates((0.0, 1e12))), None)
