"""The whole cluster at one moment, as values: what runs, on what, how fast, what broke, and whether all is well. Pure.

Made of the store by ``reading``; shown by ``unicron status`` and the coordinator's page.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from unicron_elastic.base.incident import PHASES, Incident

FINE, DEGRADED, CRITICAL = "fine", "degraded", "critical"
LEVELS = (FINE, DEGRADED, CRITICAL)  # the worst last; their places are the exit codes of ``unicron status``


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is not well, as a sentence, and its ``kind`` in a word or two.

    ``about``: job:NAME, node:HOST or cluster.
    """

    level: str
    kind: str
    about: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterVerdict:
    """Whether all is well, and why, as a sentence. ``problems``: the worst first."""

    level: str
    reason: str
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLine:
    """Who coordinates. ``since_unix_s``: None if it does not say."""

    host: str
    node_id: str
    is_dedicated: bool
    since_unix_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """The published plan in short. ``overtaken``: what it does not know yet, "" for nothing; ``made_unix_s``: None if
    unknown. FLOP/s are weighted: what the plan promises, and what its jobs achieve now.
    """

    revision: int
    made_unix_s: float | None
    reason: str
    overtaken: str
    waf_flops: float
    achieved_waf_flops: float
    next_fault_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLine:
    """One job.

    ``state``: training, waiting, paused, finished, failed or cancelled; stopped, if nobody plans it and all of its
    nodes were told to go. ``why`` it is so, "" while it trains.
    ``has_run``: it has trained before, and so stands still if it waits. ``is_given_up``: it has not, nobody plans it,
    and who started it has gone.
    ``generation``: the round in which its nodes have met; of a planned job, since its latest start, whose number
    ``start`` is greater than that of those before. ``step``: optimizer
    steps since its workers began, at ``told_unix_s``; ``stepped_unix_s``: when the latest ended. ``weighted_flops``:
    achieved now, ``expected_flops``: by the plan, both weighted; ``of_expected``: the one by the other.
    ``is_estimate``: nobody says what a step computes, so that FLOP/s are known by their ratios alone. ``nodes``: that
    train; ``wanted_nodes``: that it is to have. None: not known, or meaningless for it.
    """

    job: str
    run_id: str
    state: str
    why: str = ""
    is_planned: bool = False
    has_run: bool = False
    is_given_up: bool = False
    generation: int | None = None
    world: int | None = None
    start: int | None = None
    step: int | None = None
    steps_per_s: float | None = None
    stepped_unix_s: float | None = None
    told_unix_s: float | None = None
    weight: float | None = None
    weighted_flops: float | None = None
    expected_flops: float | None = None
    of_expected: float | None = None
    is_estimate: bool = False
    nodes: int = 0
    joining_nodes: int = 0
    leaving_nodes: int = 0
    wanted_nodes: int | None = None
    min_nodes: int | None = None
    max_nodes: int | None = None
    workers: int | None = None
    restarts_used: int | None = None
    max_restarts: int | None = None
    is_incident_open: bool = False
    hosts: tuple[str, ...] = ()

    @property
    def is_alive(self) -> bool:
        """Whether it runs or is to run."""
        return self.state in ("training", "waiting", "paused") and not self.is_given_up


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLine:
    """One node. ``health``: well, draining (a person wants it out) or broken (it was put out).

    ``state``: working, joining, leaving, idle, training, waiting, spare, lost for a host that belongs to the cluster,
    but has no agent, or absent for one that only the quarantine knows. ``reason``, ``by``, ``since_unix_s``,
    ``until_unix_s``: of the quarantine; until None: until it is lifted. ``lost_why``, ``lost_unix_s``: of the loss, if
    the coordinator has seen it.
    """

    host: str
    node_id: str
    health: str
    state: str
    job: str = ""
    towards: str = ""
    rank: int | None = None
    label: str = ""
    is_coordinator: bool = False
    reason: str = ""
    by: str = ""
    since_unix_s: float | None = None
    until_unix_s: float | None = None
    lost_why: str = ""
    lost_unix_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentLine:
    """One fault in short. ``time``: ISO 8601 with offset. ``is_open``: the job was to go on, and made no step yet.

    ``phases_ms``: (phase, milliseconds), those that are known; ``total_ms``: from the fault to the first step.
    """

    run_id: str
    number: int
    host: str
    time: str
    rank: int | None
    severity: int
    status: str
    method: str
    reason: str
    action: str
    decision: str
    is_open: bool
    total_ms: float | None
    phases_ms: tuple[tuple[str, float], ...]
    micro_batches_reused: int | None = None
    micro_batches_recomputed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All of it at ``at_unix_s``. ``where``: the store; ``incidents``: the newest first; ``odd``: what of the store
    could not be read, as sentences.
    """

    where: str
    at_unix_s: float
    verdict: ClusterVerdict
    coordinator: CoordinatorLine | None = None
    plan: PlanLine | None = None
    jobs: tuple[JobLine, ...] = ()
    nodes: tuple[NodeLine, ...] = ()
    incidents: tuple[IncidentLine, ...] = ()
    odd: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return this as plain data."""
        found = asdict(self)
        for line in found["incidents"]:
            line["phases_ms"] = dict(line["phases_ms"])
        return found


def incident_line(incident: Incident, *, is_open: bool) -> IncidentLine:
    """A record in short."""
    phases = ((phase, incident.phase_ms(phase)) for phase in PHASES[1:])
    return IncidentLine(
        run_id=incident.run_id,
        number=incident.number,
        host=incident.host,
        time=incident.time,
        rank=incident.rank,
        severity=incident.severity,
        status=incident.status,
        method=incident.method,
        reason=incident.reason,
        action=incident.action,
        decision=incident.decision,
        is_open=is_open,
        total_ms=incident.total_ms,
        phases_ms=tuple((phase, spent_ms) for phase, spent_ms in phases if spent_ms is not None),
        micro_batches_reused=incident.micro_batches_reused,
        micro_batches_recomputed=incident.micro_batches_recomputed,
    )
