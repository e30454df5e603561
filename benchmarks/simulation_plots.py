"""Draw studies of policies, as PNG and SVG: WAF over time, what is lost in which phase, and sensitivities.

    python benchmarks/simulation_plots.py trace-b --seeds 20 --folder figures
    python benchmarks/simulation_plots.py trace-b --sensitivity fault-rate --policies unicron,megatron --folder figures

Needs matplotlib. The same results make the same bytes with the same matplotlib. Colours are those of Okabe and Ito,
which are told apart by people with any kind of colour vision.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from unicron_elastic.simulation.history.events import FaultStruck, History, NodeJoins, NodeLeaves
from unicron_elastic.simulation.model.study_result import LOST_PHASES, SeedResult, StudyResult
from unicron_elastic.simulation.policies.policies import COMPARED, POLICIES
from unicron_elastic.simulation.study import studies as comparison
from unicron_elastic.simulation.study.interval import Interval
from unicron_elastic.simulation.study.scenario_file import preset_scenario
from unicron_elastic.simulation.study.summary import PolicySummary, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# What plots show, as numbers: steps over time, and results against what was varied. Pure.


_VARIED = re.compile(r"(?P<name>.*?)\s*(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>\D*)")


class Point(NamedTuple):
    """A value of what was varied, and what came of it."""

    value: float
    of_ideal: Interval


class Sensitivity(NamedTuple):
    """``name`` [``unit``] was varied; for each policy its points, by value."""

    name: str
    unit: str
    policies: dict[str, tuple[Point, ...]]


def healthy_nodes(history: History) -> list[tuple[float, int]]:
    """How many nodes are there and need no repair, from each moment on; the first moment is 0.

    A fault that takes a node away counts from the moment that it strikes; one whose repair is not known, for good.
    """
    changes: list[tuple[float, int, int]] = []  # moment, node, +1 or -1 reason to be away
    away = [1 if node in history.absent else 0 for node in range(history.nodes)]
    for event in history.events:
        if isinstance(event, NodeLeaves):
            changes.append((event.at_s, event.node, 1))
        elif isinstance(event, NodeJoins):
            changes.append((event.at_s, event.node, -1))
        elif isinstance(event, FaultStruck) and event.severity == 1:
            changes.append((event.at_s, event.node, 1))
            if event.repair_s is not None and event.at_s + event.repair_s < history.duration_s:
                changes.append((event.at_s + event.repair_s, event.node, -1))
    count = away.count(0)
    steps = [(0.0, count)]
    for at_s, node, change in sorted(changes):
        before = away[node] == 0
        away[node] += change
        count += (away[node] == 0) - before
        if steps[-1][0] == at_s:
            steps[-1] = (at_s, count)
        elif steps[-1][1] != count:
            steps.append((at_s, count))
    return steps


def sensitivities(studies: Sequence[StudyResult]) -> list[Sensitivity]:
    """The studies with ``varied`` such as "checkpoint interval 900 s", gathered by what was varied.

    Raises ``ValueError`` for a ``varied`` without a number, and for two studies of one value.
    """
    found: dict[tuple[str, str], dict[str, dict[float, Interval]]] = {}
    for study in studies:
        if not study.varied:
            continue
        match = _VARIED.fullmatch(study.varied)
        if match is None:
            raise ValueError(f'what was varied is {study.varied!r}: it must end with a number, such as "spares 2"')
        policies = found.setdefault((match["name"] or "varied", match["unit"].strip()), {})
        by_name = {each.policy: each for each in summarise(study)}
        for each in (by_name[policy.policy] for policy in study.policies):
            points = policies.setdefault(each.policy, {})
            if float(match["value"]) in points:
                raise ValueError(f"two studies have {study.varied!r} for policy {each.policy}")
            points[float(match["value"])] = each.of_ideal
    return [
        Sensitivity(
            name,
            unit,
            {policy: tuple(Point(*item) for item in sorted(points.items())) for policy, points in policies.items()},
        )
        for (name, unit), policies in found.items()
    ]


FORMATS = ("png", "svg")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
_PHASE_COLOURS = {"detection": "#D55E00", "transition": "#E69F00", "sub_healthy": "#56B4E9", "overhead": "#999999"}
_PHASE_WORDS = {
    "detection": "detection",
    "transition": "transition",
    "sub_healthy": "sub-healthy",
    "overhead": "overhead",
}
_STYLES = ("-", "--", "-.", ":")
_MOST_PANELS = 6
_STYLE = {
    "svg.hashsalt": "unicron-elastic",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
}


def draw(
    studies: Sequence[StudyResult],
    folder: Path,
    formats: Sequence[str] = FORMATS,
    *,
    histories: Mapping[str, History] | None = None,
    panels: Sequence[str] = (),
) -> list[Path]:
    """Draws all that there is to draw of ``studies`` into ``folder``, and returns the files.

    For each study in which nothing was varied: WAF over time, one panel for each policy of ``panels`` (else of the
    first six), of the first seed, and below it the healthy nodes if ``histories`` has its history, by the name of the
    scenario; and what is lost in which phase. For studies that vary something, one figure for each such thing.
    Raises ``ValueError`` for a format that is not known, and where matplotlib is missing; OSError.
    """
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"format is {name!r}: it must be one of {', '.join(FORMATS)}")
    matplotlib = _matplotlib()
    figures: list[tuple[str, Figure]] = []
    with matplotlib.rc_context(_STYLE):
        for study in studies:
            if not study.varied:
                history = (histories or {}).get(study.scenario)
                figures.append((f"{study.scenario} waf", _over_time(study, history, panels)))
                figures.append((f"{study.scenario} costs", _costs(study)))
        figures += [(f"{studies[0].scenario} {each.name}", _sensitivity(each)) for each in sensitivities(studies)]
        return list(_saved(figures, folder, formats))


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("figures need matplotlib: pip install matplotlib") from None
    return matplotlib


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _saved(figures: Iterable[tuple[str, Figure]], folder: Path, formats: Sequence[str]) -> Iterable[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures:
        stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        for each in formats:
            path = folder / f"{stem}.{each}"
            # Without the date and the version of matplotlib: the same results make the same bytes.
            figure.savefig(path, dpi=160, metadata={"Date": None} if each == "svg" else {"Software": None})
            yield path


# -- WAF over time ----------------------------------------------------------------------------------------------------


def _over_time(study: StudyResult, history: History | None, panels: Sequence[str]) -> Figure:
    first = {policy.policy: policy.seeds[0] for policy in study.policies}
    names = [name for name in panels if name in first] or list(first)[:_MOST_PANELS]
    rows = len(names) + (history is not None)
    figure = _figure(7.2, 0.9 + 0.85 * rows)
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    longest_s = max(first[name].duration_s for name in names)
    unit_s, unit = (86400.0, "days") if longest_s > 3 * 86400 else (3600.0, "hours") if longest_s > 7200 else (1.0, "s")
    most = max(max(point.waf_flops for point in first[name].curve) for name in names)
    most = max(most, *(first[name].waf_ideal / first[name].duration_s for name in names)) or 1.0
    scale, prefix = _prefix(most)
    looks = _looks([policy.policy for policy in study.policies])
    for axis, name in zip(axes, names, strict=False):
        _waf_panel(axis, first[name], unit_s, scale, looks[name][0])
        axis.set_ylim(0, most / scale * 1.08)
    figure.supylabel(f"weighted achieved FLOP/s (WAF), {prefix}FLOP/s", fontsize=9)
    if history is not None:
        _nodes_panel(axes[-1], history, unit_s)
    axes[-1].set_xlim(0, longest_s / unit_s)
    axes[-1].set_xlabel(unit)
    seed = first[names[0]].seed
    figure.suptitle(
        f"{study.scenario}, {study.gpus:,} GPUs, seed {seed}; the thin grey line: without faults", fontsize=9
    )
    return figure


def _waf_panel(axis: Axes, seed: SeedResult, unit_s: float, scale: float, colour: str) -> None:
    at = [point.at_s / unit_s for point in seed.curve] + [seed.duration_s / unit_s]
    waf = [point.waf_flops / scale for point in seed.curve]
    axis.fill_between(at, [*waf, waf[-1]], step="post", color=colour, alpha=0.55, linewidth=0)
    axis.step(at, [*waf, waf[-1]], where="post", color=colour, linewidth=0.8)
    axis.axhline(seed.waf_ideal / seed.duration_s / scale, color="#555555", linewidth=0.7)
    axis.set_title(f"{seed.policy}: {seed.waf_ratio:.1%} of what is possible without faults", loc="left", pad=2)
    axis.locator_params(axis="y", nbins=3)


def _nodes_panel(axis: Axes, history: History, unit_s: float) -> None:
    steps = healthy_nodes(history)
    at = [at_s / unit_s for at_s, _ in steps] + [history.duration_s / unit_s]
    count = [count for _, count in steps]
    axis.step(at, [*count, count[-1]], where="post", color="#000000", linewidth=0.9)
    low = min(count)
    axis.set_ylim(max(low - (history.nodes - low) * 0.2 - 0.5, 0), history.nodes + (history.nodes - low) * 0.1 + 0.5)
    axis.set_title(f"healthy nodes, of {history.nodes:,}", loc="left", pad=2)
    axis.locator_params(axis="y", nbins=3, integer=True)


# -- what is lost -----------------------------------------------------------------------------------------------------


def _costs(study: StudyResult) -> Figure:
    found = list(reversed(summarise(study)))  # the best is the uppermost
    figure = _figure(7.2, 1.1 + 0.28 * len(found))
    axis = figure.subplots()
    left = [0.0] * len(found)
    for phase in LOST_PHASES:
        share = [each.lost_share[phase].mean * 100 for each in found]
        axis.barh(
            range(len(found)),
            share,
            left=left,
            height=0.7,
            color=_PHASE_COLOURS[phase],
            edgecolor="white",
            linewidth=0.4,
            label=_PHASE_WORDS[phase],
        )
        left = [before + more for before, more in zip(left, share, strict=True)]
    _interval_marks(axis, found)
    axis.set_yticks(range(len(found)), [each.policy for each in found])
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("share of all GPU time that is lost, %; the mean and its 95 % interval over seeds")
    axis.set_title(f"{study.scenario}, {study.gpus:,} GPUs, {found[0].seeds} seeds", loc="left")
    figure.legend(loc="outside lower center", ncols=len(LOST_PHASES), fontsize=8, handlelength=1.0)
    return figure


def _interval_marks(axis: Axes, found: Sequence[PolicySummary]) -> None:
    for row, each in enumerate(found):
        ratio = each.effective_ratio
        if not math.isnan(ratio.half):
            axis.plot([(1 - ratio.high) * 100, (1 - ratio.low) * 100], [row, row], color="black", linewidth=1.0)


# -- sensitivity ------------------------------------------------------------------------------------------------------


def _sensitivity(found: Sensitivity) -> Figure:
    figure = _figure(7.2, 3.6)
    axis = figure.subplots()
    by_last = sorted(found.policies.items(), key=lambda item: -item[1][-1].of_ideal.mean)
    looks = _looks(list(found.policies))
    for policy, points in by_last:
        colour, style = looks[policy]
        values = [point.value for point in points]
        axis.plot(
            values,
            [point.of_ideal.mean * 100 for point in points],
            style,
            color=colour,
            marker="o",
            markersize=3,
            label=policy,
        )
        low, high = ([_known(bound) * 100 for bound in bounds] for bounds in _bounds(points))
        axis.fill_between(values, low, high, color=colour, alpha=0.12, linewidth=0)
    values = sorted({point.value for points in found.policies.values() for point in points})
    if values[0] > 0 and values[-1] / values[0] >= 20:
        axis.set_xscale("log")
    if len(values) <= 10:
        axis.set_xticks(values, [f"{value:g}" for value in values])
        axis.minorticks_off()
    axis.set_xlabel(f"{found.name}, {found.unit}" if found.unit else found.name)
    axis.set_ylabel("WAF, % of that without faults")
    axis.set_title("the mean over seeds and its 95 % interval", loc="left")
    figure.legend(loc="outside right upper")
    return figure


def _bounds(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    low = [point.of_ideal.mean if math.isnan(point.of_ideal.low) else point.of_ideal.low for point in points]
    high = [point.of_ideal.mean if math.isnan(point.of_ideal.high) else point.of_ideal.high for point in points]
    return low, high


def _known(value: float) -> float:
    return min(max(value, 0.0), 1.0)  # an interval of shares may reach beyond what there can be


def _looks(policies: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and style of each policy's line, by its place in the study, so that all figures of it agree."""
    return {
        policy: (_COLOURS[place % len(_COLOURS)], _STYLES[place // len(_COLOURS) % len(_STYLES)])
        for place, policy in enumerate(policies)
    }


def _prefix(value: float) -> tuple[float, str]:
    for scale, prefix in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G")):
        if value >= scale:
            return scale, prefix
    return 1.0, ""


def main() -> None:
    """Simulate a preset under several policies, and draw what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", help="such as trace-a or trace-b: see docs/simulation.md")
    parser.add_argument("--policies", default=",".join(COMPARED), help="their names, separated by commas")
    parser.add_argument("--seeds", type=int, default=20, help="so many histories")
    parser.add_argument("--sensitivity", choices=tuple(comparison.VARIED), help="vary one thing, over its usual values")
    parser.add_argument("--folder", type=Path, default=Path("figures"), help="where figures go")
    told = parser.parse_args()
    names = told.policies.split(",")
    if unknown := [name for name in names if name not in POLICIES]:
        parser.error(f"there is no policy {unknown[0]!r}: known are {', '.join(POLICIES)}")
    try:
        _matplotlib()
        scenario = preset_scenario(told.preset)
        variants = [
            comparison.varied(scenario, told.sensitivity, value)
            for value in comparison.VARIED.get(told.sensitivity, ())
        ]
        found = [
            comparison.study(each, names, range(told.seeds), processes=os.cpu_count() or 1, told=what)
            for each, what in variants or [(scenario, "")]
        ]
        for path in draw(found, told.folder, histories={scenario.name: scenario.history(0)}):
            print(path)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{error}\n")


if __name__ == "__main__":
    main()
