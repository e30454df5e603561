"""A node that leaves its job: out of the rendezvous, which goes on without it, and into quarantine."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from unicron_elastic.launcher import quarantine
from unicron_elastic.launcher.cluster.lending import environment
from unicron_elastic.recovery.commands import AskToLeave, LeaveJob
from unicron_elastic.recovery.quarantine import LAUNCHER, Quarantined, sentence

if TYPE_CHECKING:
    from unicron_elastic.compat.agent import WorkerSpec


def why_stay(handler: Any, nodes: int) -> str:
    """Why the job of this torch RendezvousHandler, of ``nodes`` now, cannot go on without this one; "" if it can.

    It follows "The node stays: ".
    """
    if nodes == 1:
        return "it is the only node of the job."
    if not hasattr(handler, "why_stay"):
        return f"torch's {handler.get_backend()} rendezvous cannot be left."
    return str(handler.why_stay(nodes))


def why_not_now(handler: Any, nodes: int, command: AskToLeave) -> str:
    """As ``why_stay``, but among nodes that would leave at the same moment only as many may as the job can spare."""
    if why := why_stay(handler, nodes):
        return why
    if not command.is_departure:
        return str(handler.take_leave(nodes))
    if not hasattr(handler, "depart"):
        return "only where --rdzv-backend is unicron the others could go on in place without it."
    return str(handler.depart(nodes, command.reason, command.have_state))


def node_name() -> str:
    """What this node is called in incidents and in the quarantine: UNICRON_NODE_NAME, else its host name."""
    return os.environ.get("UNICRON_NODE_NAME", "").strip() or socket.gethostname()


def offer_job(spec: WorkerSpec, argv: Sequence[str], say: Callable[[str], None]) -> None:
    """Lets spare nodes of the cluster know what this job runs, where its rendezvous can tell them."""
    if not argv or not hasattr(spec.rdzv_handler, "offer_job") or os.environ.get("UNICRON_PLANNED_JOB"):
        return  # a planned job gets its nodes by the plan
    try:
        spec.rdzv_handler.offer_job(argv, os.getcwd(), environment(), spec.local_world_size)
    except ValueError as error:
        say(f"Spare nodes of the cluster cannot run this job: {error}.")


def leave(handler: Any, node: str, command: LeaveJob, say: Callable[[str], None]) -> None:
    """Takes the node out of the rendezvous and puts it on the list; what cannot be done is said."""
    now = time.time()
    until = None if command.quarantine_s is None else now + command.quarantine_s
    entry = Quarantined(node=node, reason=command.reason, since=now, until=until, by=LAUNCHER)
    is_of_cluster = hasattr(handler, "keep_out")
    why_not = handler.keep_out(entry) if is_of_cluster else ""
    if why_not:
        say(f"This node could not be put into the cluster's quarantine: {why_not}")
    if hasattr(handler, "leave"):
        handler.leave()
    if is_of_cluster and not why_not:
        say(f"This node is in the cluster's quarantine now: `unicron undrain {node}` ends that.")
        return
    path = quarantine.default_path()
    try:
        quarantine.add(path, entry)
    except quarantine.QuarantineFileError as error:
        say(f"This node could not be put into quarantine: {error}")
    else:
        say(f"This node is in quarantine now: `unicron quarantine lift {node}` ends that.")


def why_kept_out(node: str, say: Callable[[str], None]) -> str:
    """Why this node should not join a job, as a sentence; "" if nothing speaks against it.

    A list that cannot be read is told to ``say`` and keeps nobody out: it must not stop every job of a cluster.
    """
    now = time.time()
    try:
        entry = quarantine.find(quarantine.default_path(), node, now)
    except quarantine.QuarantineFileError as error:
        say(f"it is not known whether this node is in quarantine: {error}.")
        return ""
    return "" if entry is None else sentence(entry, now, lambda seconds: datetime.fromtimestamp(seconds).astimezone())
