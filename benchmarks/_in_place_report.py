"""The table of the matrix of tier 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from _in_place_cases import Case
from _in_place_verdict import Verdict
from _report import Spread

__all__ = ["Done", "summary", "table", "to_json"]

HEAD = (
    "fault",
    "phase",
    "ranks",
    "mode",
    "over",
    "runs",
    "passed",
    "recomputed",
    "all survivors step after, ms",
    "the replacement trains after, ms",
)


@dataclass
class Done:
    """A case that was run."""

    case: Case
    verdict: Verdict
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether everything was as it has to be."""
        return not self.verdict.problems


def table(done: Sequence[Done]) -> str:
    """In Markdown; a line for each fault, phase, number of ranks, mode and back end."""
    groups: dict[tuple[str | int, ...], list[Done]] = {}
    for each in done:
        groups.setdefault((*each.case.group, each.case.over), []).append(each)
    rows = [list(HEAD), ["---"] * len(HEAD), *(_row(group) for group in groups.values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(group: Sequence[Done]) -> list[str]:
    case = group[0].case
    recomputed = sorted({each.verdict.recomputed for each in group if each.verdict.recomputed is not None})
    return [
        case.kind,
        case.phase,
        str(case.ranks),
        case.mode,
        case.over,
        str(len(group)),
        str(sum(each.passed for each in group)),
        ", ".join(map(str, recomputed)) or "-",
        _spread([each.verdict.survivors_step_ms for each in group if each.passed]),
        _spread([each.verdict.newcomer_steps_ms for each in group if each.passed]),
    ]


def _spread(values: Sequence[float | None]) -> str:
    return str(Spread.of([value for value in values if value is not None]) or "-")


def summary(done: Sequence[Done]) -> str:
    """How many passed, and how far default mode went from the undisturbed run."""
    lines = [f"{sum(each.passed for each in done)} of {len(done)} passed."]
    default = [each.verdict for each in done if each.case.mode == "default"]
    if default:
        losses = max(verdict.loss_apart for verdict in default)
        parameters = max(verdict.parameters_apart for verdict in default)
        lines.append(
            "Largest relative difference from the undisturbed run in default mode: "
            f"{losses:.1e} of a loss, {parameters:.1e} of the parameters (L2 norm)."
        )
    kills = [each.verdict for each in done if each.passed and each.case.kind in ("kill", "segv", "exit-3")]
    for words, values in (
        ("From a death to the first step of all survivors, ms", [verdict.survivors_step_ms for verdict in kills]),
        ("... until the replacement trains, ms", [verdict.newcomer_steps_ms for verdict in kills]),
    ):
        lines.append(f"{words}: {_spread(values)}")
    return "\n".join(lines)


def to_json(done: Sequence[Done]) -> list[dict[str, Any]]:
    """All records."""
    return [{"case": asdict(each.case), "verdict": asdict(each.verdict), **each.notes} for each in done]
