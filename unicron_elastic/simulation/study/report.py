"""A study's results as JSON and CSV: the same results make the same bytes."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, fields
from typing import Any

from unicron_elastic.simulation.model.study_result import LOST_PHASES, SeedResult, SimulatedIncident, StudyResult
from unicron_elastic.simulation.study.interval import Interval
from unicron_elastic.simulation.study.summary import PolicySummary, summarise

FORMAT = 1  # grows when a field changes its meaning or goes


def to_json(study: StudyResult, *, baseline: str = "megatron", curves: bool = False) -> str:
    """Everything, seed by seed and fault by fault; with ``curves`` the WAF over time, too. Ends with a line feed.

    Units stand in the names: ``_s`` seconds, ``_h`` hours, ``waf`` and ``lost_flop`` weighted FLOP. What is not known,
    such as the interval of a single seed, is null.
    """
    summaries = {each.policy: each for each in summarise(study, baseline)}
    data = {
        "format": FORMAT,
        "scenario": study.scenario,
        "varied": study.varied,
        "history": study.history,
        "nodes": study.nodes,
        "gpus": study.gpus,
        "baseline": baseline,
        "policies": [
            {
                "policy": policy.policy,
                "summary": _summary(summaries[policy.policy]),
                "seeds": [_seed(seed, curves) for seed in policy.seeds],
            }
            for policy in study.policies
        ],
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _summary(each: PolicySummary) -> dict[str, Any]:
    return {
        "waf": _interval(each.waf),
        "of_ideal": _interval(each.of_ideal),
        "of_baseline": None if each.of_baseline is None else _interval(each.of_baseline),
        "effective_ratio": _interval(each.effective_ratio),
        "lost_gpu_h": {phase: _interval(value) for phase, value in each.lost_gpu_h.items()},
        "incidents": each.incidents,
        "moves": each.moves,
    }


def _interval(value: Interval) -> dict[str, float | None]:
    return {name: None if math.isnan(of) else of for name, of in value._asdict().items()}


def _seed(seed: SeedResult, curves: bool) -> dict[str, Any]:
    data = asdict(seed)
    data["curve"] = [[point.at_s, point.waf_flops] for point in seed.curve] if curves else None
    if not curves:
        del data["curve"]
    return data


def to_csv(study: StudyResult) -> str:
    """One row for each policy and seed; the same units as in JSON."""
    lost = [f"lost_{unit}_{phase}" for unit in ("waf", "gpu_h") for phase in LOST_PHASES]
    head = ["scenario", "varied", "policy", "seed", "duration_s", "waf", "waf_ideal", "gpu_h", "effective_ratio", *lost]
    return _csv([*head, "incidents", "plans", "moves"], _rows(study))


def _rows(study: StudyResult) -> Iterable[list[object]]:
    for policy in study.policies:
        for seed in policy.seeds:
            yield [
                study.scenario,
                study.varied,
                policy.policy,
                seed.seed,
                seed.duration_s,
                seed.waf,
                seed.waf_ideal,
                seed.gpu_s / 3600,
                seed.effective_ratio,
                *(getattr(seed.lost_waf, phase) for phase in LOST_PHASES),
                *(getattr(seed.lost_gpu_h, phase) for phase in LOST_PHASES),
                len(seed.incidents),
                seed.plans,
                seed.moves,
            ]


def incidents_csv(study: StudyResult) -> str:
    """One row for each fault of each policy and seed."""
    names = [field.name for field in fields(SimulatedIncident)]
    rows = (
        [policy.policy, seed.seed, *(getattr(incident, name) for name in names)]
        for policy in study.policies
        for seed in policy.seeds
        for incident in seed.incidents
    )
    return _csv(["policy", "seed", *names], rows)


def _csv(head: list[str], rows: Iterable[list[object]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return out.getvalue()
