"""A copy of what is below ``plan/``, kept up to date, and as the snapshot from which everything is decided.

Each key is read once, when it changes. What cannot be read is left out and told in ``odd``: one bad record must not
keep the others from being planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.planning.coordinate.node_status import Health, NodeStatus
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus
from unicron_elastic.planning.model.faulting import FaultRate
from unicron_elastic.planning.model.jobs import JobSpec
from unicron_elastic.planning.model.known_gpu_flops import known_gpu_flops
from unicron_elastic.planning.model.measured import MeasuredJob, first_rates, newest_rates, transition_of
from unicron_elastic.rendezvous.records import plan as records
from unicron_elastic.rendezvous.records import plan_keys
from unicron_elastic.rendezvous.records.plan import PhaseRecord
from unicron_elastic.rendezvous.records.plan_keys import PlannedJobKeys
from unicron_elastic.rendezvous.store.interface import Change, Entry
from unicron_elastic.rendezvous.store.interface import Snapshot as StoreSnapshot

T = TypeVar("T")

LEAST_UNITS = 8  # for which rates are known, however few nodes there are
MOST_UNITS = 1024  # ... if there are not more nodes, whatever a job could use


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """What the store has of one job; revisions are the store's, 0 for a key that is not there."""

    spec: JobSpec
    spec_revision: int
    phase: PhaseRecord
    phase_revision: int = 0
    rates_flops: tuple[float, ...] = ()
    rates_revision: int = 0
    measured: MeasuredJob | None = None
    output: str = ""

    @property
    def revision(self) -> int:
        """Return its revision; 0: it does not exist."""
        return max(self.spec_revision, self.rates_revision)


class PlanMirror:
    """All keys below ``plan/`` as they were at one revision of the store."""

    def __init__(self, snapshot: StoreSnapshot) -> None:
        self.odd: dict[str, str] = {}
        self.published: Published | None = None
        self.faults = FaultRate()
        self.nodes: dict[str, NodeStatus] = {}  # by key, with nothing said of their health
        self.entries: dict[str, Entry] = {}
        self._jobs: dict[str, PlannedJob | None] = {}  # by name; None: to be read again
        self._statuses: dict[str, tuple[tuple[PlannedJob, int, float], JobStatus]] = {}
        self.apply(Change(key=entry.key, revision=entry.revision, entry=entry) for entry in snapshot.entries)

    def apply(self, changes: Iterable[Change]) -> None:
        """Takes changes over, which come in order."""
        for change in changes:
            self.odd.pop(change.key, None)
            if change.entry is None:
                self.entries.pop(change.key, None)
            else:
                self.entries[change.key] = change.entry
            try:
                self._take(change.key, change.entry)
            except ValueError as error:
                self.odd[change.key] = str(error)

    @property
    def is_empty(self) -> bool:
        """Whether nobody plans anything."""
        return not self.entries

    def get(self, key: str) -> Entry | None:
        """What a key holds."""
        return self.entries.get(key)

    def revision(self, key: str) -> int:
        """Return its revision; 0: it does not exist."""
        entry = self.entries.get(key)
        return 0 if entry is None else entry.revision

    def jobs(self) -> dict[str, PlannedJob]:
        """All jobs by name, but for those whose spec cannot be read."""
        for name, known in list(self._jobs.items()):
            if known is None:
                found = self._read_job(name)
                if found is None:
                    del self._jobs[name]
                else:
                    self._jobs[name] = found
        return {name: job for name, job in self._jobs.items() if job is not None}

    def planning_snapshot(self, health: Callable[[str], Health]) -> ClusterSnapshot:
        """What plans are made from; ``health`` says whether a host may work."""
        x_max = _power_of_two(max(LEAST_UNITS, len(self.nodes)))
        jobs = self.jobs()
        gpu_flops = known_gpu_flops((job.spec, job.measured) for job in jobs.values())
        self._statuses = {name: known for name, known in self._statuses.items() if name in jobs}
        return ClusterSnapshot(
            nodes=tuple(_with_health(node, health(node.host)) for node in self.nodes.values()),
            jobs=tuple(self._status(job, x_max, gpu_flops) for job in jobs.values()),
            published=self.published,
            faults=self.faults,
            gpu_flops=gpu_flops,
        )

    def _status(self, job: PlannedJob, x_max: int, gpu_flops: float) -> JobStatus:
        made_from = job, x_max, gpu_flops
        if (known := self._statuses.get(job.spec.name)) is not None and known[0] == made_from:
            return known[1]
        units = _units(job.spec, x_max)
        status = JobStatus(
            spec=job.spec,
            phase=job.phase.phase,
            revision=job.revision,
            rates_flops=job.rates_flops or first_rates(job.spec, units, gpu_flops),
            newest_flops=newest_rates(job.spec, job.measured, units, gpu_flops) if job.measured is not None else (),
            transition=transition_of(job.measured),
        )
        self._statuses[job.spec.name] = made_from, status
        return status

    def _take(self, key: str, entry: Entry | None) -> None:
        if key == plan_keys.CURRENT:
            self.published = None
            if entry is not None:
                self.published = records.parse_published(entry)
        elif key == plan_keys.FAULTS:
            self.faults = FaultRate()
            if entry is not None:
                self.faults = records.parse_faults(entry)
        elif key.startswith(plan_keys.NODE_RECORDS):
            self.nodes.pop(key, None)
            if entry is not None:
                self.nodes[key] = records.parse_node_status(entry)
        elif key.startswith(plan_keys.JOB_RECORDS):
            self._jobs[plan_keys.job_of_key(key)] = None

    def _read_job(self, name: str) -> PlannedJob | None:
        """The job from its keys; what is odd about one of them costs that one alone, unless it is the spec."""
        keys = PlannedJobKeys(name)
        entry = self.entries.get(keys.spec)
        spec = None if entry is None else self._parsed(entry, records.parse_spec)
        if entry is None or spec is None:
            return None
        if why := _why_no_rates(spec, None):
            self.odd[entry.key] = f"{entry.key} holds a job whose rates nobody can compute: {why}"
            return None
        phase, rates, measured = (self.entries.get(key) for key in (keys.phase, keys.rates, keys.measured))
        output = self.entries.get(keys.output)
        found = None if phase is None else self._parsed(phase, records.parse_phase)
        return PlannedJob(
            spec=spec,
            spec_revision=entry.revision,
            phase=found or PhaseRecord(phase=JobPhase.SUBMITTED, reason=f"{name} was submitted."),
            phase_revision=0 if phase is None else phase.revision,
            rates_flops=(self._parsed(rates, records.parse_rates) or ()) if rates is not None else (),
            rates_revision=0 if rates is None else rates.revision,
            measured=None if measured is None else self._parsed(measured, lambda each: _parse_measured(each, spec)),
            output="" if output is None else output.value.decode(errors="replace"),
        )

    def _parsed(self, entry: Entry, parse: Callable[[Entry], T]) -> T | None:
        try:
            return parse(entry)
        except ValueError as error:
            self.odd[entry.key] = str(error)
            return None


