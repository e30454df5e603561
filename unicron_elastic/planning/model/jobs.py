"""What a job asks of the cluster, as a value: its command, how many nodes it can use, and what it is worth.

The spec is read strictly: an error here is a typing error of a person, who is told what is wrong and what would be
right, before any node is moved for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from unicron_elastic.base.require import require, require_count, require_keys
from unicron_elastic.base.text import one_line, shown
from unicron_elastic.planning.model.configurations import Workload, parse_workload

NAME_CHARACTERS = 200  # as in the store's records
GPU_FLOPS = 125e12  # 40 % of an A100's peak, as in the model of throughput


@dataclass(frozen=True, slots=True)
class GivenRates:
    """T(t, x) is told: FLOP/s by number of units, from 0 on; 0.0 where the job cannot run.

    Raises ``ValueError`` if a rate is negative or not finite, or that of 0 units is not 0.
    """

    rates_flops: tuple[float, ...]

    def __post_init__(self) -> None:
        require(len(self.rates_flops) > 1, "rates_flops must have FLOP/s for 0 units, 1 unit and so on")
        for units, rate in enumerate(self.rates_flops):
            require(
                _is_number(rate) and math.isfinite(rate) and rate >= 0.0,
                f"rates_flops of {units} units is {rate!r}: it must be FLOP/s, 0 where the job cannot run",
            )
        require(self.rates_flops[0] == 0.0, f"rates_flops of 0 units is {self.rates_flops[0]!r}: it must be 0")


@dataclass(frozen=True, slots=True)
class Modelled:
    """T(t, x) comes from the model of throughput, corrected by what is measured."""

    workload: Workload


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Nobody knows the FLOPs of a step: each GPU counts as achieving ``gpu_flops`` where the job runs now.

    Raises ``ValueError`` if that is not more than 0.
    """

    gpu_flops: float = GPU_FLOPS

    def __post_init__(self) -> None:
        require(
            _is_number(self.gpu_flops) and math.isfinite(self.gpu_flops) and self.gpu_flops > 0.0,
            f"gpu_flops is {self.gpu_flops!r}: it must be FLOP/s, more than 0",
        )


