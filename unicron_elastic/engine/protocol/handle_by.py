"""What all do who go from one world to the next, be it a replica or a member of one: here once for both protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from unicron_elastic.engine.protocol.replica_command import AwaitWorld, Clear, Raise, ReplicaCommand
from unicron_elastic.engine.protocol.replica_event import ReplicaEvent
from unicron_elastic.engine.protocol.replica_member import ReplicaMember
from unicron_elastic.engine.protocol.replica_phase import Ended, InMeeting, Replica, Talk

Party = TypeVar("Party", Replica, ReplicaMember)
Commands: TypeAlias = tuple[ReplicaCommand, ...]
Handlers: TypeAlias = Mapping[tuple[type, type], Callable[[Party, Any, Any], tuple[Party, Commands]]]

CLEAR = Clear(reason="nothing of the step that begins is done")


class ProtocolError(RuntimeError):
    """`ProtocolError`: an event came in a phase that cannot have it: the shell has not done what it was told."""


def handle_by(handlers: Handlers[Party], party: Party, event: ReplicaEvent) -> tuple[Party, Commands]:
    """Return the answer of the handler for such an event in such a phase. Raises ProtocolError if there is none."""
    found = handlers.get((type(party.record), type(event)))
    if found is None:
        raise ProtocolError(f"{type(event).__name__} came to one that is {party.phase.value}")
    return found(party, party.record, event)


def fail(party: Party, kind: str, reason: str) -> tuple[Party, Commands]:
    """Tell the script an error."""
    return party._replace(record=Ended(kind)), (Raise(kind, reason=reason),)


def with_before(answer: tuple[Party, Commands], *before: ReplicaCommand) -> tuple[Party, Commands]:
    """Put commands before those of an answer."""
    return answer[0], (*before, *answer[1])


def adopt_newest(party: Party) -> Party | None:
    """Go to the newest world of which it has heard; None if it is no member of that."""
    assert party.heard is not None
    if party.heard_rank is None:
        return None
    return party._replace(met=party.heard, rank=party.heard_rank, is_connected=False)


def fail_outside(party: Party) -> tuple[Party, Commands]:
    """Tell the script that others have gone on without it."""
    assert party.heard is not None
    return fail(party, "not a member", f"this process is not a member any more: {party.heard.reason}")


def await_newer(
    party: Party, meeting: InMeeting, reason: str, meet: Callable[[Party, InMeeting], tuple[Party, Commands]]
) -> tuple[Party, Commands]:
    """Meet the others in a newer world, once there is one."""
    if party.knows_newer:
        return meet(party, meeting)
    return party._replace(record=replace(meeting, talk=Talk.WORLD)), (AwaitWorld(reason=reason),)
