"""T(t, x): measured where it was measured, modelled elsewhere, 0 where the job cannot run."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_elastic.planning.model.configurations import Configuration, Workload
from unicron_elastic.planning.model.shape import Transformer
from unicron_elastic.planning.model.throughput import (
    KEPT,
    ThroughputModel,
    achieved_flops,
    assumed_flops_per_sample,
    estimate,
    estimates,
    observed,
    rates,
    ruled_out,
)

GIB = 2**30
GPT_7B = Transformer(layers=32, hidden=4096, heads=32, sequence=2048, vocabulary=51200)
EVEN = ThroughputModel(workload=Workload(global_batch=48))
UNEVEN = ThroughputModel(workload=Workload(global_batch=48, uneven=True))
MEGATRON = ThroughputModel(
    workload=Workload(
        global_batch=512,
        micro_batch_sizes=(1, 2, 4),
        gpus_per_unit=8,
        minimum=1,
        gpu_memory_bytes=80 * GIB,
        transformer=GPT_7B,
        sharding="optimizer",
        recompute=None,
        max_tensor=8,
        max_pipeline=8,
    )
)


def test_rates_are_indexed_by_units() -> None:
    found = rates(EVEN, 20)
    assert len(found) == 21
    assert [units for units, rate in enumerate(found) if rate] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert rates(EVEN, 0) == (0.0,)


def test_it_is_not_monotone_and_not_concave() -> None:
    assert any(after < before for before, after in pairwise(rates(UNEVEN, 48)[1:]))
    found = rates(MEGATRON, 40)
    assert any(rate == 0.0 and found[units - 1] and found[units + 1] for units, rate in enumerate(found[2:39], 2))


def test_uneven_shares_make_steps() -> None:
    """All wait for the replica that has most: 25 workers have two micro-batches on some, and so have 47."""
    found = rates(UNEVEN, 48)
    assert all(found[1:])
    assert found[25] == pytest.approx(found[47], rel=0.03)
    assert found[48] > 1.4 * found[47]
    assert found[24] == pytest.approx(found[30], rel=0.03)


def test_every_reason_says_why() -> None:
    model = ThroughputModel(workload=replace(EVEN.workload, minimum=2, maximum=12))
    model = ruled_out(observed(model, 4, 1e14), 6)
    reasons = {each.units: each.reason for each in estimates(model, 13)}
    assert reasons[1] == "less than the minimum of 2"
    assert reasons[4] == "measured"
    assert reasons[5] == "5 GPUs cannot share a batch of 48 evenly"
    assert reasons[6] == "it was tried and did not run"
    assert reasons[8] == "modelled after 1 measured configuration"
    assert reasons[13] == "more than the maximum of 12"


def test_measured_beats_modelled_however_odd() -> None:
    for rate in (1.0, 1e30):
        assert rates(observed(UNEVEN, 7, rate), 7)[7] == rate


def test_one_measurement_sets_the_scale_for_all() -> None:
    once, tenfold = (rates(observed(UNEVEN, 8, rate), 48) for rate in (1e15, 1e16))
    assert tenfold == pytest.approx([10 * rate for rate in once])


def test_outliers_are_outvoted() -> None:
    model = UNEVEN
    for rate in (1.00e15, 1.02e15, 9e15, 0.98e15, 1e12):
        model = observed(model, 8, rate)
    assert rates(model, 8)[8] == 1.00e15


def test_weights_count() -> None:
    model = observed(observed(UNEVEN, 8, 1e15, weight=1), 8, 2e15, weight=5)
    assert rates(model, 8)[8] == 2e15


def test_one_odd_number_of_workers_hardly_moves_the_others() -> None:
    model = UNEVEN
    for units in (4, 6, 12, 16, 24):
        model = observed(model, units, 1e14 * units)
    plain, odd = rates(model, 48), rates(observed(model, 8, 1e14), 48)
    assert odd[8] == 1e14
    assert max(abs(odd[x] / plain[x] - 1) for x in range(1, 49) if x != 8) < 0.1


def test_neighbours_are_corrected_more_than_the_far() -> None:
    model = UNEVEN
    for units in (1, 2, 4, 24, 48):
        model = observed(model, units, rates(UNEVEN, 48)[units])
    slow = observed(model, 12, 0.85 * rates(model, 48)[12])
    changes = {units: rates(slow, 48)[units] / rates(model, 48)[units] for units in (3, 10, 11, 13, 36)}
    assert 0.85 < changes[11] < changes[10] < 1.0
    assert changes[13] < changes[36]
    assert changes[11] < changes[3]


def test_old_measurements_are_dropped_once_enough_are_newer() -> None:
    model = UNEVEN
    for rate in [1e15] * KEPT + [5e14] * (KEPT // 2 + 1):
        model = observed(model, 8, rate)
    assert len(model.measured) == KEPT
    assert rates(model, 8)[8] == 5e14


def test_several_measured_points_say_how_it_falls() -> None:
    """A job with large overheads: what falls between 8 and 16 goes on falling."""
    model = UNEVEN
    for units in (4, 8, 16):
        model = observed(model, units, 1e15 * units / (1 + 3.0 * units / 48))
    expected = 1e15 * 48 / (1 + 3.0)
    naive = observed(UNEVEN, 16, model.measured[-1].flops_per_s)
    assert rates(model, 48)[48] == pytest.approx(expected, rel=0.15)
    assert rates(naive, 48)[48] > 1.2 * expected


def test_configurations_are_told() -> None:
    for each in estimates(MEGATRON, 16):
        if each.flops_per_s:
            assert each.configuration is not None
            assert each.configuration.gpus == 8 * each.units


def test_a_measured_configuration_is_kept_and_the_best_one_wins() -> None:
    slow, fast = Configuration(replicas=2, tensor=8), Configuration(replicas=4, tensor=4)
    model = observed(observed(MEGATRON, 2, 1e15, configuration=slow), 2, 2e15, configuration=fast)
    found = estimate(model, 2)
    assert (found.flops_per_s, found.configuration, found.is_measured) == (2e15, fast, True)


def test_what_did_not_run_is_not_tried_again_until_it_runs() -> None:
    first = estimate(MEGATRON, 2)
    assert first.configuration is not None
    second = estimate(ruled_out(MEGATRON, 2, first.configuration), 2)
    assert second.configuration not in (None, first.configuration)
    assert estimate(ruled_out(MEGATRON, 2), 2).flops_per_s == 0.0
    again = observed(ruled_out(MEGATRON, 2, first.configuration), 2, 3e15, configuration=first.configuration)
    assert estimate(again, 2).flops_per_s == 3e15


def test_what_ran_without_a_name_and_then_did_not_run_is_forgotten() -> None:
    model = observed(EVEN, 4, 1e14)
    ran = estimate(model, 4).configuration
    assert ran is not None
    assert estimate(ruled_out(model, 4, ran), 4).flops_per_s == 0.0


def test_ruling_out_ends() -> None:
    model, tried = MEGATRON, set()
    while (found := estimate(model, 1)).configuration is not None:
        assert found.configuration not in tried
        tried.add(found.configuration)
        model = ruled_out(model, 1, found.configuration)
    assert found.reason == "what could be tried did not run"


def test_what_ran_proves_the_estimate_of_memory_wrong() -> None:
    workload = Workload(global_batch=64, transformer=GPT_7B, gpu_memory_bytes=40 * GIB)
    model = ThroughputModel(workload=workload)
    assert set(rates(model, 8)) == {0.0}
    assert all(rates(observed(model, 4, 5e14), 8)[units] for units in (1, 2, 4, 8))


def test_what_ran_without_a_name_proves_no_more_than_it_must() -> None:
    """A model of 175e9 parameters ran on 64 GPUs: surely not as 64 replicas on one GPU each."""
    shape = Transformer(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)
    workload = replace(MEGATRON.workload, transformer=shape)
    model = observed(ThroughputModel(workload=workload), 8, 8e15)
    assert not any(rates(model, 8)[:4])
    assert estimate(model, 8).configuration not in (None, Configuration(replicas=64))


def test_a_simpler_layout_is_preferred_to_a_small_gain() -> None:
    workload = Workload(global_batch=512, transformer=GPT_7B, max_tensor=8, max_pipeline=8)
    found = estimate(ThroughputModel(workload=workload), 8).configuration
    assert found is not None
    assert (found.tensor, found.pipeline) == (1, 1)


def test_flops_from_the_time_of_a_step() -> None:
    workload = Workload(global_batch=512, transformer=GPT_7B)
    assert achieved_flops(workload, 2.0) == pytest.approx(512 * GPT_7B.flops_per_sample / 2)
    assert achieved_flops(replace(workload, flops_per_sample=1e12), 2.0) == 512e12 / 2


def test_a_job_without_flops_counts_as_its_gpus_do_at_present() -> None:
    workload = Workload(global_batch=64, gpus_per_unit=8)
    with pytest.raises(ValueError, match="the FLOPs of a step are not known"):
        achieved_flops(workload, 1.0)
    assumed = assumed_flops_per_sample(workload, units=2, step_s=0.5, gpu_flops=1e14)
    workload = replace(workload, flops_per_sample=assumed)
    assert achieved_flops(workload, 0.5) == pytest.approx(16e14)
    assert achieved_flops(workload, 0.25) == pytest.approx(32e14)


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 64),
    uneven=st.booleans(),
    seen=st.lists(st.tuples(st.integers(1, 24), st.floats(1e-3, 1e25), st.floats(0.01, 1e6)), max_size=20),
)
def test_whatever_is_measured_rates_are_numbers(batch: int, uneven: bool, seen: list[tuple[int, float, float]]) -> None:
    model = ThroughputModel(workload=Workload(global_batch=batch, uneven=uneven, maximum=20))
    for units, rate, weight in seen:
        model = observed(model, units, rate, weight=weight)
    found = rates(model, 24)
    assert all(math.isfinite(rate) and rate >= 0.0 for rate in found)
    assert found[0] == 0.0
    assert set(found[21:]) == {0.0}
    for units in {units for units, _, _ in seen if units <= 20}:
        alike = [rate for other, rate, _ in seen if other == units]
        assert min(alike) <= found[units] <= max(alike)


@settings(max_examples=40, deadline=None)
@given(st.permutations([(2, 1.9e14), (4, 3.7e14), (8, 7.0e14), (8, 7.1e14), (24, 1.7e15)]))
def test_the_order_of_measurements_does_not_matter(seen: list[tuple[int, float]]) -> None:
    expected = None
    for order in (seen, sorted(seen)):
        model = UNEVEN
        for units, rate in order:
            model = observed(model, units, rate)
        expected = expected or rates(model, 48)
        assert rates(model, 48) == pytest.approx(expected)


def test_what_is_wrong_is_named() -> None:
    for rate in (float("nan"), float("inf"), 0.0, -1.0):
        with pytest.raises(ValueError, match=r"flops_per_s is .*: it must be a positive number"):
            observed(EVEN, 4, rate)
    with pytest.raises(ValueError, match="weight is 0"):
        observed(EVEN, 4, 1.0, weight=0)
    with pytest.raises(ValueError, match="units is 0: it must be a whole number, at least 1"):
        observed(EVEN, 0, 1.0)
    with pytest.raises(ValueError, match="takes 3 GPUs: on 2 units it must take 2"):
        observed(EVEN, 2, 1.0, configuration=Configuration(replicas=3))
    with pytest.raises(ValueError, match="x_max is -1"):
        rates(EVEN, -1)
    with pytest.raises(ValueError, match="gpu_flops is nan"):
        ThroughputModel(workload=EVEN.workload, gpu_flops=float("nan"))
