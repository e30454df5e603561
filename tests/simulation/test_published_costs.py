"""The figures of other systems: each has a source, and nothing remembered or assumed passes for published."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.simulation.history.events import Method
from unicron_elastic.simulation.history.presets import DAY_S, PRESETS
from unicron_elastic.simulation.model.published import COSTS, FIGURES, Costs, Figure, Sized, Tag, all_figures

ROOT = Path(__file__).parent.parent.parent
DOCS = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")


def test_megatrons_way_back_is_68_minutes() -> None:
    megatron = COSTS["megatron"]
    hang_s = megatron.detection[Method.STATISTICS].value
    recomputed_s = FIGURES["computing again, in the mean"].value
    assert (hang_s + megatron.transition_s(7e9) + recomputed_s) / 60 == 68
    assert megatron.checkpoint_interval is not None
    assert recomputed_s == megatron.checkpoint_interval.value / 2


@pytest.mark.parametrize(("what", "figure"), list(all_figures()), ids=[what for what, _ in all_figures()])
def test_every_figure_has_a_source_and_a_unit(what: str, figure: Figure | Sized) -> None:
    assert what
    assert figure.unit in {"s", "ratio", "steps", "bytes/s"}
    assert figure.source
    if figure.tag is Tag.ASSUMED:
        assert figure.source == "no figure found"
        assert figure.note
    if figure.tag is Tag.REMEMBERED:
        assert "from memory" in figure.source
    if figure.tag is Tag.MEASURED:
        assert figure.source.startswith("docs/benchmark-")


def test_what_is_measured_here_stands_in_the_page_that_is_named() -> None:
    in_ms = {"0.073": "73 [", "0.711": "711 [", "2.023": "2023 ["}
    for _what, figure in all_figures():
        if figure.tag is Tag.MEASURED:
            assert isinstance(figure, Figure)
            page = (ROOT / figure.source.split()[0]).read_text(encoding="utf-8")
            assert in_ms[str(figure.value)] in page


@pytest.mark.parametrize("costs", COSTS.values(), ids=lambda costs: costs.system)
def test_every_system_can_be_simulated(costs: Costs) -> None:
    assert set(costs.detection) == set(Method)
    assert 0 < costs.throughput.value <= 1
    assert costs.transition_s(1e9) > 0
    assert costs.loses in {"node", "replica"}
    assert (costs.checkpoint_interval is None) == (costs.checkpoint_stall is None)
    # Who computes again what came after a checkpoint must write some; who does not says how many steps.
    assert (costs.checkpoint_interval is None) == (costs.redone_steps is not None)


def test_a_sized_figure_runs_straight_between_its_points_and_stays_beyond_them() -> None:
    sized = Sized(((1e9, 10.0), (3e9, 30.0), (4e9, 80.0)), "s", Tag.PUBLISHED, "here")
    found = [sized.at(billions * 1e9) for billions in (0.0, 1.0, 1.5, 3.0, 3.5, 4.0, 1000.0)]
    assert found == [10.0, 10.0, 15.0, 30.0, 55.0, 80.0, 80.0]


@given(parameters=st.floats(0, 1e13))
def test_sized_figures_stay_within_what_was_published(parameters: float) -> None:
    for _what, figure in all_figures():
        if isinstance(figure, Sized):
            values = [value for _, value in figure.points]
            assert min(values) <= figure.at(parameters) <= max(values)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_documentation_has_every_preset_with_its_source(name: str) -> None:
    preset = PRESETS[name]
    rates = f"{preset.sev1_per_1000_node_days:.3g} | {preset.others_per_1000_node_days:.3g}"
    assert f"| {name} | {preset.nodes:,} | {preset.duration_s / DAY_S:g} | {rates} | {preset.source} |" in DOCS


@pytest.mark.parametrize(("what", "figure"), list(all_figures()), ids=[what for what, _ in all_figures()])
def test_the_documentation_has_every_figure_with_its_source(what: str, figure: Figure | Sized) -> None:
    if isinstance(figure, Sized):
        value = "; ".join(f"{size / 1e9:g}B: {each:g}" for size, each in figure.points)
    else:
        value = f"{figure.value:,.6g}"
    assert f"| {what} | {value} {figure.unit} | {figure.tag} | {figure.source}" in DOCS
