"""Nodes that wait to join, or that are well and depart: the nodes meet while the workers go on, or all begin again.

Nobody is disturbed for that who has made its last step: its evaluation is its own, and its script may end after it, or
train on. So nodes wait until all workers here train once more, or have ended.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.base.text import counted
from unicron_elastic.recovery import storms
from unicron_elastic.recovery.commands import Command, HoldJoins, MeetNodes, Tell, WakeAt
from unicron_elastic.recovery.events import MembershipChanged, NodesDepart
from unicron_elastic.recovery.state import JobState, Join, Phase, has_anyone_parted
from unicron_elastic.recovery.stopping import summon
from unicron_elastic.recovery.worker_loss import is_in_place, why_not_in_place

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
