"""What the recovery machine decides, as text: events go in, commands with their reasons come out.

Each file of ``golden/`` has scenarios, which begin with a ``job`` or one whose workers go on ``in_place``. A line at
the margin is an event, by the name and the arguments of a method of ``scenario.Job``; the indented lines below it are
all that the machine answers. ``pytest --update`` writes the answers anew: read the difference before you commit it.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import scenario
from jobs_in_place import ELSEWHERE, InPlace, LateNode, TwoLogs

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.world import Member, World
from unicron_elastic.faults import HangKind, RootCause, Severity, Status
from unicron_elastic.recovery.commands import Command, RecordIncident

JOBS: dict[str, Callable[..., scenario.Job]] = {
    "job": scenario.Job,
    "in_place": InPlace,
    "in_place_of_two_nodes": partial(InPlace, elsewhere=ELSEWHERE),
    "late_node": LateNode,
    "two_logs": TwoLogs,
}
GOLDEN = Path(__file__).parent / "golden"
CODES = {name: getattr(scenario, name) for name in ("KILLED", "TERMINATED", "CRASHED", "GLOO_CLOSED")}
ENUMS: dict[str, type[Enum]] = {each.__name__: each for each in (HangKind, Severity, Status)}
FACTS = (
    *("rank", "status", "severity", "method", "exit_code", "exception_type", "message", "location", "stack", "step"),
    *("action", "restarts_used", "generation", "evidence", "left", "superseded_by", "micro_batches_reused"),
    "micro_batches_recomputed",
    *("occurred_at", "noticed_at", "stopped_at", "regrouped_at", "first_step_at"),
)


def answers(text: str) -> str:
    """Return ``text`` with the answers of the machine as they are now."""
    lines: list[str] = []
    job = scenario.Job()
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if not line or line.startswith(("#", "==")):
            continue
        name, arguments, options = parsed(line)
        if name in JOBS:
            job = JOBS[name](*arguments, **options)
            continue
        before, world, told = job.state.phase, job.state.world, len(job.log)
        getattr(job, name)(*arguments, **options)
        for command in job.log[told:]:
            lines += [f"    {shown(command)}", *(f"        {each}" for each in of_incident(command))]
        if job.state.world not in (None, world):
            lines.append(f"    (world {of_world(job.state.world)})")
        if job.state.phase is not before:
            lines.append(f"    ({job.state.phase.value})")
    return "\n".join(lines) + "\n"


def parsed(line: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Return the method, the arguments and the options of an event's line."""
    name, *words = shlex.split(line)
    arguments: list[Any] = []
    options: dict[str, Any] = {}
    for word in words:
        key, is_option, rest = word.partition("=")
        if is_option and key.isidentifier():
            options[key] = value(rest)
        else:
            arguments.append(value(word))
    return name, arguments, options


def value(word: str) -> Any:
    """Return a number, a constant of ``scenario``, or else the word itself."""
    if word in CODES:
        return CODES[word]
    kind, _, name = word.partition(".")
    if kind in ENUMS:
        return ENUMS[kind][name]
    if "#" in word:  # the name of a member, and no comment
        return word
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def shown(command: Any) -> str:
    """Return a command as one line: what differs from its defaults, and its reason behind a colon."""
    told = [f"{name}={short(each)}" for name, each in changed(command) if name != "reason"]
    reason = f": {command.reason}" if getattr(command, "reason", "") else ""
    return " ".join([type(command).__name__, *told]) + reason


def of_world(world: World) -> str:
    """Return the number and the members of a world, by rank."""
    return " ".join([str(world.number), *(member.name for member in world.members)])


def of_incident(command: Any) -> Iterator[str]:
    """Yield what an incident says: facts, why, what is done, and what followed from it."""
    if not isinstance(command, RecordIncident):
        return
    told = {name: getattr(command.incident, name) for name in FACTS}
    yield ", ".join(f"{name} {' '.join(str(found).split())}" for name, found in told.items() if found not in (None, ""))
    yield f"reason: {command.incident.reason}"
    yield f"decision: {command.incident.decision}"
    for each in command.incident.consequences:
        yield f"consequence: {each}"


def changed(command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a command that are not what they are by default."""
    for field in fields(command):
        found = getattr(command, field.name)
        if field.default is MISSING or found != field.default:
            yield field.name, found


def short(each: Any) -> str:
    """Return a field's value in a few words."""
    if isinstance(each, RootCause):
        return f"<rank {each.fault.failure.rank}>"
    if isinstance(each, Incident):
        return f"<{each.number}>"
    if isinstance(each, tuple) and each and isinstance(each[0], Member):
        return f"<{' '.join(member.name for member in each)}>"
    return f"{each:.6g}" if isinstance(each, float) else repr(each)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_the_machine_answers_as_it_is_written(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text(encoding="utf-8")
    now = answers(text)
    if request.config.getoption("--update"):
        path.write_text(now, encoding="utf-8")
    else:
        assert now == text, f"if this is meant: pytest {Path(__file__).name} --update"


def test_every_command_occurs_in_a_scenario() -> None:
    lines = [line for path in GOLDEN.glob("*.txt") for line in path.read_text(encoding="utf-8").splitlines()]
    told = {line.split()[0].rstrip(":") for line in lines if line.startswith("    ")}
    assert sorted(each.__name__ for each in get_args(Command) if each.__name__ not in told) == []


def test_another_answer_is_seen() -> None:
    text = (GOLDEN / "restarts.txt").read_text(encoding="utf-8")
    assert answers(text.replace("max_restarts=0", "max_restarts=1", 1)) != text
