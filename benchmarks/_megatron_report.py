"""From the records of the benchmark of Megatron-Core to Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from _launchers import TORCHRUN, UNICRON
from _megatron_faults import POINTS
from _megatron_moments import PARTS, RESTART_PARTS
from _report import Spread, confidence, short
from _scenarios import Run

Key = tuple[str, bool]  # the split, and whether the optimizer is distributed


def spread(values: Iterable[float]) -> str:
    """Median [least - greatest] (n)."""
    found = Spread.of(list(values))
    if found is None:
        return "-"
    low, middle, high = (_short(value) for value in (found.minimum, found.median, found.maximum))
    return f"{middle} [{low} - {high}] ({found.n})" if found.n > 1 else f"{middle} (1)"


def _short(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else short(value)


def faults(runs: Sequence[Run]) -> str:
    """What a fault costs under either launcher."""
    chosen = [run for run in runs if run.scenario == "fault"]
    if not chosen:
        return ""
    head = ["split", "optimizer", "fault"]
    head += ["unicron-run: fault -> next step", "torchrun: fault -> first step", "... -> the same step", "a part of"]
    head += ["again: unicron-run", "torchrun", "replacement trains: unicron-run", "step: unicron-run", "torchrun"]
    rows = []
    for key in _keys(chosen):
        for point, words in POINTS.items():
            ours, theirs = (_of(chosen, name, key, point) for name in (UNICRON.name, TORCHRUN.name))
            rows.append(
                [
                    *_named(key),
                    words,
                    *(spread(_values(ours, "resumed_ms")),),
                    *(spread(_values(theirs, name)) for name in ("resumed_ms", "caught_up_ms")),
                    _part(_values(ours, "resumed_ms"), _values(theirs, "resumed_ms")),
                    *(spread(_values(each, "again")) for each in (ours, theirs)),
                    spread(_values(ours, "replaced_ms")),
                    *(spread(_values(each, "step_ms")) for each in (ours, theirs)),
                ]
            )
    text = ["### Fault to next optimizer step", "", "Milliseconds, median [least - greatest] (n).", ""]
    text += [_table(head, rows), "", _parts(chosen, UNICRON.name, {"noticed": "of it, the agent"} | PARTS), ""]
    text += [_parts(chosen, TORCHRUN.name, RESTART_PARTS), "", _recovered(chosen)]
    return "\n".join(text)


def _parts(runs: Sequence[Run], launcher: str, parts: dict[str, str]) -> str:
    rows = []
    for key in _keys(runs):
        for point, words in POINTS.items():
            of = _of(runs, launcher, key, point)
            names = ("noticed_ms" if kind == "noticed" else f"part_{kind}_ms" for kind in parts)
            rows.append([*_named(key), words, *(spread(_values(of, name)) for name in names)])
    return _table([f"{launcher}: parts", "optimizer", "fault", *parts.values()], rows)


def _recovered(runs: Sequence[Run]) -> str:
    counts = []
    for name in (UNICRON.name, TORCHRUN.name):
        own = [run for run in runs if run.launcher == name]
        counts.append(f"{name} {sum(run.succeeded for run in own)} of {len(own)}")
    return f"Recovered: {', '.join(counts)}."


def groups(runs: Sequence[Run]) -> str:
    """Process groups made anew."""
    chosen = [run for run in runs if run.scenario == "groups"]
    if not chosen:
        return ""
    head = ["ranks", "split", "all meet", "groups rebuilt", "threads: first, last, most", "files: first, last, most"]
    rows = []
    for run in chosen:
        row = [str(run.ranks), run.notes["split"], spread(run.notes["met_ms"]), spread(run.notes["rebuilt_ms"])]
        row += [_flat(run.notes[name]) for name in ("threads", "files")]
        rows.append(row)
    text = ["### Process groups rebuilt in the same processes", "", "Milliseconds, median [least - greatest] (n).", ""]
    return "\n".join([*text, _table(head, rows)])


def _flat(values: Sequence[int]) -> str:
    return f"{values[0]}, {values[-1]}, {max(values)}" if values else "-"


def overhead(runs: Sequence[Run]) -> str:
    """The undisturbed step, pair by pair."""
    chosen = [run for run in runs if run.scenario == "overhead"]
    if not chosen:
        return ""
    head = ["split", "optimizer", "pairs", "steps of each", "unicron-run, ms", "torchrun, ms"]
    head += [
        "step, ratio: median [quartiles]",
        "95 % interval",
        "processor time, ratio: median [quartiles]",
        "95 % interval",
    ]
    rows = []
    for key in _keys(chosen):
        notes: dict[str, list[float]] = {}
        for run in chosen:
            if (run.notes["split"], run.notes["is_distributed"]) == key:
                for name in ("ours_ms", "theirs_ms", "ratios", "cpu_ratios", "steps"):
                    notes.setdefault(name, []).extend(run.notes[name])
        row = [*_named(key), str(len(notes["ratios"])), f"{sum(notes['steps']):.0f}"]
        row += [short(median(notes[name])) for name in ("ours_ms", "theirs_ms")]
        rows.append([*row, *_ratio(notes["ratios"]), *_ratio(notes["cpu_ratios"])])
    alarms = sum(run.notes["incidents"] for run in chosen)
    return "\n".join(["### Undisturbed step", "", _table(head, rows), "", f"False alarms of unicron-run: {alarms}."])


def _ratio(values: Sequence[float]) -> tuple[str, str]:
    """Median and quartiles, and where the median is with 95 %."""
    ratios = sorted(values)
    low, high = confidence(ratios)
    quarter = len(ratios) // 4
    return f"{median(ratios):.3f} [{ratios[quarter]:.3f} - {ratios[-1 - quarter]:.3f}]", f"{low:.3f} - {high:.3f}"


def memory(runs: Sequence[Run]) -> str:
    """Bytes for each parameter, the most of any rank, beside the formula of docs/megatron.md."""
    chosen = [run for run in runs if run.scenario == "memory"]
    if not chosen:
        return ""
    head = ["split", "optimizer", "parameters", "kept sums: held", "formula", "copy: held", "formula"]
    head += ["its gradients: held", "formula", "all tensors, after less before attach", "formula"]
    rows = []
    for run in chosen:
        lines: list[dict[str, Any]] = run.notes["lines"]
        if not lines:
            rows.append([*_named((run.notes["split"], run.notes["is_distributed"])), f"failed: {run.problem}"])
            continue
        shared = 1 / run.ranks if run.notes["is_distributed"] else 0.0
        formulas = (4.0, 12 * shared, 4 * shared)
        row = [*_named((run.notes["split"], run.notes["is_distributed"])), str(lines[0]["parameters"])]
        for name, formula in zip(("kept", "copy", "gradients"), formulas, strict=True):
            row += [_bytes([line[name] / line["parameters"] for line in lines]), f"{formula:.2f}"]
        more = [(line["all_after"] - line["all_before"]) / line["parameters"] for line in lines]
        rows.append([*row, _bytes(more), f"{sum(formulas):.2f}"])
    return "\n".join(
        ["### Memory", "", "Bytes for each parameter of the rank, [least - greatest] rank.", "", _table(head, rows)]
    )


def _bytes(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} - {high}"


def progress(run: Run) -> str:
    """One line about a finished run."""
    what = " ".join(str(run.notes[name]) for name in ("split", "is_distributed", "point", "rank") if name in run.notes)
    values = "  ".join(f"{name} {value:.4g}" for name, value in run.values.items())
    problem = ""
    if run.problem:
        problem = "\n    ".join([f"  FAILED: {run.problem}", *run.notes.get("last_lines", [])])
    return f"{run.scenario}  {run.launcher}  {what}  {values}{problem}"


def _keys(runs: Sequence[Run]) -> list[Key]:
    return list(dict.fromkeys((run.notes["split"], run.notes["is_distributed"]) for run in runs))


def _named(key: Key) -> tuple[str, str]:
    return key[0], "distributed" if key[1] else "replicated"


def _of(runs: Sequence[Run], launcher: str, key: Key, point: str) -> list[Run]:
    return [
        run
        for run in runs
        if run.launcher == launcher
        and (run.notes["split"], run.notes["is_distributed"]) == key
        and run.notes["point"] == point
        and run.succeeded
    ]


def _values(runs: Sequence[Run], name: str) -> list[float]:
    return [run.values[name] for run in runs if name in run.values]


def _part(ours: Sequence[float], theirs: Sequence[float]) -> str:
    return f"1/{median(theirs) / median(ours):.0f}" if ours and theirs else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join([f"| {' | '.join(head)} |", *lines])
