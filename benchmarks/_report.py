"""From records to a table and a JSON file, with a description of the machine beside them."""

from __future__ import annotations

import json
import os
import platform
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import psutil
from _launchers import TORCHRUN, UNICRON
from _scenarios import Run

MEASURES = {
    "first_step_ms": "death -> first step of all ranks, ms",
    "noticed_ms": "death -> noticed by the launcher, ms",
    "scripts_ms": "death -> scripts of all ranks begin, ms",
    "cold_start_ms": "launch -> first step of all ranks, ms",
    "step_ms": "undisturbed step, ms",
    "idle_cpu_percent": "idle launcher, % of a core",
    "memory_mib": "idle launcher, MiB (PSS)",
}
PAIRED = ("step_ms",)  # small differences: compared launch by launch, not median with median


@dataclass(frozen=True)
class Spread:
    """Median and extremes of one measure."""

    median: float
    minimum: float
    maximum: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Summarise ``values``; None if there are none."""
        return cls(median(values), min(values), max(values), len(values)) if values else None

    def __str__(self) -> str:
        low, middle, high = (short(value) for value in (self.minimum, self.median, self.maximum))
        return f"{middle}  [{low}–{high}]  n={self.n}"  # noqa: RUF001  (a range takes an en dash)


@dataclass(frozen=True)
class Row:
    """One line of the table: a measure at a number of ranks, per launcher, and unicron-run's part of torchrun's."""

    measure: str
    ranks: int
    spreads: dict[str, Spread | None]
    ratio: Spread | None


def confidence(values: Sequence[float], draws: int = 2_000) -> tuple[float, float]:
    """The 95 % interval of the median, by bootstrap."""
    choice = random.Random(0)
    medians = sorted(median(choice.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def summarise(runs: Sequence[Run]) -> list[Row]:
    """One row per measure and number of ranks that has any value."""
    launchers = list(dict.fromkeys(run.launcher for run in runs))
    rows = []
    for measure in MEASURES:
        for ranks in sorted({run.ranks for run in runs if measure in run.values}):
            values = {name: _values(runs, measure, ranks, name) for name in launchers}
            spreads = {name: Spread.of(list(found.values())) for name, found in values.items()}
            rows.append(Row(measure, ranks, spreads, _ratio(measure, values)))
    return rows


def table(runs: Sequence[Run]) -> str:
    """The summary as plain text."""
    launchers = list(dict.fromkeys(run.launcher for run in runs))
    lines = [["measure: median [min–max]", "ranks", *launchers, "unicron-run / torchrun"]]  # noqa: RUF001
    for ranks in sorted({run.ranks for run in runs if run.scenario == "restart"}):
        counts = [
            _outcome([run for run in _select(runs, "restart", ranks) if run.launcher == name]) for name in launchers
        ]
        lines.append(["recovered (restarts used)", str(ranks), *counts, ""])
    for row in summarise(runs):
        cells = [str(row.spreads[name] or "-") for name in launchers]
        lines.append([MEASURES[row.measure], str(row.ranks), *cells, str(row.ratio or "-")])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def write_json(path: Path, runs: Sequence[Run], options: dict[str, object], machine: dict[str, object]) -> None:
    """Write every record, the summary, and what they were measured on."""
    data = {
        "machine": {**machine, "load_average_after": os.getloadavg()},
        "options": options,
        "summary": [asdict(row) for row in summarise(runs)],
        "runs": [asdict(run) for run in runs],
    }
    path.write_text(json.dumps(data, indent=1, default=str) + "\n")


def describe_machine() -> dict[str, object]:
    """What a reader needs to know to compare numbers."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_model(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "unicron_elastic": version("unicron-elastic"),
        "load_average_before": os.getloadavg(),
    }


def _values(runs: Sequence[Run], measure: str, ranks: int, launcher: str) -> dict[int, float]:
    """The measured values by repetition. Of a run that failed, only its beginning counts: it did not recover."""
    return {
        run.repetition: run.values[measure]
        for run in runs
        if run.launcher == launcher
        and run.ranks == ranks
        and measure in run.values
        and (run.succeeded or measure == "cold_start_ms")
    }


def _ratio(measure: str, values: dict[str, dict[int, float]]) -> Spread | None:
    ours, theirs = values.get(UNICRON.name), values.get(TORCHRUN.name)
    if not ours or not theirs:
        return None
    if measure in PAIRED:
        return Spread.of([ours[pair] / theirs[pair] for pair in sorted(ours.keys() & theirs.keys())])
    whole = median(ours.values()) / median(theirs.values()) if median(theirs.values()) else float("nan")
    return Spread(
        whole, min(ours.values()) / max(theirs.values()), max(ours.values()) / min(theirs.values()), len(ours)
    )


def _outcome(runs: Sequence[Run]) -> str:
    if not runs:
        return "-"
    used = sorted({int(str(run.notes.get("restarts_used", 0))) for run in runs})
    return f"{sum(run.succeeded for run in runs)} of {len(runs)} ({'–'.join(map(str, (used[0], used[-1])))})"  # noqa: RUF001


def _select(runs: Sequence[Run], scenario: str, ranks: int) -> list[Run]:
    return [run for run in runs if run.scenario == scenario and run.ranks == ranks]


def short(value: float) -> str:
    """Three significant digits, without an exponent."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f}"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
