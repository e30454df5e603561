"""Jobs that nobody plans: an idle node of the cluster helps those that have fewer nodes than they want."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from unicron_elastic.launcher.config.forwarded import OF_SUBMISSION
from unicron_elastic.launcher.view.cluster.members import JobListing, cluster_view
from unicron_elastic.rendezvous.cluster.node import ClusterNode
from unicron_elastic.rendezvous.records.cluster import UnplannedJobSpec
from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.rendezvous.store.interface import Snapshot, Store

AVOID_S = 60.0  # a job that could not be started here
READ_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Claim:
    """A place in a job, held by a key until this node is a member."""

    run_id: str
    spec: UnplannedJobSpec
    key: str
    at: float


class Spare:
    """What one node does about it. For one thread."""

    def __init__(self, node: ClusterNode, host: str, address: str, say: Callable[[str], None]) -> None:
        """``address`` is where other nodes find this one; "" leaves that to unicron-run."""
        self._node = node
        self._host = host
        self._address = address
        self._say = say
        self._avoided: dict[str, float] = {}  # until when, by job

    def claim(self, store: Store) -> Claim | None:
        """A place in a job that needs this node, if there is one. Raises StoreError."""
        if self._node.why_kept_out():
            return None
        seen = store.read_prefix("", timeout_s=READ_TIMEOUT_S)
        jobs, now = cluster_view(seen).jobs, time.monotonic()
        for run_id, spec, missing in needed(jobs, _claims(seen, jobs)):
            if self._avoided.get(run_id, now) > now:
                continue
            for number in range(missing):
                key = JobKeys(run_id).claim(number)
                if self._node.claim(key):
                    wants = f"fewer nodes than the {spec.target_nodes} it wants"
                    self._say(f"The job {run_id!r} has {wants}: this node joins it.")
                    return Claim(run_id, spec, key, now)
        return None

    def command(self, claim: Claim) -> list[str]:
        """The job's own command line, on this node."""
        address = ["--local-addr", self._address] if self._address else []
        return [sys.executable, "-m", "unicron_elastic.launcher.main", *address, *claim.spec.argv]

    def environment(self, claim: Claim) -> dict[str, str]:
        """Its variables."""
        own = {"UNICRON_NODE_NAME": self._host, "UNICRON_AGENT_PID": str(os.getpid())}
        # Whom to ask and who to be, this node knows itself: its password is not for a place that a job names.
        etcd = {name: value for name, value in os.environ.items() if name.startswith("UNICRON_ETCD_")}
        told = {**os.environ, **claim.spec.env, **etcd, **own}
        return {name: value for name, value in told.items() if name not in OF_SUBMISSION}

    def joined(self, claim: Claim) -> None:
        """This node is a member now: its place is no longer claimed."""
        self._node.give_up(claim.key)

    def ended(self, claim: Claim, *, is_well: bool) -> None:
        """Its part of the job is over; a job that could not be started here is not tried again at once."""
        self._node.give_up(claim.key)
        if not is_well and time.monotonic() - claim.at < AVOID_S:
            self._avoided[claim.run_id] = time.monotonic() + AVOID_S


def _claims(seen: Snapshot, jobs: Iterable[JobListing]) -> dict[str, int]:
    return {job.run_id: len(seen.under(JobKeys(job.run_id).claims).entries) for job in jobs}


def needed(jobs: Iterable[JobListing], claims: Mapping[str, int]) -> list[tuple[str, UnplannedJobSpec, int]]:
    """Jobs that have fewer nodes than they want, with their spec and how many are missing; the neediest first.

    ``claims`` has how many spares are on their way to a job. A job without any node is left alone: nobody waits there.
    """
    found = []
    for job in jobs:
        if job.spec is None or not job.view.members or job.is_over or job.cancelled:
            continue
        missing = job.spec.target_nodes - len(job.view.members) - claims.get(job.run_id, 0)
        if missing > 0:
            found.append((job.run_id, job.spec, missing))
    return sorted(found, key=lambda each: (-each[2], each[0]))
