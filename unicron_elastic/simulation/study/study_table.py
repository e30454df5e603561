"""A study's results as a table for the terminal."""

from __future__ import annotations

import math

from rich import box
from rich.table import Table

from unicron_elastic.simulation.model.study_result import LOST_PHASES, StudyResult
from unicron_elastic.simulation.study.interval import Interval
from unicron_elastic.simulation.study.summary import PolicySummary, summarise

_PREFIXES = ((1e24, "Y"), (1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1.0, ""))
_HEADS = {
    "detection": "detection",
    "transition": "transition",
    "sub_healthy": "sub-healthy",
    "overhead": "overhead",
}


def study_table(study: StudyResult, baseline: str = "megatron") -> Table:
    """One row for each policy, the best first; after "±" half of the 95 % confidence interval over seeds.

    GPU-hours lost are means over seeds. Raises ``ValueError`` for a study without policies or seeds.
    """
    found = summarise(study, baseline)
    scale, prefix = next(each for each in _PREFIXES if found[0].waf.mean >= each[0] or each[0] == 1.0)
    with_baseline = found[0].of_baseline is not None
    table = Table(
        title=_title(study),
        caption=_caption(study, found),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("policy", min_width=8)
    heads = [f"WAF, {prefix}FLOP", "of ideal, %", *([f"of {baseline}"] if with_baseline else []), "effective, %"]
    for head in (*heads, *_HEADS.values()):
        table.add_column(head, justify="right", min_width=6, overflow="fold")
    for each in found:
        cells = [each.policy, f"{each.waf.mean / scale:.4g}", _percent(each.of_ideal)]
        if with_baseline:
            cells.append("" if each.of_baseline is None else _factor(each.of_baseline))
        cells.append(_percent(each.effective_ratio))
        table.add_row(*cells, *(_hours(each.lost_gpu_h[phase].mean) for phase in LOST_PHASES))
    return table


def _title(study: StudyResult) -> str:
    varied = f", {study.varied}" if study.varied else ""
    return f"{study.scenario}{varied}: {study.gpus:,} GPUs on {study.nodes:,} nodes"


def _caption(study: StudyResult, found: list[PolicySummary]) -> str:
    seeds = found[0].seeds
    counted = "1 seed" if seeds == 1 else f"{seeds} seeds, ± half of the 95 % interval"
    return (
        f"Columns from detection to overhead: GPU-hours lost. {counted}; {found[0].incidents:.1f} faults each.\n"
        f"{study.history}"
    )


def _percent(value: Interval) -> str:
    return f"{value.mean * 100:.1f}" + ("" if math.isnan(value.half) else f" ±{value.half * 100:.1f}")


def _factor(value: Interval) -> str:
    return f"{value.mean:.3f}" + ("" if math.isnan(value.half) else f" ±{value.half:.3f}")


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
