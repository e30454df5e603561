"""Nodes that are lost to workers which cannot go on without them: all begin again, and the incident names the nodes.

What the workers here raise for it, before or after it is known, is a consequence of it and no failure of theirs.

A node may live although the others took it for lost: its lease had run out, or nobody could reach it for a while.
They go on in place without it, and count that. So its workers have nobody to train with: they end, and the node
comes back as any newcomer does, by a meeting of all nodes, after which nobody takes it for lost any more.

Where nobody tells of a lost node, as torch's rendezvous do not, it takes two signs: it has fallen silent, and the
connections of the workers here have broken. One without the other may be a busy host, or a network that stumbles; but
who connects anew would wait for a lost node in vain.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.world import World
from unicron_elastic.faults import Fault, Severity, Status
from unicron_elastic.recovery.commands import Command, RecordIncident, Tell
from unicron_elastic.recovery.events import OtherNodesLost
from unicron_elastic.recovery.node import open_loss_incident
from unicron_elastic.recovery.state import JobState, Part, Phase, is_anyone_elsewhere, members_of, name_of
from unicron_elastic.recovery.stopping import end_at_once
from unicron_elastic.recovery.worker_loss import is_in_place


def missed(state: JobState, at: float) -> OtherNodesLost | None:
    """Return that silent nodes are lost, if the connections of workers here have broken and were not made anew."""
    silent, world = state.silent, state.world
    has_broken = state.broke is not None or state.reattempts > 0
    if silent is None or world is None or state.phase is not Phase.RUNNING or not has_broken:
        return None
    lost = members_of(world, silent.nodes)
    if not lost:
        return None
    hosts = ", ".join(sorted(node.rpartition("#")[0] for node in silent.nodes))
    gives, it_is = ("gives", "it is") if len(silent.nodes) == 1 else ("give", "they are")
    ranks = ", ".join(str(world.rank_of(name)) for name in lost)
    who = f"The node{'' if len(silent.nodes) == 1 else 's'} of rank{'' if len(lost) == 1 else 's'} {ranks}"
    reason = f"{who} ({hosts}) {gives} no sign of life, and connections have broken: {it_is} lost."
    return OtherNodesLost(at=at, nodes=silent.nodes, reason=reason, generation=state.generation)


def booked(state: JobState, event: OtherNodesLost) -> tuple[JobState, list[Command]]:
    """Opens the incident, unless something else is the matter here, too."""
    if state.leaving is not None or any(not fault.is_consequence for fault in state.faults):
        return state, []
    if state.phase is Phase.RUNNING:
        state, superseded = open_loss_incident(state, event)
        return replace(state, lost=event.reason), [] if superseded is None else [RecordIncident(incident=superseded)]
    if state.phase is Phase.STOPPING and state.incident is not None and (state.faults or state.lost):
        return _explained(state, event)
    return state, []


def _explained(state: JobState, event: OtherNodesLost) -> tuple[JobState, list[Command]]:
    """The workers failed for it before it was known, or more nodes are lost than were known."""
    assert state.incident is not None
    incident = _of_loss(state.incident, event.reason, state.faults)
    lost = replace(state, lost=event.reason, summons=event.reason, counts_as_restart=True, faults=(), incident=incident)
    return lost, [Tell(reason=event.reason)]


def known_late(state: JobState, reason: str) -> Incident | None:
    """Return the open incident as that of lost nodes, which nobody could know of before all met again."""
    incident = state.incident
    are_consequences = bool(state.faults) and all(fault.is_consequence for fault in state.faults)
    if incident is None or not reason or state.lost or not are_consequences or incident.action != "restart":
        return incident
    return _of_loss(incident, reason, state.faults)


def _of_loss(incident: Incident, reason: str, faults: tuple[Fault, ...]) -> Incident:
    """Return the incident of workers that failed as one of the nodes whose loss made them fail."""
    return replace(
        incident,
        rank=None,
        status=Status.LOST_CONNECTION.value,
        severity=int(Severity.SEV1),
        reason=reason,
        exit_code=None,
        exception_type=None,
        message=None,
        location=None,
        stack=None,
        step=None,
        consequences=tuple(dict.fromkeys((*incident.consequences, *(fault.reason for fault in faults)))),
    )


def follows(state: JobState, fault: Fault) -> JobState | None:
    """Return the fault as a consequence of nodes that are lost; None if it is none."""
    if not state.lost or state.incident is None or state.faults or not fault.is_consequence:
        return None
    return replace(state, incident=replace(state.incident, consequences=(*state.incident.consequences, fault.reason)))


def ended(state: JobState, at: float, action: str, decision: str) -> tuple[JobState, list[Command]]:
    """The workers have ended, and it is decided what comes next: that is recorded, if nodes are lost."""
    if not state.lost or state.incident is None:
        return state, []
    incident = replace(state.incident, stopped_at=at, action=action, decision=decision)
    return replace(state, incident=None if action == "fail" else incident), [RecordIncident(incident=incident)]


ENDS = "The others go on without this node, which they took for lost: its workers end."
JOINS_AGAIN = "This node joins the others again."


def is_left_out(state: JobState, before: World | None) -> bool:
    """Return whether ``before`` had a worker of this node that trains, and the present world has not."""
    if before is None or state.world is None:
        return False
    trains = [name_of(state, worker) for worker in state.running if worker.part is Part.MEMBER]
    return any(before.rank_of(name) is not None and state.world.rank_of(name) is None for name in trains)


def do_others_go_on(state: JobState) -> bool:
    """Return whether others that took this node for lost would go on in place, as far as it is known here."""
    return is_anyone_elsewhere(state) and is_in_place(state)


def begin_anew(state: JobState, at: float, reason: str = "") -> tuple[JobState, list[Command]]:
    """End the workers here at once, to meet the other nodes again; ``reason`` says why this node was taken for lost."""
    reason = f"{reason} {ENDS}".strip()
    state = replace(state, summons=JOINS_AGAIN, counts_as_restart=False, is_left_out=True)
    return end_at_once(state, at, reason)
