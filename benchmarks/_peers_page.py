"""From the records of the comparison of peers to its page: tables, settings, versions, and the prose around them."""

from __future__ import annotations

import ast
import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from _peers_launch import FAULTS, SCRIPTS, peers
from _report import Spread, short
from _scenarios import Run

TEMPLATE = SCRIPTS / "page.md"
BASE = "train_torchrun.py"
BASE_PEER = "torchrun, tuned"  # its restarts work, so that it has figures of every kind
TITLES = {
    "kill": "A worker is killed (SIGKILL)",
    "exception": "A worker raises an exception",
    "hang": "A worker hangs (SIGSTOP)",
    "node": "A node is lost (SIGKILL of its agent and everything it started)",
}
COLUMNS = {
    "noticed_ms": ("noticed, s", 1e-3),
    "resumed_ms": ("next step, s", 1e-3),
    "caught_up_ms": ("new step, s", 1e-3),
    "whole_ms": ("as many ranks again, s", 1e-3),
    "repeated_micro_batches": ("micro-batches again", 1.0),
    "steps_lost": ("steps again", 1.0),
}


def page(data: Mapping[str, Any]) -> str:
    """The whole page, as Markdown. ``data`` is what ``peers.py`` keeps."""
    runs = [Run(**run) for run in data["runs"]]
    parts = {
        "faults": "\n\n".join(_fault(runs, fault) for fault in FAULTS),
        "undisturbed": _undisturbed(runs),
        "settings": _settings(data.get("versions", {})),
        "machine": _machine(data.get("machine", {})),
        "absent": _absent(data.get("absent", {})),
        "note": data.get("note", ""),
        "limit_s": f"{data.get('limit_s', 60):g}",
    }
    text = TEMPLATE.read_text()
    for name, part in parts.items():
        text = text.replace(f"{{{{{name}}}}}", part)
    return text


def progress(run: Run) -> str:
    """One line about a finished run."""
    values = "  ".join(f"{name} {value:.4g}" for name, value in run.values.items())
    problem = f"  FAILED: {run.problem}" if run.problem else ""
    return f"{run.scenario} #{run.repetition}  {run.launcher}  {values}{problem}"


def changed_lines(script: str) -> tuple[int, int]:
    """How many lines of code a script has that torchrun's has not, and the other way round."""
    ours, theirs = (code_lines((SCRIPTS / name).read_text()) for name in (script, BASE))
    difference = list(difflib.ndiff(theirs, ours))
    return sum(line.startswith("+ ") for line in difference), sum(line.startswith("- ") for line in difference)


def code_lines(source: str) -> list[str]:
    """The lines of a Python file without blank ones, comments and docstrings."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            documentation |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = [line for number, line in enumerate(source.splitlines(), 1) if number not in documentation]
    return [line.rstrip() for line in lines if line.strip() and not line.strip().startswith("#")]


def _fault(runs: Sequence[Run], fault: str) -> str:
    rows = [["", "recovered", *(title for title, _ in COLUMNS.values())]]
    notes = []
    for peer in peers():
        mine = [run for run in runs if run.scenario == fault and run.launcher == peer.name]
        if mine:
            rows.append([peer.name, _recovered(mine), *(_cell(mine, *each) for each in _columns())])
            failed = Counter(run.problem for run in mine if run.problem)
            notes += [f"- {peer.name}, {count} of {len(mine)}: {problem}" for problem, count in failed.items()]
    text = f"### {TITLES[fault]}\n\n{_table(rows)}"
    return text + ("\n\n" + "\n".join(notes) if notes else "")


def _columns() -> list[tuple[str, float]]:
    return [(name, factor) for name, (_, factor) in COLUMNS.items()]


def _cell(runs: Sequence[Run], name: str, factor: float) -> str:
    """Of those that made a step again; what was noticed counts without that."""
    counted = [run for run in runs if name in run.values and ("resumed_ms" in run.values or name == "noticed_ms")]
    return _spread([run.values[name] * factor for run in counted])


def _recovered(runs: Sequence[Run]) -> str:
    return f"{sum('resumed_ms' in run.values for run in runs)} of {len(runs)}"


def _undisturbed(runs: Sequence[Run]) -> str:
    rows = [["", "step, ms", "of torchrun's in the same round", "lines of the script"]]
    found = {
        (run.launcher, run.scenario, run.repetition): run.values["step_ms"] for run in runs if "step_ms" in run.values
    }
    for peer in peers():
        mine, base = (
            {tuple(round_): value for (name, *round_), value in found.items() if name == wanted}
            for wanted in (peer.name, BASE_PEER)
        )
        ratios = [mine[each] / base[each] for each in sorted(mine.keys() & base.keys())]
        added, removed = changed_lines(peer.script)
        lines = f"{added} more, {removed} less" if added or removed else "0"
        rows.append([peer.name, _spread(list(mine.values())), _spread(ratios), lines])
    return _table(rows)


def _settings(versions: Mapping[str, str]) -> str:
    rows = [["", "version", "script", "settings that differ from the defaults"]]
    own = versions.get("unicron", "this tree")
    rows += [[peer.name, versions.get(peer.tool, own), f"`{peer.script}`", peer.settings] for peer in peers()]
    return _table(rows)


def _machine(machine: Mapping[str, Any]) -> str:
    if not machine:
        return "?"
    return (
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, Linux {machine['kernel']}, Python "
        f"{machine['python']}, torch {machine['torch']}"
    )


def _absent(absent: Mapping[str, str]) -> str:
    return "\n".join(f"- {name} could not be installed: {why}" for name, why in absent.items())


def _spread(values: Sequence[float]) -> str:
    spread = Spread.of(values)
    if spread is None:
        return ""
    if spread.minimum == spread.maximum:
        return _number(spread.median)
    return f"{_number(spread.median)} [{_number(spread.minimum)} - {_number(spread.maximum)}]"


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else short(value)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
