"""The table of the detection benchmark, in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from _launchers import TORCHRUN, UNICRON
from _report import Spread, short
from _scenarios import Run

FAULTS = {
    "kill": "process killed (SIGKILL)",
    "exception": "exception raised",
    "stop": "process stopped (SIGSTOP)",
    "sleep": "asleep for ever",
    "gil": "hangs with Python's lock held",
    "skip": "a reduction of gradients left out",
    "xid": "XID 79 from a GPU (a library with NVML's ABI)",
    "slow1.3": "steps 1.3x as long",
    "slow1.5": "steps 1.5x as long",
}
EXITS = frozenset({"kill", "exception"})  # the faults that end a process
# As published summaries and memory have them: the paper's text was not at hand. Its node down, 5.6 s, is not in here.
PAPER = {"kill": "1.8 s", "exception": "0.3 s"}
PAPER_STATISTICS = "3 iterations"
HEAD = (
    "fault",
    "ranks",
    "step, ms",
    "unicron-run, ms",
    "in steps",
    "rank named",
    "torchrun, ms",
    "paper",
    "torch alone",
)


def table(runs: Sequence[Run], deadline_s: float) -> str:
    """One line per fault, number of ranks and step time; medians with least and greatest."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    keys = sorted({_key(run) for run in runs})
    for fault, name in FAULTS.items():
        for key in keys:
            found = [run for run in runs if _key(run) == key and run.scenario.split()[0] == fault]
            if found:
                lines.append("| " + " | ".join([name, *_cells(fault, found, deadline_s)]) + " |")
    alarms = [run for run in runs if run.notes.get("false_alarms")]
    launches = sum(run.launcher == UNICRON.name for run in runs)
    lines += ["", f"False alarms before the fault: in {len(alarms)} of {launches} launches."]
    return "\n".join(lines)


def _key(run: Run) -> tuple[int, float]:
    return run.ranks, float(run.scenario.split()[1])


def _cells(fault: str, runs: Sequence[Run], deadline_s: float) -> list[str]:
    ours = [run for run in runs if run.launcher == UNICRON.name]
    theirs = [run for run in runs if run.launcher == TORCHRUN.name]
    noticed = [run for run in ours if "noticed_ms" in run.values]
    named = Counter(str(each) for run in noticed for each in run.notes["named"])  # type: ignore[union-attr]
    step = Spread.of([run.values["step_ms"] for run in runs if "step_ms" in run.values])
    alone = "-" if fault in EXITS else "never" if fault.startswith(("slow", "xid")) else "30 min gloo, 10 min NCCL"
    return [
        str(runs[0].ranks),
        short(step.median) if step else "-",
        _noticed(ours, deadline_s),
        "-" if fault in EXITS else _spread([run.values["noticed_steps"] for run in noticed]),
        ", ".join(f"{word} {count}" for word, count in sorted(named.items())) or "-",
        _noticed(theirs, deadline_s),
        PAPER.get(fault, PAPER_STATISTICS),
        alone,
    ]


def _noticed(runs: Sequence[Run], deadline_s: float) -> str:
    """The times of those who noticed, and how many did not."""
    whole = [run for run in runs if run.problem is None]
    missed = sum("noticed_ms" not in run.values for run in whole)
    parts = [_spread([run.values["noticed_ms"] for run in whole if "noticed_ms" in run.values])]
    if missed:
        parts = [part for part in parts if part != "-"]
        parts.append(f"not within {deadline_s:g} s ({missed} of {len(whole)})")
    if len(whole) < len(runs):
        parts.append(f"{len(runs) - len(whole)} launches failed")
    return "; ".join(parts)


def _spread(values: Sequence[float]) -> str:
    found = Spread.of(values)
    if found is None:
        return "-"
    return f"{short(found.median)} [{short(found.minimum)} - {short(found.maximum)}]"
