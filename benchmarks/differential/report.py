"""What came of many cases, as lines and as a page."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from differential.case import Case

__all__ = ["Result", "write_report"]


@dataclass
class Result:
    """Of one case. ``struck``: how many of its faults were done; ``times_seen`` of ``tries`` there was a finding."""

    name: str
    case: Case
    problems: list[str]
    took_s: float
    launch_s: float
    processes: int
    struck: int
    tries: int = 1
    times_seen: int = 1
    err: str = ""  # what its agents and workers have complained of

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"python benchmarks/differential.py {self.name}"

    def line(self) -> str:
        """In short."""
        verdict = "ok" if not self.problems else f"FOUND {self.times_seen}/{self.tries}"
        return f"{self.took_s:5.1f} s  {verdict:9}  {self.name}  {summary(self.case)}"


def summary(case: Case) -> str:
    """In one line."""
    mode = "reproducible" if case.reproducible else "default"
    where = f"{case.nodes} nodes, " if case.nodes else ""
    faults = ", ".join(f"{f.kind} {f.place}@{f.step}{' ' + f.phase if f.phase else ''}" for f in case.faults)
    more = [*case.blocks, *case.hows, case.optimizer, case.scheduler, case.scaler and f"scaler {case.scaler}"]
    more += ["ema"] if case.ema else []
    return (
        f"{case.loop}; {where}{case.ranks} ranks, {case.micro_batches} micro-batches, {case.steps} steps, {mode}; "
        f"{', '.join(each for each in more if each)}; {faults or 'no fault'}"
    )


def write_report(path: Path, results: Sequence[Result], asked: argparse.Namespace, took_s: float) -> None:
    """The page."""
    bad = [each for each in results if each.problems]
    lines = [
        "# Differential runs",
        "",
        "```",
        f"python benchmarks/differential.py --minutes {asked.minutes:g} --seed {asked.seed} --report {path}",
        "```",
        "",
        ABOUT.read_text(),
        "## One run",
        "",
        _one_run(results, asked.seed, took_s),
        "",
        *_findings(bad),
        *_table("loop", results, lambda case: [case.loop]),
        *_table("fault", results, _faults),
        *_table("layer or way", results, lambda case: [*case.blocks, *case.hows, *(["ema"] if case.ema else [])]),
        *_table("optimizer", results, lambda case: [case.optimizer]),
        *_table("scheduler or scaler", results, lambda case: [case.scheduler, case.scaler and f"scaler {case.scaler}"]),
        *_table("ranks", results, lambda case: [f"{case.ranks} on {case.nodes or 'one host without etcd'}"]),
        *_table("mode", results, lambda case: ["reproducible" if case.reproducible else "default"]),
    ]
    path.write_text("\n".join(lines) + "\n")


def _one_run(results: Sequence[Result], seed: int, took_s: float) -> str:
    times = [each.took_s for each in results]
    bad = sum(bool(each.problems) for each in results)
    return (
        f"{os.cpu_count()} cores, load {os.getloadavg()[2]:.1f} (of its last 15 minutes), torch {torch.__version__}, "
        f"seed {seed}, {took_s / 60:.0f} minutes: **{len(results)} cases, {bad} with findings.** "
        f"{sum(each.struck for each in results)} faults, "
        f"{sum(each.processes for each in results)} processes. A case took {_median(times):.1f} s at the median, "
        f"{max(times):.1f} s at most."
    )


ABOUT = Path(__file__).with_name("page.md")


def _findings(bad: Iterable[Result]) -> list[str]:
    lines = []
    for each in bad:
        lines += [f"- `{each.command}`, seen {each.times_seen} of {each.tries} times: {summary(each.case)}"]
        lines += [f"    - {problem}" for problem in each.problems]
    return ["### Findings", "", *lines, ""] if lines else []


def _faults(case: Case) -> list[str]:
    if not case.faults:
        return ["none"]
    if len({fault.place for fault in case.faults}) == case.ranks > 1:
        return ["all ranks at once"]
    return [f"{fault.kind} {fault.phase}".strip() for fault in case.faults]


def _table(what: str, results: Sequence[Result], of: Callable[[Case], Iterable[str]]) -> list[str]:
    cases, found = Counter[str](), Counter[str]()
    for each in results:
        for name in {name for name in of(each.case) if name}:
            cases[name] += 1
            found[name] += bool(each.problems)
    rows = [f"| {name} | {count} | {found[name] or ''} |" for name, count in sorted(cases.items())]
    return [f"| {what} | cases | with findings |", "|---|---|---|", *rows, ""]


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
