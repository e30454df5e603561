"""A node that leaves its job: out of the rendezvous, which goes on without it, and into quarantine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from unicron_elastic.base.quarantine import LAUNCHER, Quarantined, sentence
from unicron_elastic.launcher.agent.core.quarantine_file import QuarantineFileError, add, default_path, find
from unicron_elastic.launcher.config.forwarded import PLANNED_JOB, environment
from unicron_elastic.recovery.commands import AskToLeave, LeaveJob

if TYPE_CHECKING:
    from unicron_elastic.compat.agent import WorkerSpec
    from unicron_elastic.rendezvous.job.job_rendezvous import JobRendezvous


def why_stay(handler: JobRendezvous, nodes: int) -> str:
    """Why the job of this rendezvous, of ``nodes`` now, cannot go on without this one; "" if it can.

    It follows "The node stays: ".
    """
    if nodes == 1:
        return "it is the only node of the job."
    return handler.why_stay(nodes)


def why_not_now(handler: JobRendezvous, nodes: int, command: AskToLeave) -> str:
    """Answer as ``why_stay``; but of nodes that would leave at one moment only as many may as the job can spare."""
    if why := why_stay(handler, nodes):
        return why
    if not command.is_departure:
        return handler.take_leave(nodes)
    return handler.depart(nodes, command.reason, command.have_state)


def offer_job(handler: JobRendezvous, spec: WorkerSpec, argv: Sequence[str], say: Callable[[str], None]) -> None:
    """Lets spare nodes of the cluster know what this job runs, where its rendezvous can tell them."""
    if not argv or os.environ.get(PLANNED_JOB):
        return  # a planned job gets its nodes by the plan
    try:
        handler.offer_job(argv, os.getcwd(), environment(), spec.local_world_size)
    except ValueError as error:
        say(f"Spare nodes of the cluster cannot run this job: {error}.")


def leave(handler: JobRendezvous, node: str, command: LeaveJob, say: Callable[[str], None]) -> None:
    """Takes the node out of the rendezvous and puts it on the list; what cannot be done is said."""
    now = time.time()
    until = None if command.quarantine_s is None else now + command.quarantine_s
    entry = Quarantined(node=node, reason=command.reason, since=now, until=until, by=LAUNCHER, is_broken=True)
    why_not = handler.keep_out(entry) if handler.is_of_cluster else ""
    if why_not:
        say(f"This node could not be put into the cluster's quarantine: {why_not}")
    handler.leave()
    if handler.is_of_cluster and not why_not:
        say(f"This node is in the cluster's quarantine now: `unicron undrain {node}` ends that.")
        return
    path = default_path()
    try:
        add(path, entry)
    except QuarantineFileError as error:
        say(f"This node could not be put into quarantine: {error}")
    else:
        say(f"This node is in quarantine now: `unicron quarantine lift {node}` ends that.")


def why_kept_out(node: str, say: Callable[[str], None]) -> str:
    """Why this node should not join a job, as a sentence; "" if nothing speaks against it.

    A list that cannot be read is told to ``say`` and keeps nobody out: it must not stop every job of a cluster.
    """
    now = time.time()
    try:
        entry = find(default_path(), node, now)
    except QuarantineFileError as error:
        say(f"it is not known whether this node is in quarantine: {error}.")
        return ""
    return "" if entry is None else sentence(entry, now, lambda seconds: datetime.fromtimestamp(seconds).astimezone())
