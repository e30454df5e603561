"""What the recovery machine decides, as text: events go in, commands with their reasons come out.

Each file of ``golden/`` has scenarios, which begin with a ``job`` or one whose workers go on ``in_place``. A line at
the margin is an event, by the name and the arguments of a method of ``scenario.Job``; the indented lines below it are
all that the machine answers. ``pytest --update`` writes the answers anew: read the difference before you commit it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import decisions
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
WORDS = {name: getattr(scenario, name) for name in ("KILLED", "TERMINATED", "CRASHED", "GLOO_CLOSED")}
WORDS |= decisions.names_of(HangKind, Severity, Status)
FACTS = (
    *("rank", "status", "severity", "method", "exit_code", "exception_type", "message", "location", "stack", "step"),
    *("action", "restarts_used", "generation", "evidence", "left", "superseded_by", "micro_batches_reused"),
    "micro_batches_recomputed",
    *("occurred_at", "noticed_at", "stopped_at", "regrouped_at", "first_step_at"),
)


def answers(text: str) -> str:
    """Return ``text`` with the answers of the machine as they are now."""
    return decisions.played(text, JOBS, WORDS, answer)


def answer(job: scenario.Job, event: Callable[[], object]) -> Iterator[str]:
    """Yield the commands with what they record, and the world and the phase if they are others now."""
    before, world, told = job.state.phase, job.state.world, len(job.log)
    event()
    for command in job.log[told:]:
        yield decisions.shown(command, short)
        yield from (f"    {each}" for each in of_incident(command))
    if job.state.world is not None and job.state.world != world:
        yield f"(world {of_world(job.state.world)})"
    if job.state.phase is not before:
        yield f"({job.state.phase.value})"


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
    decisions.check(path, answers(text), request)


def test_every_command_occurs_in_a_scenario() -> None:
    assert decisions.never_told(GOLDEN, get_args(Command)) == []


def test_another_answer_is_seen() -> None:
    text = (GOLDEN / "restarts.txt").read_text(encoding="utf-8")
    assert answers(text.replace("max_restarts=0", "max_restarts=1", 1)) != text
