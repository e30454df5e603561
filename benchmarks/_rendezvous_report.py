"""What the benchmark of the rendezvous prints: Markdown tables, and the JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from _report import Spread, short
from _scenarios import Run

MEASURES = {
    "first_round_ms": "to decide on the first round, ms",
    "next_round_ms": "to decide on the next one, ms",
    "connected_ms": "to note in the coordinator that all have connected, ms",
    "formed_ms": "all have their rank and store, ms",
    "agent_cpu_ms": "processor time of an agent for it, ms",
    "etcd_cpu_ms": "processor time of etcd for it, ms",
    "proposals_per_node": "raft proposals per node",
    "revision_per_node_s": "revisions of the store, per node and s",
    "proposals_per_node_s": "raft proposals, per node and s",
    "lease_keepalives_per_node_s": "lease keep-alives, per node and s",
    "transactions_per_node_s": "transactions (reads and writes), per node and s",
    "watch_requests_per_node_s": "requests for a sign of life, per node and s",
    "etcd_cpu_percent": "etcd for all of them, % of a core",
    "agent_cpu_percent": "an agent, % of a core",
    "standstill_ms": "last step before to first step of all after, ms",
    "loss_to_step_ms": "loss to first step of all others, ms",
    "noticed_ms": "loss to a launcher's first line, ms",
    "told_ms": "loss to the line that tells of it, ms",
    "launch_to_step_ms": "launch of the third to first step of all, ms",
}
COLUMNS = {"unicron": 0, "unicron-run": 0, "c10d": 1, "torchrun": 1, "torchrun-default": 2}
HEAD = ("", "nodes", "", "unicron", "c10d", "c10d by default", "ratio")


def table(runs: Sequence[Run]) -> str:
    """One line for each scenario, number of nodes and measure: median [least - greatest] (n)."""
    rows: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD)]
    for scenario in dict.fromkeys(run.scenario for run in runs):
        for nodes in sorted({run.ranks for run in runs if run.scenario == scenario}):
            rows += _rows(scenario, nodes, [run for run in runs if (run.scenario, run.ranks) == (scenario, nodes)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def failures(runs: Sequence[Run]) -> str:
    """What did not come to its end, and why."""
    return "\n".join(
        f"- {run.scenario}, {run.ranks} nodes, {run.launcher}: {run.problem}" for run in runs if run.problem
    )


def write_json(path: Path, runs: Sequence[Run], options: dict[str, object], machine: dict[str, object]) -> None:
    """Writes every record, and what they were measured on."""
    machine = {**machine, "load_average_after": os.getloadavg()}
    data = {"machine": machine, "options": options, "runs": [asdict(run) for run in runs]}
    path.write_text(json.dumps(data, indent=1, default=str) + "\n")


def progress(run: Run) -> str:
    """One line about a finished run."""
    values = "  ".join(f"{name} {short(value)}" for name, value in run.values.items())
    problem = f"  FAILED: {run.problem}" if run.problem else ""
    return f"{run.scenario} #{run.repetition}  {run.launcher}  {run.ranks} nodes  {values}{problem}"


def _rows(scenario: str, nodes: int, runs: Sequence[Run]) -> list[list[str]]:
    columns: list[list[Run]] = [[], [], []]
    for run in runs:
        columns[COLUMNS[run.launcher]].append(run)
    rows = []
    if any(run.problem for run in runs):
        counts = [f"{sum(run.succeeded for run in column)} of {len(column)}" if column else "" for column in columns]
        rows.append([scenario, str(nodes), "came to its end", *counts, ""])
    for measure, words in MEASURES.items():
        values = [[run.values[measure] for run in column if measure in run.values] for column in columns]
        if any(values):
            cells = [_cell(Spread.of(each)) for each in values]
            rows.append([scenario, str(nodes), words, *cells, _ratio(*values[:2]) if words.endswith(" ms") else ""])
    return rows


def _cell(spread: Spread | None) -> str:
    if spread is None:
        return ""
    if spread.n == 1:
        return f"{short(spread.median)} (1)"
    return f"{short(spread.median)} [{short(spread.minimum)} - {short(spread.maximum)}] ({spread.n})"


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    mine, other = Spread.of(ours), Spread.of(theirs)
    if mine is None or other is None or not mine.median:
        return ""
    ratio = other.median / mine.median
    return f"1/{short(ratio)}" if ratio >= 1 else short(1 / ratio)
