"""What the agent of a node reads and writes of nodes and jobs that are planned. All of it may raise StoreError."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

from unicron_elastic.base.quarantine import is_active, why_out
from unicron_elastic.planning.coordinate.agent import EndJob
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.planning.model.jobs import JobSpec
from unicron_elastic.rendezvous.records.cluster import parse_quarantined, quarantine_key
from unicron_elastic.rendezvous.records.job import REASON_CHARACTERS, JobKeys
from unicron_elastic.rendezvous.records.plan import PhaseRecord, parse_node_status, parse_phase, parse_spec, phase_text
from unicron_elastic.rendezvous.records.plan_keys import NODE_RECORDS, PlannedJobKeys
from unicron_elastic.rendezvous.store.interface import MAX_OPERATIONS, Entry, Put, Snapshot, Store, StoreError

NAME_S = 6.0  # so long the lease of an agent that was killed may still be there, and some more
_LOOK_S = 0.2

KEPT_S = 600.0  # so long the state of a job is kept that goes on without this node
ENDED_FOR_S = 86_400.0  # so long it is known how a job has ended


def wait_for_name(store: Store, host: str, is_over: threading.Event) -> None:
    """Until no other agent says that it is the node ``host``: two of that name would be taken for each other.

    Raises StoreError if there is one all the time.
    """
    end = time.monotonic() + NAME_S
    while any(host == each for each in _hosts(store)) and not is_over.wait(_LOOK_S):
        if time.monotonic() > end:
            raise StoreError(f"it has a node called {host}; give this one another name, by --name or UNICRON_NODE_NAME")


def _hosts(store: Store) -> Iterator[str]:
    for entry in store.read_prefix(NODE_RECORDS).entries:
        try:
            yield parse_node_status(entry).host
        except ValueError:
            continue


def read_spec(store: Store, job: str) -> JobSpec | None:
    """None if there is no such job, or nobody can read what it is."""
    entry = store.read(PlannedJobKeys(job).spec).entry
    try:
        return None if entry is None else parse_spec(entry)
    except ValueError:
        return None


def why_out_of_jobs(store: Store, host: str, now_unix_s: float) -> str:
    """Return why the node is to leave its job, as a clause; "" if it is neither drained nor in quarantine.

    It is read anew: an order that follows from that may be heard of before it.
    """
    entry = store.read(quarantine_key(host)).entry
    try:
        found = None if entry is None else parse_quarantined(entry)
    except ValueError:
        return ""
    return "" if found is None or not is_active(found, now_unix_s) else why_out(found, REASON_CHARACTERS)


def phase_of(entry: Entry | None) -> PhaseRecord | None:
    """None if there is none, or nobody can read what it is."""
    try:
        return None if entry is None else parse_phase(entry)
    except ValueError:
        return None


def may_come_back(record: PhaseRecord, submission: int, start: int, left_s: float) -> bool:
    """Whether a job may yet go on from what this node keeps of it, which left its ``start`` so many seconds ago."""
    if record.submission != submission:
        return False
    # It may go on without this node, and wait for it if the others are lost as well.
    return record.phase is JobPhase.SUBMITTED or (
        record.phase is JobPhase.RUNNING and record.start == start and left_s < KEPT_S
    )


def verdict_on(store: Store, run: str) -> str:
    """How a run has ended: well, failed, or "" if it goes on."""
    keys = JobKeys(run)
    found = {entry.key for entry in store.read_prefix(keys.prefix).entries}
    return "failed" if keys.failed in found else "well" if keys.closed in found else ""


def end_job(store: Store, end: EndJob) -> None:
    """The first to write it decides. What is known of the job goes after a day. Raises LeaseGoneError as well."""
    keys = PlannedJobKeys(end.job)
    snapshot = store.read_prefix(keys.prefix)
    phase = snapshot.get(keys.phase)
    known = None if phase is None else phase_of(phase)
    if phase is None or known is None or known.phase is not JobPhase.RUNNING or known.start != end.start:
        return  # it is over, was stopped, or has started again
    record = replace(known, phase=JobPhase.FINISHED, reason=end.reason, nodes=0, exit_code=end.exit_code)
    lease_id = store.grant(ENDED_FOR_S).lease_id
    store.commit({keys.phase: phase.revision}, puts_of_end(snapshot, keys, record, lease_id))


def puts_of_end(snapshot: Snapshot, keys: PlannedJobKeys, record: PhaseRecord, lease_id: int) -> list[Put]:
    """How a job has ended, and all else that is known of it, for as long as that lease: nothing may stay for ever."""
    kept = [Put(e.key, e.value, lease_id) for e in snapshot.entries if e.key not in (keys.phase, keys.output)]
    kept = sorted(kept, key=lambda put: put.key.startswith(keys.refusals))[: MAX_OPERATIONS - 1]
    return [Put(keys.phase, phase_text(record), lease_id), *kept]
