"""How a live run and its simulation are summed up over the same seconds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from unicron_elastic.simulation.model.study_result import CurvePoint

sys.path.append(str(Path(__file__).parent.parent.parent / "benchmarks"))

from _prediction_sums import integral, seated, steps_between


def test_a_step_across_an_edge_counts_by_its_part_within() -> None:
    moments = [0.0, 1.0, 2.0, 6.0, 7.0]  # it stood still in the third step
    assert steps_between(moments, 0.0, 7.0) == pytest.approx(4.0)
    assert steps_between(moments, 0.5, 3.0) == pytest.approx(0.5 + 1.0 + 0.25)
    assert steps_between(moments, 0.5, 3.0) + steps_between(moments, 3.0, 6.5) == pytest.approx(3.0)
    assert steps_between(moments, 8.0, 9.0) == 0.0


def test_steps_of_one_moment_are_counted_once() -> None:
    assert steps_between([0.0, 1.0, 1.0, 2.0], 0.0, 1.0) == pytest.approx(1.0)
    assert steps_between([0.0, 1.0, 1.0, 2.0], 1.0, 2.0) == pytest.approx(2.0)


def test_a_curve_goes_on_after_its_last_point() -> None:
    curve = [CurvePoint(0.0, 4.0), CurvePoint(10.0, 0.0), CurvePoint(12.0, 2.0)]
    assert integral(curve, 9.0, 13.0) == pytest.approx(4.0 + 0.0 + 2.0)
    assert integral(curve, 20.0, 30.0) == pytest.approx(20.0)


def test_hosts_are_numbered_so_that_each_works_for_the_job_of_its_number() -> None:
    seats = {"a": "chat", "b": "code", "c": "code", "d": "chat"}
    assert seated(["code", "code", "chat", "chat"], seats) == ["b", "c", "a", "d"]


def test_jobs_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the simulated jobs begin with \['chat', 'code'\]"):
        seated(["code", "chat"], {"a": "chat", "b": "chat"})