def health_of(quarantined: Iterable[Quarantined], now: float) -> Callable[[str], Health]:
    """Says of a host whether it may work: a broken one has to leave at once."""
    kept_out = {
        each.node: Health.BROKEN if each.is_broken else Health.DRAINING
        for each in quarantined
        if each.until is None or each.until > now
    }
    return lambda host: kept_out.get(host, Health.OK)


def _with_health(node: NodeStatus, health: Health) -> NodeStatus:
    return node if health is Health.OK else replace(node, health=health)


def _parse_measured(entry: Entry, spec: JobSpec) -> MeasuredJob:
    try:
        measured = MeasuredJob.from_json(entry.value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{entry.key} holds no measurements: {error}") from None
    if why := _why_no_rates(spec, measured):
        raise ValueError(f"{entry.key} holds measurements from which nobody can compute rates: {why}")
    return measured


def _why_no_rates(spec: JobSpec, measured: MeasuredJob | None) -> str:
    """What is wrong with numbers that are each well by themselves; "": nothing."""
    try:
        newest_rates(spec, measured, LEAST_UNITS)
    except (ValueError, ArithmeticError) as error:
        return str(error)
    return ""


def _units(spec: JobSpec, x_max: int) -> int:
    """For how many its rates are known. What it needs is among them, else nobody could tell why it waits."""
    most = max(x_max, MOST_UNITS)
    if spec.max_nodes is not None:
        return min(most, max(1, spec.max_nodes // spec.unit_nodes))
    return max(x_max, min(most, _power_of_two(spec.least_nodes // spec.unit_nodes)))


def _power_of_two(number: int) -> int:
    """The next one: rates change their length seldom, as each time all is planned anew."""
    return 1 << (number - 1).bit_length()
