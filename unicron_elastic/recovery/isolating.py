"""A node that is suspected or broken where the others can go on in place: it leaves as one does that is well.

It asks, the others make a world without its workers, and only then these end: nobody begins again for it. All that sets
it apart from a node that is recalled is the quarantine.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.faults import Fault, RootCause, Severity
from unicron_elastic.recovery.commands import AskToLeave, Command, RecordIncident, Tell
from unicron_elastic.recovery.ladder import Rung
from unicron_elastic.recovery.members import is_anyone_elsewhere, nodes_elsewhere
from unicron_elastic.recovery.node import LEAVES, leave_job
from unicron_elastic.recovery.policy import Verdict
from unicron_elastic.recovery.records import open_incident
from unicron_elastic.recovery.state import Departure, JobState, Phase, Recall, RecallStage

METHOD = "process supervision"


def why_not_ask(state: JobState, why_begin_again: str) -> str:
    """Return why this node stays without being asked for more, as a sentence; "" if it is worth asking.

    ``why_begin_again`` says why the others could not go on in place without it; "" if they could.
    """
    if not state.policy.isolates:
        return "--unicron-on-fault is observe."
    if not is_anyone_elsewhere(state):
        return state.why_stay or "no other node has the training state yet."
    if why_begin_again:
        return "without it the others could not go on in place."
    return "" if state.recall is None else f"it cannot leave yet. {state.recall.reason}"


def ask(
    state: JobState, cause: RootCause, rung: Rung, stays: Verdict, otherwise: Fault | None = None
) -> tuple[JobState, list[Command]]:
    """Have it found out whether this node may leave; ``stays`` is the verdict that holds if it must not.

    ``otherwise``: for this fault all begin again if it must stay.
    """
    leaves = replace(stays, restart=False, isolate=True, reason=f"{rung.reason} {LEAVES}".strip())
    is_broken = cause.fault.severity is Severity.SEV1 and otherwise is None
    why = rung.reason or cause.reason
    departure = Departure(cause=cause, reason=why, leaves=leaves, stays=stays, is_broken=is_broken, otherwise=otherwise)
    recall = Recall(reason=f"Node {state.host} leaves the job: {why}", stage=RecallStage.ASKS, departure=departure)
    asks = AskToLeave(reason=recall.reason, is_departure=True, have_state=nodes_elsewhere(state))
    return replace(state, recall=recall), [asks]


def must_stay(state: JobState, departure: Departure, why: str) -> tuple[JobState, list[Command]]:
    """Go on as it was decided before this node asked."""
    return replace(state, recall=None), [Tell(reason=f"{departure.reason} The node stays: {why}")]


def may_leave(state: JobState, departure: Departure, at: float) -> tuple[JobState, list[Command]]:
    """Record that this node leaves; its workers' next step closes the incident no more."""
    commands: list[Command] = []
    if departure.otherwise is not None:  # of which nothing was told yet
        state, superseded = open_incident(state, departure.otherwise, at, METHOD)
        commands += [] if superseded is None else [RecordIncident(incident=superseded)]
    assert state.incident is not None  # of the loss for which it asked
    incident = replace(state.incident, action=departure.leaves.action, decision=departure.leaves.reason)
    commands += [RecordIncident(incident=incident), Tell(reason=departure.leaves.reason)]
    return replace(state, incident=None), commands


def left(state: JobState, departure: Departure) -> tuple[JobState, list[Command]]:
    """Take this node out of the job: its workers have ended."""
    state = replace(state, phase=Phase.FINISHED, incident=None, recall=None)
    return state, [leave_job(departure, f"{departure.reason} It has left the job.")]
