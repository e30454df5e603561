"""One coordinator's term: what ``planning.coordinator`` decides, carried out in the store.

It reads and watches everything below ``plan/``, hands it to ``handle``, and writes what comes of it.
Each write is one transaction, guarded by the leader's key and by the plan that it follows from: a coordinator that was
replaced, and a plan that was overtaken, change nothing any more. Tables are built in another thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.metrics.figures import PlanFigures
from unicron_elastic.planning.allocate.plan_table import PlanTable, build_table
from unicron_elastic.planning.coordinate.coordinator import (
    AdoptRates,
    BuildTable,
    Command,
    CoordinatorState,
    CoordinatorTick,
    PublishPlan,
    SnapshotSeen,
    TableBuilt,
    handle,
)
from unicron_elastic.planning.coordinate.node_status import Health, NodeState
from unicron_elastic.planning.coordinate.reconcile import LendNode, ReturnNode, StartJob, StopJob
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase
from unicron_elastic.rendezvous.plan.mirror import PlanMirror, PlannedJob, health_of
from unicron_elastic.rendezvous.plan.plan_figures import plan_figures
from unicron_elastic.rendezvous.records import plan as records
from unicron_elastic.rendezvous.records import plan_keys
from unicron_elastic.rendezvous.records.cluster import LEADER, QUARANTINE, ROSTER, parse_quarantined, quarantine_text
from unicron_elastic.rendezvous.records.plan import Order, PhaseRecord
from unicron_elastic.rendezvous.records.plan_keys import PlannedJobKeys
from unicron_elastic.rendezvous.store.interface import (
    MAX_COMMIT_BYTES,
    MAX_OPERATIONS,
    Blind,
    Change,
    Changes,
    LeaseGoneError,
    Put,
    Replaced,
    Sighted,
    Store,
    StoreReplacedError,
    WatchItem,
)

FAULTS_EVERY_S = 3600.0  # between two notes of how long nodes ran without a fault
_BATCH = MAX_OPERATIONS - 10  # orders in one transaction
_BATCH_BYTES = MAX_COMMIT_BYTES - 100_000  # the rest is for the keys that guard them

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Uptime:
    """How long nodes have run, and how many were lost, that nobody has noted yet."""

    node_s: float = 0.0
    faults: int = 0
    since: float = 0.0
    noted_at: float = 0.0


class Term:
    """The work of one coordinator from its election on, with what ``store`` holds. For one thread, but for watches."""

    def __init__(self, store: Store, leader_revision: int, say: Callable[[str], None]) -> None:
        """Raises StoreError."""
        self._store = store
        self._leader_revision = leader_revision
        self._say = say
        self._inbox: queue.SimpleQueue[tuple[str, WatchItem] | TableBuilt | None] = queue.SimpleQueue()
        self._state = CoordinatorState()
        self._blind: set[str] = set()  # prefixes that cannot be seen
        snapshot, kept_out = store.read_prefix(plan_keys.PLAN), store.read_prefix(QUARANTINE)
        roster = store.read_prefix(ROSTER)
        self._roster = {each.key: each for each in roster.entries}
        self._mirror = PlanMirror(snapshot)
        self._quarantined: dict[str, Quarantined] = {}
        self._take_quarantine(Change(key=e.key, revision=e.revision, entry=e) for e in kept_out.entries)
        # What was ordered before this term is not ordered again at once.
        self._inherited = {each.key: each for each in snapshot.entries if each.key.startswith(plan_keys.ORDERS)}
        self._is_new = True
        self._built: TableBuilt | None = None
        self._odd: dict[str, str] = {}  # as told
        self._before: ClusterSnapshot | None = None
        self._seen: tuple[ClusterSnapshot, dict[str, PlannedJob]] = ClusterSnapshot(), {}  # at the latest look
        self._uptime = _Uptime(since=time.monotonic(), noted_at=time.monotonic())
        store.watch(snapshot, lambda item: self._inbox.put((plan_keys.PLAN, item)))
        store.watch(kept_out, lambda item: self._inbox.put((QUARANTINE, item)))
        store.watch(roster, lambda item: self._inbox.put((ROSTER, item)))

    def wait(self, timeout_s: float) -> None:
        """Until there is something to take in. Raises StoreReplacedError."""
        try:
            self._take(self._inbox.get(timeout=timeout_s))
            while True:
                self._take(self._inbox.get_nowait())
        except queue.Empty:
            pass

    def wake(self) -> None:
        """Ends a wait. Safe from any thread."""
        self._inbox.put(None)

    def figures(self, at_unix_s: float) -> PlanFigures:
        """What is planned for, as of the latest look. From any thread."""
        snapshot, jobs = self._seen
        return plan_figures(snapshot, jobs, tuple(self._quarantined.values()), at_unix_s)

    def kept(self) -> list[Put]:
        """What the store holds of jobs, of hosts and for people, as last seen; nodes speak for themselves."""
        of_nodes = plan_keys.NODE_RECORDS, plan_keys.ORDERS
        entries = [each for each in self._mirror.entries.values() if not each.key.startswith(of_nodes)]
        plan = [Put(each.key, each.value) for each in (*entries, *self._roster.values()) if each.lease_id is None]
        return [*plan, *(Put(key, quarantine_text(each)) for key, each in self._quarantined.items())]

    def look(self, at_unix_s: float) -> None:
        """Decides, and does what was decided. Raises StoreError."""
        if self._blind or self._mirror.is_empty:
            return
        if self._is_new or self._quarantined:
            self._is_new = False
            health = health_of(self._quarantined.values(), at_unix_s)
            snapshot = self._mirror.planning_snapshot(health)
            self._tell_odd()
            self._count_faults(snapshot)
            has_acted = self._handle(SnapshotSeen(at_unix_s, snapshot))
            self._seen = snapshot, self._mirror.jobs()
        else:
            has_acted = self._handle(CoordinatorTick(at_unix_s))
        if not has_acted:  # first the orders that follow from a fault
            self._note_faults()
        if self._built is not None:
            built, self._built = replace(self._built, at_unix_s=at_unix_s), None
            self._handle(built)

    # -- what comes in -------------------------------------------------------------------------------------------------

    def _take(self, item: tuple[str, WatchItem] | TableBuilt | None) -> None:
        match item:
            case (prefix, Changes(changes=changes)) if prefix == QUARANTINE:
                self._take_quarantine(changes)
                self._is_new = True
            case (prefix, Changes(changes=changes)) if prefix == ROSTER:
                for change in changes:
                    self._roster.pop(change.key, None)
                    self._roster |= {} if change.entry is None else {change.key: change.entry}
            case (_, Changes(changes=changes)):
                self._mirror.apply(changes)
                # Orders come from here, and nothing is decided by them.
                self._is_new |= any(not change.key.startswith(plan_keys.ORDERS) for change in changes)
            case (prefix, Blind()):
                self._blind.add(prefix)
            case (prefix, Sighted()):
                self._blind.discard(prefix)
                self._is_new = True
            case (_, Replaced(reason=reason)):
                raise StoreReplacedError(reason)
            case TableBuilt():
                self._built = item  # of use once it is known how things stand

    def _tell_odd(self) -> None:
        """Each odd record once: whoever wrote it has to know why nothing comes of it."""
        odd = dict(self._mirror.odd)
        for key, text in odd.items():
            if self._odd.get(key) != text:
                logger.warning("%s: it is ignored.", text)
        self._odd = odd

    def _take_quarantine(self, changes: Iterable[Change]) -> None:
        for change in changes:
            self._quarantined.pop(change.key, None)
            if change.entry is not None:
                try:
                    self._quarantined[change.key] = parse_quarantined(change.entry)
                except ValueError as error:
                    logger.warning("%s: it is ignored.", error)

    # -- what is done --------------------------------------------------------------------------------------------------

    def _handle(self, event: SnapshotSeen | CoordinatorTick | TableBuilt) -> bool:
        """Whether there was anything to do."""
        self._state, commands = handle(self._state, event)
        self._carry_out(commands)
        return bool(commands)

    def _carry_out(self, commands: Sequence[Command]) -> None:
        moves = [each for each in commands if isinstance(each, LendNode | ReturnNode)]
        stops = [each for each in commands if isinstance(each, StopJob)]
        adoptions = [each for each in commands if isinstance(each, AdoptRates)]
        self._adopt(adoptions)
        for stop in stops:
            self._stop_job(stop)
        self._order(moves)
        for command in commands:
            match command:
                case PublishPlan():
                    self._publish(command)
                case StartJob():
                    self._start_job(command)
                case BuildTable():
                    threading.Thread(target=self._build, args=(command,), name="unicron-table", daemon=True).start()

    def _publish(self, command: PublishPlan) -> None:
        # What stands there and is no plan is replaced: its revision is that of the key all the same.
        revision = command.expected_revision or self._mirror.revision(plan_keys.CURRENT)
        put = Put(plan_keys.CURRENT, command.published.to_json().encode())
        before = self._mirror.published
        if self._store.commit(self._guards({plan_keys.CURRENT: revision}), [put]) is None:
            return
        if before is None or before.seats != command.published.seats:  # else it is looked at, and nothing is to be told
            self._say(command.reason)

    def _adopt(self, adoptions: Sequence[AdoptRates]) -> None:
        """All together: what a GPU achieves may have changed for all of them, and is compared by the next plan."""
        puts, guards, reasons = [], dict[str, dict[str, int]](), dict[str, str]()
        for adoption in adoptions:
            job, keys = self._mirror.jobs().get(adoption.job), PlannedJobKeys(adoption.job)
            if job is None or job.revision != adoption.expected_revision:
                return
            puts.append(Put(keys.rates, records.rates_text(adoption.rates_flops)))
            guards[keys.rates] = {keys.spec: job.spec_revision, keys.rates: job.rates_revision}
            reasons[keys.rates] = adoption.reason
        for batch in _batches(puts, _BATCH // 2):  # as each has two guards
            guard = self._guards({key: revision for put in batch for key, revision in guards[put.key].items()})
            if self._store.commit(guard, batch) is not None:
                for put in batch:
                    logger.info("%s", reasons[put.key])

    def _order(self, moves: Sequence[LendNode | ReturnNode]) -> None:
        """An order goes when its node's lease goes, so that none is left behind."""
        puts = []
        for move in moves:
            status = self._mirror.get(plan_keys.status_key(move.node_id))
            if status is None:
                continue  # it is gone since this was decided
            key, target = plan_keys.order_key(move.node_id), move.target if isinstance(move, LendNode) else ""
            order = Order(source=move.source, target=target, plan_revision=move.plan_revision, reason=move.reason)
            put = Put(key, records.order_text(order), status.lease_id)
            given = self._inherited.pop(key, None)
            if given is None or (given.value, given.lease_id) != (put.value, put.lease_id):
                puts.append(put)
        for batch in _batches(puts):
            self._commit_orders(self._guards({plan_keys.CURRENT: moves[0].plan_revision}), batch)

    def _commit_orders(self, guards: dict[str, int], puts: Sequence[Put]) -> None:
        try:
            self._store.commit(guards, puts)
        except LeaseGoneError:  # a node of them is gone, which is news that comes; the others are told one by one
            for put in puts:
                try:
                    self._store.commit(guards, [put])
                except LeaseGoneError:
                    continue

    def _start_job(self, command: StartJob) -> None:
        # All for whom the plan has a seat: those who are still on their way are waited for a little.
        published = self._mirror.published
        nodes = 0 if published is None else published.plan.counts.get(command.job, 0)
        self._set_phase(command, PhaseRecord(phase=JobPhase.RUNNING, reason=command.reason, nodes=nodes))

    def _stop_job(self, command: StopJob) -> None:
        self._set_phase(command, PhaseRecord(phase=JobPhase.SUBMITTED, reason=command.reason))

    def _set_phase(self, command: StartJob | StopJob, record: PhaseRecord) -> None:
        job, keys = self._mirror.jobs().get(command.job), PlannedJobKeys(command.job)
        if job is None:
            return
        # Also greater than those of a job of this name before: each start takes a revision, and so does a submission.
        start = max(job.phase.start + 1, job.spec_revision) if record.phase is JobPhase.RUNNING else job.phase.start
        record = replace(record, start=start, submission=job.phase.submission)
        guards = self._guards(
            {plan_keys.CURRENT: command.plan_revision, keys.spec: job.spec_revision, keys.phase: job.phase_revision}
        )
        if self._store.commit(guards, [Put(keys.phase, records.phase_text(record))]) is not None:
            self._say(command.reason)

    def _guards(self, more: dict[str, int]) -> dict[str, int]:
        return {LEADER: self._leader_revision, **more}

    def _build(self, command: BuildTable) -> None:
        table: PlanTable | None = None
        try:
            table = build_table(command.cluster, command.expected, with_pairs=command.with_pairs)
        except Exception:  # who waits for it would wait for good
            logger.exception("The table of plans could not be built; plans are computed when they are needed")
        self._inbox.put(TableBuilt(time.time(), table))

    # -- how often nodes fail ------------------------------------------------------------------------------------------

    def _count_faults(self, snapshot: ClusterSnapshot) -> None:
        now, uptime = time.monotonic(), self._uptime
        before, self._before = self._before, snapshot
        if before is not None:
            uptime.node_s += len(before.nodes) * (now - uptime.since)
        uptime.since = now
        uptime.faults += 0 if before is None else lost_nodes(before, snapshot)

    def _note_faults(self) -> None:
        now, uptime = time.monotonic(), self._uptime
        if not uptime.faults and now - uptime.noted_at < FAULTS_EVERY_S:
            return
        told = self._mirror.faults.observed(uptime.faults, uptime.node_s)
        guards = self._guards({plan_keys.FAULTS: self._mirror.revision(plan_keys.FAULTS)})
        if self._store.commit(guards, [Put(plan_keys.FAULTS, records.faults_text(told))]) is not None:
            uptime.node_s, uptime.faults, uptime.noted_at = 0.0, 0, now


def _batches(puts: Sequence[Put], most: int = _BATCH) -> Iterator[list[Put]]:
    """Split writes into transactions as large as the store takes."""
    batch: list[Put] = []
    size = 0
    for put in puts:
        more = len(put.key) + len(put.value)
        if batch and (len(batch) == most or size + more > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(put)
        size += more
    if batch:
        yield batch


def lost_nodes(before: ClusterSnapshot, after: ClusterSnapshot) -> int:
    """How many nodes are gone that did not say so: who leaves the cluster leaves its job first, or is kept out."""
    there = {node.node_id for node in after.nodes}
    return sum(
        node.node_id not in there and node.state is not NodeState.IDLE and node.health is Health.OK
        for node in before.nodes
    )
