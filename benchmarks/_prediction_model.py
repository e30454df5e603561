"""What the simulator makes of a live run: its ledgers as a history, its beginning as rates, other runs as durations.

Nothing is fitted on the faults that are predicted: durations are medians over the faults of *other* runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from _prediction_live import AWAY_S, HOSTS, MICRO_BATCHES, NODES, Record, Struck, jobs_in
from _prediction_sums import integral, seated, steps_between
from waf import Job, made_at

from unicron_elastic.faults import Status
from unicron_elastic.planning.model.configurations import Workload
from unicron_elastic.planning.model.jobs import JobSpec, Modelled
from unicron_elastic.planning.model.throughput import assumed_flops_per_sample
from unicron_elastic.recovery.worker_loss import REPLACE_AFTER_S
from unicron_elastic.simulation.history.events import FaultStruck, History, Method
from unicron_elastic.simulation.history.ledgers import read_ledgers
from unicron_elastic.simulation.model.durations import DURATIONS, Durations
from unicron_elastic.simulation.model.published import Figure, Tag
from unicron_elastic.simulation.model.scenario import Replayed, Scenario
from unicron_elastic.simulation.model.shape import shape_of
from unicron_elastic.simulation.model.study_result import SeedResult
from unicron_elastic.simulation.policies.policies import POLICIES
from unicron_elastic.simulation.study.run import simulate

PARAMETERS = 172_416  # of the model in examples/two_jobs/train.py
MEETS_S = DURATIONS.meets.value
SEEDS = 50  # of the simulation: how far a step was when a fault came is chance
SAME_S = 2.0  # a fault of the ledger and one that was made are the same if they are so close


@dataclass(frozen=True)
class Kept:
    """A run that was read: what was made, what the ledgers say of it, and when its steps were made."""

    folder: Path
    record: Record
    jobs: list[Job]
    made: dict[str, list[float]]

    @classmethod
    def read(cls, folder: Path) -> Kept:
        """Raises ``OSError``."""
        jobs = jobs_in(folder)
        return cls(folder, Record.read(folder), jobs, {job.name: made_at(job) for job in jobs})

    @property
    def edges(self) -> list[float]:
        """The moments of the faults, and the end: between two of them is all that the first one cost."""
        return [*(each.at for each in self.record.struck), self.record.ended_at]

    def rate(self, job: Job, begin: float, end: float) -> float:
        """Steps per second: whole steps by the time that they took."""
        within = [at for at in self.made[job.name] if begin <= at < end]
        return (len(within) - 1) / (within[-1] - within[0])

    def waf(self, begin: float, end: float) -> float:
        """Weighted FLOP made in that time, parts of the steps at its edges included."""
        return sum(job.weight * job.step_flops * steps_between(self.made[job.name], begin, end) for job in self.jobs)

    def full_waf(self) -> float:
        """Weighted FLOP/s of the undisturbed beginning."""
        begin, end = self.record.began_at, self.edges[0]
        return sum(job.weight * job.step_flops * self.rate(job, begin, end) for job in self.jobs)


def faults_of(history: History, kept: Kept) -> list[FaultStruck | None]:
    """The fault in the ledgers for each that was made; None: there is none."""
    found: list[FaultStruck | None] = []
    for struck in kept.record.struck:
        at_s = struck.at - kept.record.began_at
        near = [each for each in history.faults if each.measured and abs(each.at_s - at_s) < SAME_S]
        found.append(min(near, key=lambda each: abs(each.at_s - at_s), default=None))
    return found


def history_of(kept: Kept, hosts: Sequence[str] = HOSTS, back_s: float = 0.0) -> History:
    """Both ledgers; a lost host was away until its agent was started, and that took ``back_s``."""
    record = kept.record
    return read_ledgers(
        [kept.folder / "ledgers"],
        started_at=record.began_at,
        duration_s=record.ended_at - record.began_at,
        hosts=hosts,
        repair_s=AWAY_S + back_s,
    )


@dataclass(frozen=True)
class Calibration:
    """Medians over the faults of some runs. ``durations`` are a scenario's, ``notices_s`` those of the methods."""

    durations: dict[str, float]
    notices_s: dict[Method, float]
    back_s: float
    faults: int

    def policy_durations(self) -> Durations:
        """Those of the live system, noticed as it was here."""
        own = {
            method: Figure(value, "s", Tag.MEASURED, "this machine, in other runs")
            for method, value in self.notices_s.items()
        }
        return replace(DURATIONS, notices={**DURATIONS.notices, **own})


# Nothing of these runs at all: figures of the documentation, for workers without GPUs (durations.py has their sources).
DOCUMENTED = Calibration(
    durations={"process_s": 0.74, "meets_s": MEETS_S, "communicators_s": 0.0}, notices_s={}, back_s=0.0, faults=0
)


def calibrate(runs: Iterable[Kept]) -> Calibration:
    """Durations of this machine, by runs in which other faults came than in the one that is predicted."""
    found: dict[str, list[float]] = {"process_s": [], "node_s": [], "stops_s": [], "back_s": []}
    notices: dict[Method, list[float]] = {}
    count = 0
    for kept in runs:
        faults, ends = faults_of(history_of(kept), kept), kept.edges[1:]
        for struck, fault, end in zip(kept.record.struck, faults, ends, strict=True):
            count += 1
            if fault is None or fault.measured is None or fault.measured.noticed_s is None:
                continue
            notices.setdefault(fault.method, []).append(fault.measured.noticed_s)
            noticed_at = kept.record.began_at + fault.at_s + fault.measured.noticed_s
            for name, value in _durations_of(struck, noticed_at, renewed_at(kept.folder / struck.job, struck.at, end)):
                found[name].append(value)
    back_s = median(found.pop("back_s"))
    # How long survivors take to meet cannot be told from the ledger of a node whose only worker was struck: the
    # figure is that of the documentation, from this machine. gloo's communicators are in it.
    durations = {name: median(values) for name, values in found.items() if values}
    durations |= {"meets_s": MEETS_S, "communicators_s": 0.0}
    return Calibration(durations, {method: median(values) for method, values in notices.items()}, back_s, count)


