"""A spare node: no job of its own, until some job of the cluster has fewer nodes than it wants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from unicron_elastic.launcher.cluster_view import ClusterView, JobStatus, read_cluster
from unicron_elastic.rendezvous.cluster_node import ClusterNode
from unicron_elastic.rendezvous.cluster_records import JobSpec
from unicron_elastic.rendezvous.job_records import JobKeys
from unicron_elastic.rendezvous.store import Store, StoreError

__all__ = ["Spare", "needed"]

LOOK_S = 0.25
AVOID_S = 60.0  # a job that could not be started here
READ_TIMEOUT_S = 2.0


class Spare:
    """Runs until ``stop``."""

    def __init__(
        self, node: ClusterNode, open_store: Callable[[], Store], host: str, address: str, say: Callable[[str], None]
    ) -> None:
        """``address`` is where other nodes find this one; "" leaves that to unicron-run."""
        self._node = node
        self._open_store = open_store
        self._host = host
        self._address = address
        self._say = say
        self._stopped = threading.Event()
        self._avoided: dict[str, float] = {}  # until when, by job
        self._child: subprocess.Popen[bytes] | None = None
        self._blind = ""

    def stop(self) -> None:
        """Ends it soon; what runs here is told by SIGTERM. From a signal's handler as well."""
        self._stopped.set()
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)

    def run(self) -> None:
        """Waits for jobs and runs them. Raises StoreError if the cluster cannot be reached at the start."""
        with self._open_store() as store:
            while not self._stopped.wait(LOOK_S):
                try:
                    found = self._take(store)
                except StoreError as error:
                    self._tell_blind(str(error))
                    continue
                self._tell_blind("")
                if found is not None:
                    self._serve(store, *found)

    def _take(self, store: Store) -> tuple[str, JobSpec, str] | None:
        """A job that needs this node, and the key of the claim to it."""
        if self._node.why_kept_out():
            return None
        view = read_cluster(store, lambda: READ_TIMEOUT_S)
        now = time.monotonic()
        for run_id, spec, missing in needed(view.jobs, _claims(store, view)):
            if self._avoided.get(run_id, now) > now:
                continue
            for number in range(missing):
                key = JobKeys(run_id).claim(number)
                if self._node.claim(key):
                    return run_id, spec, key
        return None

    def _serve(self, store: Store, run_id: str, spec: JobSpec, claim: str) -> None:
        """Runs this node's part of the job to its end."""
        self._say(f"The job {run_id!r} has fewer nodes than the {spec.target_nodes} it wants: this node joins it.")
        began_at = time.monotonic()
        self._node.hide()
        try:
            code = self._run_child(store, run_id, spec, claim)
        except OSError as error:
            code = None
            self._say(f"The job {run_id!r} cannot run here: {error}.")
        finally:
            self._node.give_up(claim)
            self._node.show()
        if code is not None:
            self._say(f"This node's part of the job {run_id!r} has ended with exit code {code}: it is a spare again.")
        if code != 0 and time.monotonic() - began_at < AVOID_S:
            self._avoided[run_id] = time.monotonic() + AVOID_S

    def _run_child(self, store: Store, run_id: str, spec: JobSpec, claim: str) -> int:
        address = ["--local-addr", self._address] if self._address else []
        command = [sys.executable, "-m", "unicron_elastic.launcher.main", *address, *spec.argv]
        env = {**os.environ, **spec.env, "UNICRON_NODE_NAME": self._host}
        self._child = subprocess.Popen(command, cwd=spec.cwd, env=env)
        if self._stopped.is_set():
            self._child.send_signal(signal.SIGTERM)
        has_joined = False
        while (code := self._wait(self._child)) is None:
            if not has_joined and self._is_member(store, run_id):
                has_joined = True
                self._node.give_up(claim)
        self._child = None
        return code

    @staticmethod
    def _wait(child: subprocess.Popen[bytes]) -> int | None:
        try:
            return child.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            return None

    def _is_member(self, store: Store, run_id: str) -> bool:
        try:
            view = read_cluster(store, lambda: READ_TIMEOUT_S)
        except StoreError:
            return False
        members = (member for job in view.jobs if job.run_id == run_id for member in job.view.members)
        return any(member.host == self._host for member in members)

    def _tell_blind(self, reason: str) -> None:
        if bool(reason) != bool(self._blind):
            self._say(f"The cluster's store cannot be seen: {reason}." if reason else "It can be seen again.")
        self._blind = reason


def _claims(store: Store, view: ClusterView) -> dict[str, int]:
    prefixes = {job.run_id: JobKeys(job.run_id).claims for job in view.jobs}
    return {run_id: len(store.read_prefix(prefix).entries) for run_id, prefix in prefixes.items()}


def needed(jobs: Iterable[JobStatus], claims: Mapping[str, int]) -> list[tuple[str, JobSpec, int]]:
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
