"""A node that is wanted elsewhere, or drained: it leaves as soon as its job can spare it, and nobody counts that.

It asks before it stops anything. Where workers can go on in place it asks when a step has just ended; the other nodes
hear that it may go, make a world without its members, and only then its workers end. Elsewhere the others stop theirs
as they do for a node that joins, a moment later it does, and they meet again without it.

Those that stay meet while their workers go on, or have all begin again; and so they do for nodes that wait to join.
Nobody is disturbed for that who has made its last step: its evaluation is its own, and its script may end after it, or
train on. So nodes wait until all workers here train once more, or have ended.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.base.text import counted
from unicron_elastic.recovery import node, storms
from unicron_elastic.recovery.commands import (
    AskToLeave,
    AwaitStep,
    ChangeWorld,
    Command,
    DepartWell,
    HoldJoins,
    MeetNodes,
    RecordIncident,
    Tell,
    WakeAt,
)
from unicron_elastic.recovery.events import LeaveAnswered, MembershipChanged, NodeRecalled, NodesDepart, StepEnded
from unicron_elastic.recovery.state import (
    JobState,
    Join,
    Phase,
    Recall,
    RecallStage,
    has_anyone_parted,
    is_anyone_elsewhere,
    members_of,
    nodes_elsewhere,
)
from unicron_elastic.recovery.stopping import stop, summon
from unicron_elastic.recovery.worker_loss import is_in_place, why_not_in_place

LEAVES_IT_GOES_ON = "This node leaves the job, which goes on."
ASK_AGAIN_S = 1.0  # after it had to stay, although nothing was heard to have changed
STOP_AFTER_S = 1.0  # the others stop first, also who hears of it late; what fails for that here is told to nobody
LEFT_OUT_WITHIN_S = 2.0  # so long the others have to make a world without its members, before these end all the same


def node_recalled(state: JobState, event: NodeRecalled) -> tuple[JobState, list[Command]]:
    """Books that this node is wanted elsewhere or drained, or not any more, and begins to leave if it can."""
    recall = state.recall
    if state.leaves or (recall is None and not event.reason):
        return state, []
    if not event.reason:
        was = "kept out" if recall is not None and recall.is_drained else "recalled"
        return replace(state, recall=None), [Tell(reason=f"This node is not {was} any more: it stays.")]
    state = replace(state, why_stay=event.why_stay)
    if recall is not None and recall.stage is not RecallStage.STAYS:  # it finds out soon
        return replace(state, recall=replace(recall, reason=event.reason, is_drained=event.is_drained)), []
    told = "" if recall is None else recall.why_stay
    booked = Recall(reason=event.reason, is_drained=event.is_drained, why_stay=told)
    return _begin(replace(state, recall=booked), event.at)


def step_ended(state: JobState, event: StepEnded) -> tuple[JobState, list[Command]]:
    """Asks whether this node may leave: now the least work is lost."""
    recall = state.recall
    if recall is None or recall.stage is not RecallStage.STEPS or state.phase is not Phase.RUNNING:
        return state, []
    why_not = _why_not_now(state)
    return _stay(state, why_not, event.at) if why_not else _ask(state)


def answered(state: JobState, event: LeaveAnswered) -> tuple[JobState, list[Command]]:
    """Leaves when the others have had a moment, or asks again later."""
    recall = state.recall
    if recall is None or recall.stage is not RecallStage.ASKS:
        return state, []
    departure = recall.departure
    if event.why_not and departure is not None:
        return node.must_stay(state, departure, event.why_not)
    if event.why_not:
        return _stay(state, event.why_not, event.at)
    patience_s = LEFT_OUT_WITHIN_S if is_in_place(state) else STOP_AFTER_S
    recall = replace(recall, stage=RecallStage.LEAVES, act_at=event.at + patience_s)
    others = "the others go on in their processes." if is_in_place(state) else "the others' workers restart without it."
    leaves = f"{recall.reason} {LEAVES_IT_GOES_ON.rstrip('.')}: {others}"
    state, said = replace(state, recall=recall), list[Command]([Tell(reason=leaves)])
    if departure is not None:
        state, said = node.leave_alone(state, departure, event.at)
    if is_left_out(state):  # its workers are newcomers, whom nobody misses
        state, commands = end_workers(state, event.at)
        return state, [*said, *commands]
    return state, [*said, WakeAt(at=event.at + patience_s)]


def act_if_due(state: JobState, at: float) -> tuple[JobState, list[Command]] | None:
    """What a node that is to leave does at this time; None: nothing, and it goes on with all else."""
    recall = state.recall
    if recall is None or state.phase is not Phase.RUNNING:
        return None
    if recall.stage is RecallStage.LEAVES:  # it meets nobody any more
        return end_workers(state, at) if recall.act_at is None or at >= recall.act_at else (state, [])
    if recall.stage is RecallStage.STAYS and recall.act_at is not None and at >= recall.act_at:
        return _begin(state, at)
    return None


def is_left_out(state: JobState) -> bool:
    """Whether the others train without this node, which leaves."""
    is_of_world = state.world is not None and any(member.node == state.node for member in state.world.members)
    return state.leaves and state.phase is Phase.RUNNING and state.world is not None and not is_of_world


def end_workers(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Ends the workers of a node that leaves."""
    assert state.recall is not None
    recall = replace(state.recall, act_at=None)
    state = replace(state, recall=recall, summons=recall.reason, counts_as_restart=False)
    return stop(state, at, f"{recall.reason} Its workers end.")


