"""What planning keeps in the store: keys and their texts, read with bounds. Never imports torch or gRPC.

All of it is below ``plan/``, so that who coordinates reads and watches one prefix and sees everything at one revision:

- ``plan/current``: the published plan, written by compare-and-set;
- ``plan/nodes/NODE``: what an agent does, bound to its lease;
- ``plan/orders/NODE``: what it is to do, written by the coordinator alone;
- ``plan/jobs/JOB/...``: the spec, how far the job is, and what is known of its speed;
- ``plan/faults``: how often nodes fail.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from typing import Any

from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus, Refusal
from unicron_elastic.planning.coordinate.published import Published
from unicron_elastic.planning.coordinate.snapshot import JobPhase
from unicron_elastic.planning.model.faulting import FaultRate
from unicron_elastic.planning.model.jobs import GivenRates, JobSpec, parse_job
from unicron_elastic.rendezvous.records.job import NAME_CHARACTERS, REASON_CHARACTERS
from unicron_elastic.rendezvous.records.plan_keys import PlannedJobKeys, start_of_run, status_key
from unicron_elastic.rendezvous.store.interface import Entry
from unicron_elastic.rendezvous.store.records import number_in, object_in, odd, sentence_in, text_in

SPEC_MAX_BYTES = 512 * 1024
_RECORD_MAX_BYTES = 64 * 1024
_REFUSALS_MAX = 100
_UNITS_MAX = 1_000_000
_NODES_MAX = 1_000_000
_NODE_S_MAX = 1e15
_WEIGHT_MAX = 1e9
_RATE_MAX_FLOPS = 1e30
_ERROR_CHARACTERS = 300  # of what is wrong, which may quote what anybody wrote
_KEY_MAX_BYTES = 240  # of what a node's or a job's own keys begin with: the store's keys have 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a node is to do: leave ``source`` if that is its job, and work for ``target``, "" for none.

    By the plan that is at ``plan_revision`` in the store, for ``reason``.
    """

    source: str
    target: str
    plan_revision: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """How far a job is, and why. ``nodes``: how many wait for it when it starts. ``exit_code``: once it is finished.

    ``signal``: by which its nodes are to stop it, if it is cancelled. ``start``: the number of its latest start,
    greater than those before, ``submission``: what tells the job from an earlier one of its name. Both are told, and
    no revisions of the key: a store that has lost its data counts anew.
    """

    phase: JobPhase
    reason: str
    nodes: int = 0
    exit_code: int | None = None
    signal: int = SIGTERM
    start: int = 0
    submission: int = 0


def status_text(status: NodeStatus) -> str:
    """What an agent says; its health is for others to say."""
    return json.dumps(
        {
            "node_id": status.node_id,
            "host": status.host,
            "label": status.label,
            "state": status.state.value,
            "job": status.job,
            "towards": status.towards,
            "refusals": [[each.job, each.at_unix_s] for each in status.refusals],
            "keeps": list(status.keeps),
        }
    )


def parse_node_status(entry: Entry, health: Health = Health.OK) -> NodeStatus:
    """Raises ValueError for what no agent says of itself."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    try:
        refusals = told.get("refusals", [])
        if not isinstance(refusals, list):
            raise ValueError("refusals must be a list")
        keeps = told.get("keeps", [])
        if not isinstance(keeps, list) or not all(isinstance(each, str) for each in keeps):
            raise ValueError("keeps must be a list of names")
        status = NodeStatus(
            **{name: text_in(told, name, NAME_CHARACTERS) for name in ("node_id", "host", "label", "job", "towards")},
            state=NodeState(text_in(told, "state", NAME_CHARACTERS)),
            health=health,
            refusals=tuple(_refusal(each) for each in refusals[-_REFUSALS_MAX:]),
            keeps=tuple(keeps[-_REFUSALS_MAX:]),
        )
        if status_key(status.node_id) != entry.key:
            raise ValueError("node_id must be the one that the key names")
        if len(entry.key) > _KEY_MAX_BYTES:
            raise ValueError(f"its key must have at most {_KEY_MAX_BYTES} bytes")
    except (ValueError, OverflowError) as error:
        raise odd(entry, "node", error) from None
    return status


def order_text(order: Order) -> bytes:
    """What the key of an order holds. Of a longer reason than is read, only the beginning."""
    reason = order.reason[:REASON_CHARACTERS]
    told = {"source": order.source, "target": order.target, "plan": order.plan_revision, "reason": reason}
    return json.dumps(told).encode()


def parse_order(entry: Entry) -> Order:
    """Raises ValueError for what is no order."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    try:
        return Order(
            source=text_in(told, "source", NAME_CHARACTERS),
            target=text_in(told, "target", NAME_CHARACTERS),
            plan_revision=number_in(told, "plan"),
            reason=sentence_in(told, "reason", REASON_CHARACTERS),
        )
    except ValueError as error:
        raise odd(entry, "order", error) from None


def spec_text(spec: JobSpec) -> bytes:
    """What the key of a job's spec holds. Raises ValueError for one that is too long, or beyond what is planned."""
    try:
        _check_bounds(spec)
    except ValueError as error:
        raise ValueError(f"job {spec.name}: {error}") from None
    text = json.dumps(spec.to_json()).encode()
    if len(text) > SPEC_MAX_BYTES:
        raise ValueError(f"job {spec.name}: its spec has {len(text)} bytes: at most {SPEC_MAX_BYTES} can be kept")
    return text