def _durations_of(struck: Struck, noticed_at: float, renewed: float | None) -> Iterator[tuple[str, float]]:
    """What one fault says of durations, by the names of a scenario's; ``renewed`` as of ``renewed_at``."""
    if struck.kind == "raise" and struck.gone_s is not None:
        yield "stops_s", max(0.0, struck.at + struck.gone_s - noticed_at)
    if struck.back_s is not None:
        yield "back_s", struck.back_s
    if renewed is None:
        return
    if struck.back_s is None:
        # It is replaced when it has ended, and the others have had a moment for themselves.
        began_at = max(noticed_at + REPLACE_AFTER_S, struck.at + (struck.gone_s or 0.0))
        yield "process_s", max(0.0, renewed - began_at - MEETS_S)
        return
    # Another node took its place as soon as the loss was known, or else the same one once it was back.
    is_other = renewed < struck.at + AWAY_S
    began_at = noticed_at if is_other else struck.at + AWAY_S + struck.back_s
    yield "node_s", renewed - began_at - DURATIONS.decides.at(float(len(HOSTS))) - MEETS_S


def renewed_at(folder: Path, after: float, before: float) -> float | None:
    """When a process that began after a fault had made its first step; None: none did."""
    firsts = []
    for path in folder.glob("*.steps"):
        line = path.read_text().partition("\n")[0].split()
        if len(line) == 2 and after < float(line[0]) < before:
            firsts.append(float(line[0]))
    return min(firsts, default=None)


def job_spec(kept: Kept, job: Job) -> JobSpec:
    """On the nodes that it began with as fast as in the undisturbed beginning; else by the planner's model.

    The model counts FLOPs as those of GPUs: weights make up for that.
    """
    batch, least_most = MICRO_BATCHES[job.name], NODES[job.name].split(":")
    seats = sum(name == job.name for name in kept.record.seats.values())
    rate = kept.rate(job, kept.record.began_at, kept.edges[0])
    workload = Workload(
        global_batch=batch, gpus_per_node=1, uneven=True, parameters=PARAMETERS, minimum=int(least_most[0])
    )
    flops = assumed_flops_per_sample(workload, seats, 1.0 / rate)
    spec = _spec(job, replace(workload, flops_per_sample=flops), 1.0)
    slower = shape_of(spec, seats, uneven=True).step_s(seats) * rate
    spec = _spec(job, replace(workload, flops_per_sample=flops / slower), 1.0)
    modelled = shape_of(spec, seats, uneven=True).rate_flops(seats)
    return replace(spec, weight=job.weight * job.step_flops * rate / modelled)


def _spec(job: Job, workload: Workload, weight: float) -> JobSpec:
    least, _, most = NODES[job.name].partition(":")
    return JobSpec(
        name=job.name,
        command=("train.py",),
        directory="/",
        min_nodes=int(least),
        max_nodes=int(most),
        weight=weight,
        throughput=Modelled(workload),
    )


@dataclass(frozen=True)
class Prediction:
    """By the simulator: a result for each seed, and the history that it was made of."""

    history: History
    results: list[SeedResult]

    def lost_s(self, begin_s: float, end_s: float) -> float:
        """Seconds of the whole cluster that are lost in that time, in the mean over seeds."""
        return fmean(
            (end_s - begin_s) - integral(each.curve, begin_s, end_s) / (each.waf_ideal / each.duration_s)
            for each in self.results
        )

    def phase_s(self, at_s: float, phase: str) -> float | None:
        """How long a phase of the incident of that moment lasts, in the mean over seeds."""
        found = [
            getattr(incident, f"{phase}_s")
            for result in self.results
            for incident in result.incidents
            if abs(incident.at_s - at_s) < 1e-6
        ]
        return fmean(found) if found else None

    def job(self, at_s: float) -> str:
        """Which job it strikes there."""
        return next((each.job for each in self.results[0].incidents if abs(each.at_s - at_s) < 1e-6), "")


def predict(kept: Kept, calibration: Calibration) -> Prediction:
    """Simulate the faults of a run with the live system's policy."""
    specs = tuple(job_spec(kept, job) for job in kept.jobs)
    scenario = Scenario(
        name="four simulated hosts",
        nodes=len(HOSTS),
        gpus_per_node=1,
        jobs=specs,
        source=Replayed(path=kept.folder / "ledgers"),
        durations=calibration.durations,
    )
    policy = replace(POLICIES["unicron"], durations=calibration.policy_durations())
    places = [each.job for each in simulate(scenario, policy, 0, _one_each(len(HOSTS))).incidents]
    history = history_of(kept, seated(places, kept.record.seats), calibration.back_s)
    return Prediction(history, [simulate(scenario, policy, seed, history) for seed in range(SEEDS)])


def _one_each(nodes: int) -> History:
    """A fault on every node, one after the other: it shows for which job each of them works."""
    faults = (FaultStruck(at_s=600.0 * (node + 1), node=node, kind=Status.KILLED_BY_SIGNAL) for node in range(nodes))
    return History.of(faults, name="one each", duration_s=600.0 * (nodes + 1), nodes=nodes, source="made here")
