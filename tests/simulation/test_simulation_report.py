"""Results for people and programs: the numbers of a study over its seeds, as a table, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_studies import DURATION_S, FLOPS, GPUS, seed_result, study
from rich.console import Console

from unicron_elastic.simulation.history.generate import generate
from unicron_elastic.simulation.model.study_result import PolicyResult, StudyResult
from unicron_elastic.simulation.study.interval import interval
from unicron_elastic.simulation.study.report import incidents_csv, to_csv, to_json
from unicron_elastic.simulation.study.study_table import study_table
from unicron_elastic.simulation.study.summary import summarise


def test_the_interval_is_students() -> None:
    # Five values of mean 3 and variance 2.5: 2.7764 * sqrt(2.5 / 5).
    mean, low, high = interval([1, 2, 3, 4, 5])
    assert (mean, low, high) == (3, pytest.approx(3 - 1.96323, abs=1e-4), pytest.approx(3 + 1.96323, abs=1e-4))


def test_the_interval_of_many_is_nearly_that_of_the_normal_distribution() -> None:
    half = interval([0.0, 1.0] * 5000).half
    assert half == pytest.approx(1.96 * 0.5 / 100, rel=0.002)
    assert interval([0.0, 1.0] * 16).half > 1.96 * 0.5 / math.sqrt(32)


def test_of_one_value_no_interval_is_known_and_of_none_no_mean() -> None:
    assert interval([4.0]).mean == 4.0
    assert math.isnan(interval([4.0]).half)
    with pytest.raises(ValueError, match="at least one seed"):
        interval([])


@given(values=st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=50))
def test_the_mean_is_within_its_interval(values: list[float]) -> None:
    mean, low, high = interval(values)
    assert low <= mean <= high


def test_policies_are_compared_on_the_same_seeds() -> None:
    # Hours lost of 24: what happens to a seed happens to both, so the ratio is surer than either.
    made = study(unicron=(2.0, 6.0, 10.0), megatron=(13.0, 15.0, 17.0))
    best, worst = summarise(made)
    assert (best.policy, best.seeds, worst.policy) == ("unicron", 3, "megatron")
    assert best.waf.mean == pytest.approx(FLOPS * 18 * 3600)
    assert best.of_ideal.mean == pytest.approx(18 / 24)
    assert best.of_baseline is not None
    assert best.of_baseline == interval([22 / 11, 18 / 9, 14 / 7])
    assert best.of_baseline.half == pytest.approx(0.0, abs=1e-9)
    assert best.lost_gpu_h["detection"].mean == pytest.approx(6 / 4 * GPUS)
    assert best.total_lost_gpu_h == pytest.approx(6 * GPUS)
    assert best.lost_share["overhead"].mean == pytest.approx(6 / 4 / 24)
    assert best.moves == 1.0


def test_without_the_baseline_nothing_is_compared() -> None:
    (only,) = summarise(study(unicron=(2.0,)))
    assert only.of_baseline is None
    made = study(unicron=(2.0, 3.0), megatron=(4.0,))
    (unicron, _) = summarise(made)
    assert unicron.of_baseline is not None
    assert math.isnan(unicron.of_baseline.half)  # one seed in common


def test_a_study_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="'six jobs' has no policies"):
        summarise(study())
    with pytest.raises(ValueError, match="at least one seed"):
        summarise(study(unicron=()))


def shown(made: StudyResult, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(study_table(made))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_says_it_all() -> None:
    text = shown(study("spares 2", unicron=(2.0, 3.0), megatron=(8.0, 12.0)), 160)
    assert "six jobs, spares 2: 128 GPUs on 16 nodes" in text
    lines = [line.split() for line in text.splitlines()]
    row = next(line for line in lines if line and line[0] == "unicron")
    assert row == ["unicron", "1.548", "89.6", "±26.5", "1.562", "±2.382", "89.6", "±26.5", "80", "80", "80", "80"]
    assert [line[0] for line in lines if line and line[0] in {"unicron", "megatron"}] == ["unicron", "megatron"]
    assert "made by hand" in text
    assert "2 seeds" in text


def test_the_table_fits_into_80_columns() -> None:
    text = shown(study(unicron=(2.0, 3.0), megatron=(8.0, 12.0)), 80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    row = next(line.split() for line in text.splitlines() if "unicron" in line)
    assert row == ["unicron", "1.548", "89.6", "1.562", "89.6", "80", "80", "80", "80"]  # intervals are below


def test_a_single_seed_has_no_interval_in_the_table() -> None:
    row = next(line for line in shown(study(unicron=(2.0,)), 120).splitlines() if "unicron" in line)
    assert "±" not in row
    assert "nan" not in row


def test_json_has_everything_and_the_same_bytes_again() -> None:
    history = generate("trace-b", 0)
    made = replace(
        study(),
        policies=(PolicyResult(policy="unicron", seeds=(seed_result("unicron", 0, history, detection=30.0),)),),
    )
    text = to_json(made, curves=True)
    assert text == to_json(made, curves=True)
    data = json.loads(text)
    assert (data["format"], data["scenario"], data["gpus"]) == (1, "six jobs", 128)
    (policy,) = data["policies"]
    assert policy["summary"]["waf"] == {"mean": policy["seeds"][0]["waf"], "low": None, "high": None}
    (seed,) = policy["seeds"]
    assert len(seed["incidents"]) == len(history.faults)
    assert seed["incidents"][0]["kind"] == history.faults[0].kind.value
    assert seed["lost_gpu_s"]["detection"] == 30.0 * GPUS
    assert seed["curve"][0] == [0.0, FLOPS]
    assert "curve" not in json.loads(to_json(made))["policies"][0]["seeds"][0]


def test_csv_has_a_row_for_each_seed_and_one_for_each_fault() -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(study(unicron=(2.0, 6.0), megatron=(8.0, 12.0))))))
    assert [(row["policy"], row["seed"]) for row in rows] == [
        *(("unicron", "0"), ("unicron", "1"), ("megatron", "0"), ("megatron", "1")),
    ]
    assert float(rows[1]["lost_gpu_h_transition"]) == 1.5 * GPUS
    assert float(rows[0]["waf"]) + 4 * float(rows[0]["lost_waf_overhead"]) == pytest.approx(FLOPS * DURATION_S)
    history = generate("trace-b", 0)
    made = replace(study(), policies=(PolicyResult(policy="unicron", seeds=(seed_result("unicron", 0, history),)),))
    faults = list(csv.DictReader(io.StringIO(incidents_csv(made))))
    assert len(faults) == len(history.faults)
    assert faults[0]["reason"] == 'It restarts, as "rank 3", or another, died.'
    assert float(faults[0]["at_s"]) == history.faults[0].at_s
