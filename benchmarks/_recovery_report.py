"""From the records of the benchmark of recovery to a table and a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from _recovery_competitors import PLAIN_DDP
from _report import Spread
from _scenarios import Run

MEASURES = {
    "resumed_ms": "kill -> every survivor has finished a step in the new world, ms",
    "caught_up_ms": "kill -> every survivor has finished the step that the kill interrupted, ms",
    "steps_lost": "steps lost: finished by all survivors, and gone through again",
    "repeated_micro_batches": "micro-batches whose gradient was computed more than once",
    "whole_ms": "kill -> all ranks step in the full world, ms",
    "join_ms": "longest stand-still of a survivor after it had resumed, ms",
    "step_ms": "step before the kill, ms",
    "undisturbed_step_ms": "undisturbed step without checkpoints, ms",
}
ALWAYS = ("step_ms", "undisturbed_step_ms")  # measured whether or not the job recovered


def spreads(runs: Sequence[Run], measure: str) -> dict[str, Spread | None]:
    """Median and extremes of one measure for each competitor; of a job that did not recover, only its beginning."""
    names = dict.fromkeys(run.launcher for run in runs)
    return {
        name: Spread.of(
            [
                run.values[measure]
                for run in runs
                if run.launcher == name and measure in run.values and (run.succeeded or measure in ALWAYS)
            ]
        )
        for name in names
    }


def overhead(runs: Sequence[Run]) -> dict[str, Spread]:
    """Each competitor's undisturbed step as a part of plain DDP's, launch by launch of the same round."""
    steps: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.scenario == "undisturbed" and run.succeeded:
            steps.setdefault(run.launcher, {})[run.repetition] = run.values["undisturbed_step_ms"]
    plain = steps.pop(PLAIN_DDP, {})
    ratios = {name: [ours[pair] / plain[pair] for pair in ours.keys() & plain.keys()] for name, ours in steps.items()}
    found = {name: Spread.of(values) for name, values in ratios.items()}
    return {name: spread for name, spread in found.items() if spread is not None}


def table(runs: Sequence[Run], absent: Mapping[str, str]) -> str:
    """The summary as plain text; ``absent`` says of each competitor that did not take part why."""
    names = list(dict.fromkeys(run.launcher for run in runs))
    lines = [["measure: median [min–max]", *names]]  # noqa: RUF001  (a range takes an en dash)
    kills = [run for run in runs if run.scenario == "recovery"]
    if kills:
        lines.append(["recovered", *(_recovered([run for run in kills if run.launcher == name]) for name in names)])
    for measure, words in MEASURES.items():
        found = spreads(runs, measure)
        if any(found.values()):
            lines.append([words, *(str(found[name] or "-") for name in names)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text += [
        f"undisturbed step, {name} / plain DDP, launch by launch: {spread}" for name, spread in overhead(runs).items()
    ]
    text += [f"{name}: not run: {why}" for name, why in absent.items()]
    return "\n".join(text)


def write_json(
    path: Path,
    runs: Sequence[Run],
    options: Mapping[str, object],
    machine: Mapping[str, object],
    absent: Mapping[str, str],
) -> None:
    """Write every record, the summary, and what they were measured on."""
    summary = {
        measure: {name: asdict(spread) for name, spread in spreads(runs, measure).items() if spread is not None}
        for measure in MEASURES
    }
    data = {
        "machine": {**machine, "load_average_after": os.getloadavg()},
        "options": dict(options),
        "not_run": dict(absent),
        "summary": summary,
        "overhead": {name: asdict(spread) for name, spread in overhead(runs).items()},
        "runs": [asdict(run) for run in runs],
    }
    path.write_text(json.dumps(data, indent=1, default=str) + "\n")


def progress(run: Run) -> str:
    """One line about a finished run."""
    values = "  ".join(f"{name} {value:.4g}" for name, value in run.values.items())
    where = ""
    if "kill_step" in run.notes:
        where = (
            f"  rank {run.notes['killed_rank']} at {run.notes['kill_percent_of_step']} % of {run.notes['kill_step']}"
        )
    problem = f"  FAILED: {run.problem}" if run.problem else ""
    return f"{run.scenario} #{run.repetition}  {run.launcher}{where}  {values}{problem}"


def _recovered(runs: Sequence[Run]) -> str:
    return f"{sum(run.succeeded for run in runs)} of {len(runs)}" if runs else "-"
