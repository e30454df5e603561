"""A node that lives although the others took it for lost: its lease had run out, or nobody could reach it for a while.

They go on in place without it, and count that. So its workers have nobody to train with: they end, and the node comes
back as any newcomer does, by a meeting of all nodes, after which nobody takes it for lost any more.
"""

from __future__ import annotations

from dataclasses import replace

from unicron_elastic.recovery.commands import Command
from unicron_elastic.recovery.losses import is_in_place
from unicron_elastic.recovery.members import is_anyone_elsewhere, name_of
from unicron_elastic.recovery.state import JobState, Part
from unicron_elastic.recovery.stopping import end_at_once
from unicron_elastic.world import World

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