Throughput = GivenRates | Modelled | MeasuredSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What one job runs, on how many nodes, and what its FLOP/s are worth.

    ``max_nodes`` None: as many as there are. Nodes come in units of ``unit_nodes``. ``pinned_nodes``: exactly so many
    or none. ``paused``: it waits with none. Whoever may read the store may read it: ``env`` must hold no password.
    Raises ``ValueError`` naming the job, the field that is wrong, and what would be right.
    """

    name: str
    command: tuple[str, ...]
    directory: str
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    nproc_per_node: int = 1
    min_nodes: int = 1
    max_nodes: int | None = None
    unit_nodes: int = 1
    weight: float = 1.0
    pinned_nodes: int | None = None
    paused: bool = False
    throughput: Throughput = field(default_factory=MeasuredSteps)

    def __post_init__(self) -> None:
        require(
            isinstance(self.name, str) and self.name.strip() != "" and len(self.name) <= NAME_CHARACTERS,
            f"a job is called {shown(self.name)}: its name must have 1 to {NAME_CHARACTERS} characters",
        )
        _require_command(self)
        _require_counts(self)
        _require_pin(self)
        where = f"job {self.name}"
        require(
            _is_number(self.weight) and math.isfinite(self.weight) and self.weight >= 0.0,
            f"{where}: weight is {self.weight!r}: it must be a number, 0 or more",
        )
        require(isinstance(self.paused, bool), f"{where}: paused is {self.paused!r}: it must be true or false")
        if isinstance(self.throughput, Modelled):
            gpus, unit = self.throughput.workload.gpus_per_unit, self.nproc_per_node * self.unit_nodes
            require(
                gpus == unit,
                f"{where}: gpus_per_unit of its workload is {gpus}: it must be nproc_per_node times unit_nodes, {unit}",
            )

    @property
    def least_nodes(self) -> int:
        """The smallest whole number of units that meets the minimum, in nodes."""
        return -(-self.min_nodes // self.unit_nodes) * self.unit_nodes

    def to_json(self) -> dict[str, Any]:
        """The spec as plain data; ``parse_job`` makes the same spec of it."""
        found: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            **found,
            "command": list(self.command),
            "env": dict(self.env),
            "throughput": _throughput_json(self.throughput),
        }


def parse_job(told: object) -> JobSpec:
    """A job from plain data, as it stands in a JSON or YAML file.

    Raises ``ValueError`` for an unknown or missing key and for a value of the wrong kind or size.
    """
    options = _mapping(told, "a job")
    name = options.get("name", "")
    name = one_line(name, NAME_CHARACTERS) if isinstance(name, str) else shown(name)
    require_keys(options, [each.name for each in fields(JobSpec)], f"job {name}", ("name", "command", "directory"))
    values = dict(options)
    command = values["command"]
    require(
        isinstance(command, list | tuple),
        f"job {name}: command is {command!r}: it must be a list of words, such as ['train.py', '--epochs', '3']",
    )
    values["command"] = tuple(command)
    if "throughput" in values:
        try:
            values["throughput"] = _parse_throughput(values["throughput"])
        except ValueError as error:
            raise ValueError(f"job {name}: throughput: {error}") from None
    return JobSpec(**values)


def parse_jobs(told: object) -> tuple[JobSpec, ...]:
    """Several jobs. Raises ``ValueError`` as ``parse_job`` does, and if two have the same name."""
    if not isinstance(told, list | tuple):
        raise ValueError(f"jobs are {told!r}: they must be a list of jobs")
    jobs = tuple(parse_job(each) for each in told)
    twice = _first_repeated(job.name for job in jobs)
    require(twice is None, f"two jobs are called {twice}: each must have a name of its own")
    return jobs


def _parse_throughput(told: object) -> Throughput:
    options = _mapping(told, "it")
    kinds = ["rates_flops", "workload", "gpu_flops"]
    require_keys(options, kinds, "it", ())
    require(len(options) == 1, f"it has {', '.join(options) or 'nothing'}: it must have one of {', '.join(kinds)}")
    ((kind, value),) = options.items()
    if kind == "workload":
        return Modelled(parse_workload(_mapping(value, "workload")))
    if kind == "gpu_flops":
        return MeasuredSteps(value)
    require(isinstance(value, list | tuple), f"rates_flops is {value!r}: it must be a list of FLOP/s")
    return GivenRates(tuple(value))


def _throughput_json(throughput: Throughput) -> dict[str, Any]:
    match throughput:
        case GivenRates(rates):
            return {"rates_flops": list(rates)}
        case MeasuredSteps(gpu_flops):
            return {"gpu_flops": gpu_flops}
        case Modelled(workload):
            found = asdict(workload)
            return {"workload": {**found, "micro_batch_sizes": list(workload.micro_batch_sizes)}}


def _require_command(spec: JobSpec) -> None:
    where = f"job {spec.name}"
    require(
        len(spec.command) > 0 and all(isinstance(word, str) for word in spec.command) and spec.command[0].strip() != "",
        f"{where}: command is {list(spec.command)!r}: it must be a list of words, those after unicron-run",
    )
    require(
        isinstance(spec.directory, str) and spec.directory.startswith("/"),
        f"{where}: directory is {spec.directory!r}: it must be an absolute path, which exists on every node",
    )
    is_env = isinstance(spec.env, Mapping) and all(isinstance(word, str) for each in spec.env.items() for word in each)
    require(is_env, f"{where}: env must be an object of texts, such as {{'NCCL_DEBUG': 'WARN'}}")
    words = [*spec.command, spec.directory, *spec.env, *spec.env.values()]
    require(
        not any("\0" in word for word in words),
        f"{where}: command, directory and env must hold no NUL, which no process can be given",
    )


def _require_counts(spec: JobSpec) -> None:
    where = f"job {spec.name}"
    for name in ("nproc_per_node", "min_nodes", "unit_nodes"):
        require_count(f"{where}: {name}", getattr(spec, name), 1)
    if spec.max_nodes is None:
        return
    require_count(f"{where}: max_nodes", spec.max_nodes, 1)
    require(
        spec.min_nodes <= spec.max_nodes,
        f"{where}: min_nodes is {spec.min_nodes}: it must be at most max_nodes, which is {spec.max_nodes}",
    )
    require(
        spec.least_nodes <= spec.max_nodes,
        f"{where}: unit_nodes is {spec.unit_nodes}: "
        f"a multiple of it must lie between min_nodes, {spec.min_nodes}, and max_nodes, {spec.max_nodes}",
    )


def _require_pin(spec: JobSpec) -> None:
    if spec.pinned_nodes is None:
        return
    where = f"job {spec.name}: pinned_nodes"
    require_count(where, spec.pinned_nodes, 1)
    most = math.inf if spec.max_nodes is None else spec.max_nodes
    require(
        spec.min_nodes <= spec.pinned_nodes <= most and spec.pinned_nodes % spec.unit_nodes == 0,
        f"{where} is {spec.pinned_nodes}: it must be a multiple of {spec.unit_nodes} "
        f"between min_nodes and max_nodes; to let it wait, set paused",
    )


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {value!r}: it must be an object")
    return value


def _first_repeated(names: Iterable[str]) -> str | None:
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