def left(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """What is done when the workers of a node that leaves have ended."""
    assert state.recall is not None
    if state.recall.departure is not None:
        return node.has_left_alone(state, state.recall.departure)
    if state.leaving is not None:
        return node.has_left_broken(state, at)
    reason, is_drained = f"{state.recall.reason} It has left the job.", state.recall.is_drained
    incident, commands = state.incident, list[Command]()
    if incident is not None and incident.action:  # else it is what its workers failed of because it leaves
        commands.append(RecordIncident(incident=replace(incident, left=reason)))
    state = replace(state, phase=Phase.FINISHED, incident=None, recall=None)
    return state, [*commands, DepartWell(reason=reason, is_drained=is_drained)]


def go_on_without(state: JobState, event: NodesDepart) -> tuple[JobState, list[Command]] | None:
    """Leaves out the members of nodes that leave; None if all workers here have to begin again."""
    world = state.world
    if world is None or not is_in_place(state):
        return None
    lost = members_of(world, event.nodes)
    if len(lost) == world.size:
        return None
    if not lost:
        return state, []
    left = world.size - len(lost)
    who = "it" if len(event.nodes) == 1 else "them"
    reason = f"{event.reason} {counted(left, 'rank goes', 'ranks go')} on without {who}."
    return replace(state, broke=None), [ChangeWorld(lost=lost, restarts_used=state.restarts_used, reason=reason)]


def _begin(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Waits for the end of a step, or asks at once where that saves no work."""
    recall = state.recall
    if recall is None or state.phase is not Phase.RUNNING:
        return state, []
    why_not = _why_not_now(state)
    if why_not:
        return _stay(state, why_not, at)
    if not is_in_place(state):
        return _ask(state)
    state = replace(state, recall=replace(recall, stage=RecallStage.STEPS, act_at=None))
    return state, [AwaitStep(reason=recall.reason)]


def _why_not_now(state: JobState) -> str:
    """Why this node cannot leave at this moment, as far as it is known here; "" if it may ask."""
    if any(worker.exit_code == 0 and worker.told_to_stop_at is None for worker in state.workers):
        return "its part of the job is ending."
    if has_anyone_parted(state):
        return "the training is over."
    if state.recall is not None and state.recall.is_drained and not state.policy.isolates:
        return "--unicron-on-fault is observe."
    if is_in_place(state) and not is_anyone_elsewhere(state):
        return "no other node has the training state yet."
    return state.why_stay


def _ask(state: JobState) -> tuple[JobState, list[Command]]:
    assert state.recall is not None
    recall = replace(state.recall, stage=RecallStage.ASKS, act_at=None)
    others = nodes_elsewhere(state) if is_in_place(state) else ()
    return replace(state, recall=recall), [AskToLeave(reason=recall.reason, is_departure=True, have_state=others)]


def _stay(state: JobState, why: str, at: float) -> tuple[JobState, list[Command]]:
    """Says why, once, and asks again later."""
    assert state.recall is not None
    told, ask_at = state.recall.why_stay, at + ASK_AGAIN_S
    recall = replace(state.recall, stage=RecallStage.STAYS, why_stay=why, act_at=ask_at)
    said: list[Command] = [] if why == told else [Tell(reason=f"{recall.reason} The node stays: {why}")]
    return replace(state, recall=recall), [*said, WakeAt(at=ask_at)]


JOIN_DELAY_S = 0.2  # more than nodes take to hear the same word, from a watch or at intervals of 0.1 s
HELD = "let in when all workers train again, as they have made their last step for now."


def nodes_join(state: JobState, event: MembershipChanged) -> tuple[JobState, list[Command]]:
    """Book that nodes wait to join."""
    why = f"{counted(event.nodes_waiting, 'node waits', 'nodes wait')} to join"
    return _wait(state, Join(more=event.nodes_waiting, why=why), event.at)


def node_departs(state: JobState, event: NodesDepart) -> tuple[JobState, list[Command]]:
    """Book that nodes depart without which the workers here cannot go on in place."""
    return _wait(state, Join(more=-len(event.nodes), why=event.reason), event.at)


def meet_if_due(state: JobState, at: float) -> tuple[JobState, list[Command]] | None:
    """Have the nodes meet if it is time, in place or with new workers; None if there is nothing to do now."""
    join = state.join
    if join is None or join.at is None or at < join.at or state.phase is not Phase.RUNNING:
        return None
    if has_anyone_parted(state):
        return _hold(state, join)
    why_begin_again = why_not_in_place(state, join.more)
    if why_begin_again or not is_in_place(state):
        local_ranks = [worker.local_rank for worker in state.workers]
        if (start_at := storms.may_start_at(state, local_ranks, at)) > at:
            often = f"the workers go on for {start_at - at:.0f} s, {storms.why_later(state, local_ranks, at)}."
            said = Tell(reason=f"{join.why}: {often}" if join.more > 0 else f"{join.why} {often.capitalize()}")
            return replace(state, join=replace(join, at=start_at)), [said, WakeAt(at=start_at)]
        return summon(state, at, reason_to_begin_again(join, why_begin_again), counts=False)
    # A recall is told again in the new round, if there still is one.
    met = replace(state, join=None, recall=None, gone=frozenset())
    what = "the nodes meet, and the workers go on."
    return met, [MeetNodes(reason=f"{join.why}: {what}" if join.more > 0 else f"{join.why} {what.capitalize()}")]


def reason_to_begin_again(join: Join, why: str = "") -> str:
    """Return why all workers begin again with other nodes; ``why``: why they cannot go on in place."""
    if join.more < 0:
        who = "it" if join.more == -1 else "them"
        return f"{join.why} {why or f'All workers restart without {who}.'}"
    return f"{join.why}. {why}" if why else f"{join.why}: all workers restart with the new membership."


def trains_again(state: JobState, at: float) -> tuple[JobState, list[Command]]:
    """Let nodes in that were held up, if all workers train again."""
    join = state.join
    if join is None or join.at is not None or has_anyone_parted(state) or state.phase is not Phase.RUNNING:
        return state, []
    join_at = at + JOIN_DELAY_S
    return replace(state, join=replace(join, at=join_at)), [HoldJoins(reason=""), WakeAt(at=join_at)]


def _wait(state: JobState, join: Join, at: float) -> tuple[JobState, list[Command]]:
    """Go on for a moment, until all nodes have heard of it: who stops makes the workers of the others fail."""
    if state.phase is not Phase.RUNNING:
        return state, []
    if state.join is not None:
        return _count_more(state, state.join, join)
    if has_anyone_parted(state):
        return _hold(state, join)
    join_at = at + JOIN_DELAY_S
    return replace(state, join=replace(join, at=join_at)), [WakeAt(at=join_at)]


def _count_more(state: JobState, before: Join, join: Join) -> tuple[JobState, list[Command]]:
    """Count those who have come to wait as well: whether workers can go on in place depends on how many there are."""
    if not join.more > before.more > 0:
        return state, []
    if before.at is None:
        return _hold(state, join)
    return replace(state, join=replace(join, at=before.at)), []


def _hold(state: JobState, join: Join) -> tuple[JobState, list[Command]]:
    held = f"{'it is' if join.more == 1 else 'they are'} {HELD}"
    reason = f"{join.why}: {held}" if join.more > 0 else f"{join.why} The workers go on."
    return replace(state, join=replace(join, at=None)), [HoldJoins(reason=reason)]