def parse_spec(entry: Entry) -> JobSpec:
    """Raises ValueError for what no job can run."""
    told = object_in(entry, SPEC_MAX_BYTES)
    try:
        spec = parse_job(told)
        if PlannedJobKeys(spec.name).spec != entry.key:
            raise ValueError("name must be the one that the key names")
        _check_bounds(spec)
    except (ValueError, OverflowError) as error:
        raise odd(entry, "job's spec", error) from None
    return spec


def phase_text(record: PhaseRecord) -> bytes:
    """What the key of a job's phase holds. Of a longer reason than is read, only the beginning."""
    told = {
        "phase": record.phase.value,
        "reason": record.reason[:REASON_CHARACTERS],
        "nodes": record.nodes,
        "exit_code": record.exit_code,
        "signal": int(record.signal),
        "start": record.start,
        "submission": record.submission,
    }
    return json.dumps(told).encode()


def parse_phase(entry: Entry) -> PhaseRecord:
    """Raises ValueError for what is no phase of a job."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    try:
        phase = JobPhase(text_in(told, "phase", NAME_CHARACTERS))
        start, submission = (number_in(told, name) if name in told else 0 for name in ("start", "submission"))
        return PhaseRecord(
            phase=phase,
            reason=sentence_in(told, "reason", REASON_CHARACTERS),
            nodes=number_in(told, "nodes"),
            exit_code=None if told.get("exit_code") is None else number_in(told, "exit_code"),
            signal=_signal(told),
            start=start or (entry.revision if phase is JobPhase.RUNNING else 0),  # of a version that did not tell it
            submission=submission,
        )
    except ValueError as error:
        raise odd(entry, "job's phase", error) from None


def rates_text(rates_flops: tuple[float, ...]) -> bytes:
    """What the key of a job's rates holds."""
    return json.dumps({"rates_flops": list(rates_flops)}, allow_nan=False).encode()


def parse_rates(entry: Entry) -> tuple[float, ...]:
    """FLOP/s by units from 0 on. Raises ValueError for what is none."""
    told = object_in(entry, SPEC_MAX_BYTES).get("rates_flops")
    if not isinstance(told, list) or not 2 <= len(told) <= _UNITS_MAX or told[0] != 0:
        raise ValueError(f"{entry.key} holds no rates: rates_flops must be a list that begins with 0 for 0 units")
    if not all(
        isinstance(rate, int | float) and not isinstance(rate, bool) and 0 <= rate < _RATE_MAX_FLOPS for rate in told
    ):
        raise ValueError(f"{entry.key} holds no rates: each must be FLOP/s, 0 or more")
    return tuple(float(rate) for rate in told)


def parse_published(entry: Entry) -> Published:
    """Raises ValueError for what is no plan."""
    try:
        return Published.from_json(entry.value, entry.revision)
    except (ValueError, OverflowError) as error:
        raise odd(entry, "plan", error) from None


def faults_text(faults: FaultRate) -> bytes:
    """What the key of the faults holds; the prior is part of the program."""
    return json.dumps({"faults": faults.faults, "node_s": faults.node_s}).encode()


def parse_faults(entry: Entry) -> FaultRate:
    """Raises ValueError for what is no rate of faults."""
    told = object_in(entry, _RECORD_MAX_BYTES)
    node_s = told.get("node_s")
    try:
        if not isinstance(node_s, int | float) or isinstance(node_s, bool) or not 0 <= node_s <= _NODE_S_MAX:
            raise ValueError(f"node_s must be seconds, from 0 to {_NODE_S_MAX:g}")
        return FaultRate(faults=number_in(told, "faults"), node_s=float(node_s))
    except ValueError as error:
        raise odd(entry, "rate of faults", error) from None


def _check_bounds(spec: JobSpec) -> None:
    """What a spec may have beyond is a typing error, and would be too much for the planner: it plans for all jobs."""
    for name in ("nproc_per_node", "min_nodes", "max_nodes", "unit_nodes", "pinned_nodes"):
        if (getattr(spec, name) or 0) > _NODES_MAX:
            raise ValueError(f"{name} must be at most {_NODES_MAX}")
    if spec.weight > _WEIGHT_MAX:
        raise ValueError(f"weight must be at most {_WEIGHT_MAX:g}")
    if isinstance(spec.throughput, GivenRates) and max(spec.throughput.rates_flops) >= _RATE_MAX_FLOPS:
        raise ValueError(f"rates_flops must be less than {_RATE_MAX_FLOPS:g}")
    if len(PlannedJobKeys(spec.name).prefix) > _KEY_MAX_BYTES:
        raise ValueError("name must be shorter, as a letter that is not ASCII counts several times")
    if not spec.name.isprintable():
        raise ValueError("name must be of printable characters")
    if start_of_run(spec.name)[1]:
        raise ValueError("name must not end in @ and a number, as the names of a job's starts do")


def _signal(told: Mapping[str, Any]) -> int:
    number = number_in(told, "signal")
    if number not in (SIGINT, SIGTERM, SIGQUIT, SIGHUP):
        raise ValueError(f"signal must be one by which torchrun is stopped, such as {int(SIGTERM)}")
    return number


def _refusal(told: object) -> Refusal:
    match told:
        case [str(job), int() | float() as at_unix_s] if not isinstance(at_unix_s, bool) and math.isfinite(at_unix_s):
            return Refusal(job[:NAME_CHARACTERS], float(at_unix_s))
    raise ValueError("a refusal must be a job and a moment")
