"""Figures: all that a study has to show is drawn, in both formats, with the same bytes from the same results."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_studies import seed_result, study

from unicron_elastic.faults import Status
from unicron_elastic.simulation.history.events import FaultStruck, History, NodeJoins, NodeLeaves
from unicron_elastic.simulation.history.generate import generate
from unicron_elastic.simulation.model.study_result import PolicyResult

sys.path.append(str(Path(__file__).parent.parent.parent / "benchmarks"))
from simulation_plots import Point, draw, healthy_nodes, sensitivities

from unicron_elastic.simulation.study.summary import summarise

needs_matplotlib = pytest.mark.skipif(
    "matplotlib" not in sys.modules and __import__("importlib.util").util.find_spec("matplotlib") is None,
    reason="matplotlib is an optional extra",
)


def words(path: Path) -> str:
    """The text of an SVG: matplotlib writes each as a comment beside its glyphs."""
    ElementTree.parse(path)
    return path.read_text(encoding="utf-8")


@needs_matplotlib
def test_all_that_there_is_to_show_is_drawn(tmp_path: Path) -> None:
    history = generate("trace-b", 0)
    policies = ("unicron", "megatron", "oracle")
    made = replace(
        study(),
        policies=tuple(
            PolicyResult(policy=policy, seeds=(seed_result(policy, 0, history, detection=3600.0 * (place + 1)),))
            for place, policy in enumerate(policies)
        ),
    )
    varied = [study(f"checkpoint interval {s} s", unicron=(1.0, 2.0), megatron=(s / 900, 4.0)) for s in (300, 900)]
    paths = draw(
        [made, *varied], tmp_path / "new", histories={"six jobs": history}, panels=("megatron", "unicron", "no such")
    )
    stems = ("six-jobs-waf", "six-jobs-costs", "six-jobs-checkpoint-interval")
    assert paths == [tmp_path / "new" / f"{stem}.{each}" for stem in stems for each in ("png", "svg")]
    for path in paths:
        assert path.stat().st_size > 5000
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
    over_time, costs, interval = (words(path) for path in paths if path.suffix == ".svg")
    assert "megatron: " in over_time
    assert "healthy nodes, of 16" in over_time
    assert "oracle" not in over_time  # not among the panels
    for word in ("oracle", "detection", "sub-healthy", "share of all GPU time that is lost"):
        assert word in costs
    assert "checkpoint interval, s" in interval


@needs_matplotlib
def test_the_same_results_make_the_same_bytes(tmp_path: Path) -> None:
    made = study(unicron=(1.0, 2.0), megatron=(3.0, 4.0))
    first, second = (draw([made], tmp_path / name) for name in ("first", "second"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@needs_matplotlib
def test_a_format_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="format is 'jpg': it must be one of png, svg"):
        draw([study(unicron=(1.0,))], tmp_path, formats=("jpg",))


def test_without_matplotlib_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"figures need matplotlib: pip install matplotlib"):
        draw([study(unicron=(1.0,))], tmp_path)


def test_studies_are_gathered_by_what_was_varied() -> None:
    intervals = [study(f"checkpoint interval {s} s", unicron=(s / 900,), megatron=(4.0,)) for s in (900, 300)]
    spares = [study("spares 2", unicron=(1.0,)), study("spares 0.5", unicron=(2.0,))]
    found = sensitivities([study(unicron=(1.0,)), *intervals, *spares])
    assert [(each.name, each.unit, tuple(each.policies)) for each in found] == [
        ("checkpoint interval", "s", ("unicron", "megatron")),
        ("spares", "", ("unicron",)),
    ]
    expected = [Point(s, summarise(made)[0].of_ideal) for s, made in zip((300, 900), reversed(intervals), strict=True)]
    points = found[0].policies["unicron"]
    assert [point.value for point in points] == [300.0, 900.0]
    assert [point.of_ideal.mean for point in points] == [each.of_ideal.mean for each in expected]
    assert [point.value for point in found[1].policies["unicron"]] == [0.5, 2.0]


def test_what_cannot_be_put_on_an_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="what was varied is 'the weather'"):
        sensitivities([study("the weather", unicron=(1.0,))])
    with pytest.raises(ValueError, match="two studies have 'spares 2'"):
        sensitivities([study("spares 2", unicron=(1.0,)), study("spares 2", unicron=(1.0,))])


def test_healthy_nodes_are_counted_over_time() -> None:
    def fault(at_s: float, node: int, kind: Status = Status.ECC_ERROR, repair_s: float | None = None) -> FaultStruck:
        return FaultStruck(at_s=at_s, node=node, kind=kind, repair_s=repair_s)

    events = (
        NodeJoins(at_s=10.0, node=3),
        fault(20.0, 0, repair_s=30.0),  # away from 20 to 50
        fault(20.0, 1),  # for good
        fault(30.0, 2, Status.TASK_HANG),  # takes no node away
        NodeLeaves(at_s=40.0, node=0),  # while it is under repair
        NodeJoins(at_s=60.0, node=0),
        fault(90.0, 2, repair_s=30.0),  # beyond the end
    )
    made = History.of(events, name="h", duration_s=100.0, nodes=4, source="made by hand", absent=frozenset({3}))
    assert healthy_nodes(made) == [(0.0, 3), (10.0, 4), (20.0, 2), (60.0, 3), (90.0, 2)]
