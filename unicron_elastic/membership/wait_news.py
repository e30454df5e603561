"""What people hear of a node that waits for others: who is there, and how many are to be. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from unicron_elastic.membership.rounds import JobView, NotYet, Settings

SILENT_S = 2.0  # at first, and between two sentences
_NAMES_MOST = 16


class WaitNews:
    """`WaitNews` says who is there once a wait has lasted a moment, and again when others come or go.

    ``is_shared``: what all nodes say comes to one place, so that one of them is to say it.
    """

    def __init__(self, settings: Settings, now: float, *, node_id: str, is_shared: bool = False) -> None:
        self._settings, self._node_id, self._is_shared = settings, node_id, is_shared
        self._silent_until = now + SILENT_S
        self._told: list[str] | None = None

    def sentence(self, view: JobView, now: float, decided: NotYet | None = None) -> str:
        """Return what is to be said of ``view`` at this moment, of which no round can be made yet; "" for nothing.

        ``decided``: why not, where that is known.
        """
        hosts = sorted(member.host for member in view.waiting)
        is_others_turn = self._is_shared and view.waiting[:1] and view.waiting[0].node_id != self._node_id
        if view.training or not hosts or now < self._silent_until or hosts == self._told or is_others_turn:
            return ""
        self._silent_until, self._told = now + SILENT_S, hosts
        settings = self._settings
        if decided is not None and decided.is_for_safety and decided.again_in_s is not None:
            return (
                f"{decided.reason} So the next round begins in {decided.again_in_s:.0f} s, with {len(hosts)} "
                f"node{'s' * (len(hosts) != 1)} at present; a shorter --rdzv-conf blind_patience is waited for less."
            )
        most = settings.most if settings.expected_nodes is None else min(settings.most, settings.expected_nodes)
        return who_is_here(hosts, settings.min_nodes, most)


def who_is_here(hosts: Sequence[str], least: int, most: int) -> str:
    """Say which of ``least`` to ``most`` nodes have come; "" if all have."""
    named = ", ".join(hosts[:_NAMES_MOST])
    more = f" and {len(hosts) - _NAMES_MOST} more" if len(hosts) > _NAMES_MOST else ""
    if len(hosts) < least:
        return f"{len(hosts)} of {least} nodes are here: {named}{more}."
    if len(hosts) < most:
        enough = f"{least} would be enough" if least < len(hosts) else "which is enough"
        return f"{len(hosts)} of up to {most} nodes are here, {enough}: {named}{more}."
    return ""


def who_waits(place: str, rank: int, nodes: int) -> str:
    """Say for whom a node waits where all have a rank from the start, and one of them the ``place`` where they meet."""
    others = f"the other {nodes - 1} of {nodes} nodes" if nodes > 2 else "the other node"
    if rank == 0:
        return f"This node, of rank 0, waits for {others} at {place}."
    return f"This node, of rank {rank}, waits for that of rank 0 at {place}, and until all {nodes} are there."
