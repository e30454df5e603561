"""What would be if: a snapshot of the cluster, changed by sentences such as "lose node3, weight chat 2".

Nothing is asked of the store and nothing is written to it; only "submit FILE" reads a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from difflib import get_close_matches

from unicron_elastic.base.text import shorten
from unicron_elastic.launcher.common.tables import natural
from unicron_elastic.planning.coordinate.node_status import Health, NodeState, NodeStatus
from unicron_elastic.planning.coordinate.snapshot import ClusterSnapshot, JobPhase, JobStatus
from unicron_elastic.planning.model.jobs import JobSpec, parse_job
from unicron_elastic.planning.model.measured import first_rates

FORMS = {
    "lose": "lose NODE[,NODE]",
    "join": "join HOST[,HOST] or join NUMBER nodes",
    "drain": "drain NODE[,NODE]",
    "submit": "submit FILE.json",
    "finish": "finish JOB[,JOB]",
    "pause": "pause JOB[,JOB]",
    "resume": "resume JOB[,JOB]",
    "weight": "weight JOB NUMBER",
    "pin": "pin JOB NODES",
    "unpin": "unpin JOB[,JOB]",
}
_CLAUSE = re.compile(rf",\s*(?=(?:{'|'.join(FORMS)})\s)")
_COUNT = re.compile(r"([0-9]{1,9})(?:\s+nodes?)?")
_JOINING_MAX = 10_000
_UNITS_MAX = 10_000  # that rates of a job are computed for
_UNITS_LEAST = 8
_FILE_MAX_BYTES = 512 * 1024
_NAMED = 16  # of what is known


def what_if(snapshot: ClusterSnapshot, text: str, read_job: Callable[[str], JobSpec] | None = None) -> ClusterSnapshot:
    """The snapshot as it would be, by one sentence or several with commas between them.

    ``read_job`` finds the spec that a file holds. Raises ``ValueError`` saying what is wrong, and what would be right.
    """
    for clause in _clauses(text):
        snapshot = _changed(snapshot, clause, read_job or read_job_file)
    return snapshot


def with_spec(snapshot: ClusterSnapshot, spec: JobSpec) -> ClusterSnapshot:
    """The snapshot with another spec of a job that it has, as a plan is to see it."""
    jobs = (
        _with_rates(replace(job, spec=spec, revision=job.revision + 1), len(snapshot.nodes), snapshot.gpu_flops)
        if job.name == spec.name
        else job
        for job in snapshot.jobs
    )
    return replace(snapshot, jobs=tuple(jobs))


def read_job_file(path: str) -> JobSpec:
    """The job that a JSON file describes. Raises ``ValueError`` if there is none."""
    where = f"submit: {_quoted(path)}"
    try:
        with open(path, "rb") as file:
            text = file.read(_FILE_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with NUL in it is a ValueError
        raise ValueError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(text) > _FILE_MAX_BYTES:
        raise ValueError(f"{where} is too long: a job's spec has at most {_FILE_MAX_BYTES} bytes")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} holds no JSON: it must hold an object with name, command, directory") from None
    try:
        return parse_job(told)
    except (ValueError, OverflowError) as error:  # an integer of hundreds of digits
        raise ValueError(f"{where}: {error}") from None


def _clauses(text: str) -> Iterator[str]:
    found = [clause.strip().rstrip(",").rstrip() for clause in _CLAUSE.split(text.strip())]
    if not any(found):
        raise ValueError(f"nothing is said: it takes {_forms()}")
    yield from filter(None, found)


def _changed(snapshot: ClusterSnapshot, clause: str, read_job: Callable[[str], JobSpec]) -> ClusterSnapshot:
    verb, *after = clause.split(None, 1)
    if verb not in FORMS:
        near = get_close_matches(verb, FORMS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it takes {_forms()}"
        raise ValueError(f"{_quoted(verb)} is nothing that can be asked: {hint}")
    if not after:
        raise ValueError(f"{verb} what? It must be {FORMS[verb]}")
    if verb == "submit":
        return _submitted(snapshot, read_job(after[0]))
    return _BY_VERB[verb](snapshot, after[0])


def _lose(snapshot: ClusterSnapshot, names: str) -> ClusterSnapshot:
    lost = {node.node_id for name in _names(names) for node in _nodes_called(snapshot, name)}
    return replace(snapshot, nodes=tuple(node for node in snapshot.nodes if node.node_id not in lost))


def _drain(snapshot: ClusterSnapshot, names: str) -> ClusterSnapshot:
    found = {node.node_id for name in _names(names) for node in _nodes_called(snapshot, name)}
    nodes = (
        replace(node, health=Health.DRAINING) if node.node_id in found and node.health is Health.OK else node
        for node in snapshot.nodes
    )
    return replace(snapshot, nodes=tuple(nodes))


def _join(snapshot: ClusterSnapshot, names: str) -> ClusterSnapshot:
    known = {node.host for node in snapshot.nodes}
    counted = _COUNT.fullmatch(names)
    if counted is not None:
        hosts = _new_hosts(known, int(counted[1]))
    else:
        hosts = _names(names)
        for host in hosts:
            if host in known:
                raise ValueError(f"join: {host} is in the cluster already; give a host that is not, or join 2 nodes")
            if any(letter.isspace() or not letter.isprintable() for letter in host):
                raise ValueError(f"join: {_quoted(host)} names no host: it must be {FORMS['join']}")
    nodes = (*snapshot.nodes, *(NodeStatus(node_id=f"{host}/what-if", host=host) for host in hosts))
    jobs = tuple(_with_rates(job, len(nodes), snapshot.gpu_flops) for job in snapshot.jobs)
    return replace(snapshot, nodes=nodes, jobs=jobs)


def _new_hosts(known: Collection[str], count: int) -> list[str]:
    if not 1 <= count <= _JOINING_MAX:
        raise ValueError(f"join: {count} nodes cannot join: it must be 1 to {_JOINING_MAX}")
    numbers = range(1, count + len(known) + 1)
    return [name for number in numbers if (name := f"new-{number}") not in known][:count]


def _nodes_called(snapshot: ClusterSnapshot, name: str) -> tuple[NodeStatus, ...]:
    """The agents of a host, or the one with that id."""
    found = tuple(node for node in snapshot.nodes if name in (node.host, node.node_id))
    if not found:
        raise ValueError(f"{_quoted(name)} is no node of the cluster: {_known({node.host for node in snapshot.nodes})}")
    return found


def _submitted(snapshot: ClusterSnapshot, spec: JobSpec) -> ClusterSnapshot:
    old = snapshot.job(spec.name)
    if old is not None and old.is_alive:
        raise ValueError(f"submit: a job {spec.name} is there already: finish it before, or give another name")
    try:
        rates_flops = first_rates(spec, _units(spec, len(snapshot.nodes)), snapshot.gpu_flops)
    except OverflowError:
        raise ValueError(f"submit: the FLOP/s of job {spec.name} cannot be computed: a number is too large") from None
    revision = 1 + max((job.revision for job in snapshot.jobs), default=0)
    others = tuple(job for job in snapshot.jobs if job is not old)
    return replace(snapshot, jobs=(*others, JobStatus(spec=spec, revision=revision, rates_flops=rates_flops)))


def _with_rates(job: JobStatus, nodes: int, gpu_flops: float) -> JobStatus:
    """The job with rates for as many nodes as there are now, if nothing was measured of it yet."""
    known, units = len(job.rates_flops) - 1, _units(job.spec, nodes)
    if known < 1 or known >= units or job.rates_flops != first_rates(job.spec, known, gpu_flops):
        return job
    return replace(job, rates_flops=first_rates(job.spec, units, gpu_flops))


def _units(spec: JobSpec, nodes: int) -> int:
    """For how many units rates are of use."""
    least = max(nodes, spec.min_nodes, spec.pinned_nodes or 0)
    most = least if spec.max_nodes is None else spec.max_nodes
    return min(max(-(-most // spec.unit_nodes), _UNITS_LEAST), _UNITS_MAX)


def _finish(snapshot: ClusterSnapshot, names: str) -> ClusterSnapshot:
    for job in _jobs_called(snapshot, names):
        jobs = (replace(each, phase=JobPhase.FINISHED) if each is job else each for each in snapshot.jobs)
        nodes = (_freed(node, job.name) for node in snapshot.nodes)
        snapshot = replace(snapshot, jobs=tuple(jobs), nodes=tuple(nodes))
    return snapshot


def _freed(node: NodeStatus, job: str) -> NodeStatus:
    """The node when the job is over and its workers have ended."""
    if node.job == job:
        target = node.towards if node.towards != job else ""
        return replace(node, state=NodeState.JOINING if target else NodeState.IDLE, job=target, towards="")
    return replace(node, towards="") if node.towards == job else node


def _pause(snapshot: ClusterSnapshot, names: str) -> ClusterSnapshot:
    return _respecified(snapshot, names, paused=True)


def _resume(snapshot: ClusterSnapshot, names: str) -> ClusterSnapshot:
    return _respecified(snapshot, names, paused=False)


def _unpin(snapshot: ClusterSnapshot, names: str) -> ClusterSnapshot:
    return _respecified(snapshot, names, pinned_nodes=None)


def _respecified(snapshot: ClusterSnapshot, names: str, **changes: bool | None) -> ClusterSnapshot:
    for job in _jobs_called(snapshot, names):
        snapshot = with_spec(snapshot, replace(job.spec, **changes))  # type: ignore[arg-type]
    return snapshot


def _weight(snapshot: ClusterSnapshot, told: str) -> ClusterSnapshot:
    name, number = _name_and_number("weight", told)
    try:
        weight = float(number)
    except ValueError:
        raise ValueError(f"weight: {_quoted(number)} is no number: it must be {FORMS['weight']}") from None
    job = _job_called(snapshot, name)
    return with_spec(snapshot, replace(job.spec, weight=weight))


def _pin(snapshot: ClusterSnapshot, told: str) -> ClusterSnapshot:
    name, number = _name_and_number("pin", told)
    if re.fullmatch("[0-9]{1,9}", number) is None:
        raise ValueError(f"pin: {_quoted(number)} is no number of nodes: it must be {FORMS['pin']}")
    job = _job_called(snapshot, name)
    return with_spec(snapshot, replace(job.spec, pinned_nodes=int(number)))


def _name_and_number(verb: str, told: str) -> tuple[str, str]:
    """Read "JOB NUMBER"; the name may have blanks in it."""
    parts = told.rsplit(None, 1)
    if len(parts) < 2:
        raise ValueError(f"{verb} {_quoted(told)} is not enough: it must be {FORMS[verb]}")
    return parts[0], parts[1]


def _jobs_called(snapshot: ClusterSnapshot, names: str) -> list[JobStatus]:
    """One job whose name may have commas in it, or several with commas between them."""
    alive = {job.name for job in snapshot.jobs if job.is_alive}
    return [_job_called(snapshot, name) for name in dict.fromkeys([names] if names in alive else _names(names))]


def _job_called(snapshot: ClusterSnapshot, name: str) -> JobStatus:
    job = snapshot.job(name)
    if job is None or not job.is_alive:
        is_what = "is no planned job" if job is None else f"is {job.phase.value}"
        raise ValueError(f"{_quoted(name)} {is_what}: {_known({each.name for each in snapshot.jobs if each.is_alive})}")
    return job


def _names(text: str) -> list[str]:
    found = [name for part in text.split(",") if (name := part.strip())]
    if not found:
        raise ValueError(f"{_quoted(text)} names nothing")
    return list(dict.fromkeys(found))


def _known(names: Collection[str]) -> str:
    if not names:
        return "there is none"
    ordered = sorted(names, key=natural)
    more = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return f"known are {', '.join(ordered[:_NAMED])}{more}"


def _forms() -> str:
    return "; ".join(FORMS.values())


def _quoted(text: str) -> str:
    return ascii(shorten(text, 80))


_BY_VERB: dict[str, Callable[[ClusterSnapshot, str], ClusterSnapshot]] = {
    "lose": _lose,
    "join": _join,
    "drain": _drain,
    "finish": _finish,
    "pause": _pause,
    "resume": _resume,
    "weight": _weight,
    "pin": _pin,
    "unpin": _unpin,
}
