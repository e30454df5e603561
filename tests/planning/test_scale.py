"""What a GPU is taken to achieve, for jobs of which nothing is known yet."""

from __future__ import annotations

import pytest
from fake_cluster import spec

from unicron_elastic.planning.model.configurations import parse_workload
from unicron_elastic.planning.model.jobs import GPU_FLOPS, GivenRates, JobSpec, MeasuredSteps, Modelled
from unicron_elastic.planning.model.known_gpu_flops import known_gpu_flops
from unicron_elastic.planning.model.measured import MeasuredJob, Now, Stay, first_rates, newest_rates

PRECISION = 0.07  # half of one of the steps in which it changes


def measured(flops: float | None, *, nodes: int = 2, step_s: float = 0.5) -> MeasuredJob:
    """A job that has made 20 steps on ``nodes``."""
    stay = Stay(since_unix_s=1e9, step_s=step_s, steps=20, flops_per_step=flops)
    now = Now(nodes=nodes, step_s=step_s, at_unix_s=1e9)
    return MeasuredJob().with_steps(nodes, stay, is_global_batch_fixed=True, now=now)


def unknown(name: str, **options: object) -> JobSpec:
    return spec(name, throughput=MeasuredSteps(), **options)


def test_without_any_measurement_it_is_what_is_assumed() -> None:
    assert known_gpu_flops([]) == GPU_FLOPS
    assert known_gpu_flops([(unknown("a"), None), (unknown("b"), measured(None))]) == GPU_FLOPS


def test_a_job_that_tells_its_flops_sets_the_scale_for_the_others() -> None:
    told = (unknown("a", nproc_per_node=4), measured(8e9))  # 16 GFLOP/s on 8 GPUs
    assert known_gpu_flops([told, (unknown("b"), None)]) == pytest.approx(2e9, rel=PRECISION)


def test_two_jobs_that_are_as_fast_count_the_same_before_both_are_measured() -> None:
    one, other = (unknown("a"), measured(1e9, nodes=1, step_s=1.0)), unknown("b")
    gpu_flops = known_gpu_flops([one, (other, None)])
    known = newest_rates(one[0], one[1], 4)
    assert first_rates(other, 4, gpu_flops)[1] == pytest.approx(known[1], rel=PRECISION)


def test_it_is_the_median_and_does_not_change_with_every_measurement() -> None:
    jobs = [(unknown(f"j{place}"), measured(flops)) for place, flops in enumerate((1e9, 2e9, 9e9))]
    assert known_gpu_flops(jobs) == pytest.approx(2e9, rel=PRECISION)
    jobs[1] = (jobs[1][0], measured(2.02e9))
    assert known_gpu_flops(jobs) == known_gpu_flops([(unknown("x"), measured(2e9))])


def test_rates_that_a_person_gave_are_known() -> None:
    given = spec("a", throughput=GivenRates((0.0, 0.0, 8e12, 9e12)), nproc_per_node=2)
    assert known_gpu_flops([(given, None)]) == pytest.approx(2e12, rel=PRECISION)


def test_what_a_person_said_of_a_gpu_stays() -> None:
    said = spec("a", throughput=MeasuredSteps(3e12))
    assert first_rates(said, 1, 5e9) == (0.0, 3e12)
    assert first_rates(unknown("b"), 1, 5e9) == (0.0, 5e9)


def test_a_workload_whose_flops_are_known_counts_once_it_was_measured() -> None:
    workload = parse_workload({"global_batch": 64, "gpus_per_unit": 2, "flops_per_sample": 1e9})
    modelled = spec("a", throughput=Modelled(workload), nproc_per_node=2)
    assert known_gpu_flops([(modelled, None)]) == GPU_FLOPS
    expected = 64 * 1e9 / 0.5 / 4
    assert known_gpu_flops([(modelled, measured(None))]) == pytest.approx(expected, rel=PRECISION)
    assert first_rates(modelled, 1, 1e9)[1] == pytest.approx(first_rates(modelled, 1, 2e9)[1] / 2)
    unsaid = spec("b", throughput=Modelled(parse_workload({"global_batch": 64, "gpus_per_unit": 1})))
    assert known_gpu_flops([(unsaid, measured(None))]) == GPU_FLOPS
    assert newest_rates(unsaid, measured(None), 2, 1e9)[2] == pytest.approx(2e9)


def test_measurements_that_fit_no_unit_say_nothing() -> None:
    assert known_gpu_flops([(unknown("a", unit_nodes=2, min_nodes=2), measured(1e9, nodes=3))]) == GPU_FLOPS
