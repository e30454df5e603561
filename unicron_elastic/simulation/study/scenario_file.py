"""A scenario from a JSON file, read strictly: what is wrong is told with what would be right."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from unicron_elastic.base.require import require, require_count, require_keys
from unicron_elastic.base.text import shown
from unicron_elastic.planning.model.configurations import Workload
from unicron_elastic.planning.model.jobs import JobSpec, Modelled, parse_job
from unicron_elastic.planning.model.shape import Transformer
from unicron_elastic.simulation.history.generate import Racks
from unicron_elastic.simulation.history.presets import PRESETS, Repair
from unicron_elastic.simulation.model.scenario import Generated, Replayed, Scenario, Source

# Jobs to begin with, where nobody has given any: GPT-3 sizes, as in ``benchmarks/multi_task.py``, in whole nodes.
#
# Known of the Unicron paper's comparison (arXiv 2401.00134), from memory and not from its text: six tasks on 128
# GPUs, of 1.3 to 70 billion parameters, in five cases of sizes and weights of 0.5 to 2.0. Batches, minimums and which
# case has which are chosen here: see docs/planning.md.


GIB = 2**30
VOCABULARY, SEQUENCE = 51200, 2048
# Layers, hidden, heads, samples of a global batch, and the fewest nodes of 8 A100-80GB that have the memory. From table
# 2.1 of arXiv 2005.14165, and Llama 2's shape for 70B; as in benchmarks/_multi_task_cases.py.
SIZES: Mapping[str, tuple[int, int, int, int, int]] = MappingProxyType(
    {
        "1.3B": (24, 2048, 16, 512, 1),
        "7B": (32, 4096, 32, 1024, 1),
        "13B": (40, 5120, 40, 1024, 1),
        "70B": (80, 8192, 64, 1536, 2),
        "175B": (96, 12288, 96, 1536, 6),
    }
)
_SAME, _MIXED = ("7B",) * 6, ("1.3B", "1.3B", "7B", "7B", "13B", "70B")
_EQUAL, _RISING = (1.0,) * 6, (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)
JOB_SETS: Mapping[str, tuple[tuple[str, ...], tuple[float, ...]]] = MappingProxyType(
    {
        "case-1": (_SAME, _EQUAL),
        "case-2": (_SAME, _RISING),
        "case-3": (_MIXED, _EQUAL),
        "case-4": (_MIXED, _RISING),
        "case-5": (_MIXED, _RISING[::-1]),
        "one": (("175B",), (1.0,)),
    }
)
SIX_NODES = 64  # up to so many nodes six jobs are the default, above one
REPLICA_BATCH = 32  # samples per replica of the one job, where it has more nodes than its batch is meant for


def gpt(
    name: str, size: str, *, weight: float = 1.0, gpus_per_node: int = 8, max_nodes: int | None = None, batch: int = 0
) -> JobSpec:
    """A job that trains a GPT-3 of that size under Megatron-LM's rules: ZeRO-1, TP within a node, up to 16 stages."""
    require(size in SIZES, f"there is no size {size!r}: known are {', '.join(SIZES)}")
    layers, hidden, heads, samples, least = SIZES[size]
    workload = Workload(
        global_batch=batch or samples,
        micro_batch_sizes=(1, 2, 4, 8),
        gpus_per_unit=gpus_per_node,
        gpus_per_node=gpus_per_node,
        gpu_memory_bytes=80 * GIB,
        transformer=Transformer(layers=layers, hidden=hidden, heads=heads, sequence=SEQUENCE, vocabulary=VOCABULARY),
        sharding="optimizer",
        recompute=None,
        max_tensor=gpus_per_node,
        max_pipeline=16,
    )
    return JobSpec(
        name=name,
        command=("train.py",),
        directory="/",
        nproc_per_node=gpus_per_node,
        min_nodes=least,
        max_nodes=max_nodes,
        weight=weight,
        throughput=Modelled(workload),
    )


def job_set(name: str, nodes: int, gpus_per_node: int = 8) -> tuple[JobSpec, ...]:
    """Jobs by the name of a set. Raises ``ValueError`` for an unknown one."""
    require(name in JOB_SETS, f"there are no jobs {name!r}: known are {', '.join(JOB_SETS)}, or a file")
    if name == "one":
        replicas = nodes * gpus_per_node // 64  # of 64 GPUs or fewer, TP 8 and PP 8
        return (gpt("gpt", "175B", gpus_per_node=gpus_per_node, batch=max(1536, REPLICA_BATCH * replicas)),)
    sizes, weights = JOB_SETS[name]
    return tuple(
        gpt(f"job-{number}-{size}", size, weight=weight, gpus_per_node=gpus_per_node)
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True), 1)
    )


def default_jobs(nodes: int, gpus_per_node: int = 8) -> tuple[JobSpec, ...]:
    """Six of mixed sizes and equal weights on a small cluster, one large job on a large one."""
    return job_set("case-3" if nodes <= SIX_NODES else "one", nodes, gpus_per_node)


KEYS = (
    "name",
    "nodes",
    "gpus_per_node",
    "spares",
    "jobs",
    "history",
    "checkpoint_s",
    "reattempt_fails",
    "restart_fails",
    "durations",
)
HISTORY_KEYS = ("preset", "file", "days", "fault_factor", "repair", "racks")


def read_scenario(path: Path) -> Scenario:
    """The scenario in a file. Raises ``ValueError`` naming the file and what is wrong, and ``OSError``."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: it must be JSON, and is not: {error}") from None
    try:
        return parse_scenario(told, path.parent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_scenario(told: object, folder: Path) -> Scenario:
    """The scenario that plain data say; files are named from ``folder``. Raises ``ValueError``."""
    options = _mapping(told, "a scenario")
    require_keys(options, KEYS, "a scenario", ("name", "nodes", "history"))
    nodes, gpus = options["nodes"], options.get("gpus_per_node", 8)
    require_count("nodes", nodes, 1)
    require_count("gpus_per_node", gpus, 1)
    values: dict[str, Any] = {key: options[key] for key in ("spares",) if key in options}
    for key in ("checkpoint_s", "reattempt_fails", "restart_fails"):
        if key in options:
            values[key] = _number(options[key], key)
    if "durations" in options:
        own = _mapping(options["durations"], "durations")
        values["durations"] = {key: _number(value, key) for key, value in own.items()}
    require(isinstance(options["name"], str) and options["name"].strip() != "", "name must be a text that is not blank")
    jobs = parse_jobs_told(options["jobs"], nodes, gpus) if "jobs" in options else default_jobs(nodes, gpus)
    source = _source(options["history"], folder)
    return Scenario(name=options["name"], nodes=nodes, gpus_per_node=gpus, jobs=jobs, source=source, **values)


def preset_scenario(name: str, jobs: str | None = None) -> Scenario:
    """A preset's cluster and faults, with the jobs of that set, or with those that suit its size."""
    source = Generated(preset=name)
    nodes = PRESETS[name].nodes
    return Scenario(name=name, nodes=nodes, jobs=_jobs(jobs, nodes), source=source)


def replay_scenario(path: Path, jobs: str | None = None) -> Scenario:
    """A cluster as large as the history in a file. Raises ``ValueError`` and ``OSError`` if it cannot be read."""
    source = Replayed(path=path)
    nodes = source.history(0, 1).nodes
    return Scenario(name=path.stem, nodes=nodes, jobs=_jobs(jobs, nodes), source=source)


def parse_jobs_told(told: object, nodes: int, gpus_per_node: int) -> tuple[JobSpec, ...]:
    """Jobs: the name of a set, or a list as for ``unicron jobs``, where command and directory may be left out."""
    if isinstance(told, str):
        return job_set(told, nodes, gpus_per_node)
    if not isinstance(told, list):
        raise ValueError(f"jobs are {told!r}: they must be a list of jobs, or the name of a set")
    found = []
    for each in told:
        options = _mapping(each, "a job")
        defaults = {"command": ["train.py"], "directory": "/", "nproc_per_node": gpus_per_node}
        found.append(parse_job({**defaults, **options}))
    return tuple(found)


def _jobs(name: str | None, nodes: int) -> tuple[JobSpec, ...]:
    return default_jobs(nodes) if name is None else job_set(name, nodes)


def _source(told: object, folder: Path) -> Source:
    options = _mapping(told, "history")
    require_keys(options, HISTORY_KEYS, "history", ())
    require(("preset" in options) != ("file" in options), "history must have either preset or file")
    if "file" in options:
        require(len(options) == 1, "history has a file: what happens is in it, so it can have no other keys")
        require(isinstance(options["file"], str), f"file is {options['file']!r}: it must be a path")
        return Replayed(path=folder / options["file"])
    days = options.get("days")
    require(days is None or _number(days, "days") > 0.0, f"days is {days!r}: it must be more than 0")
    return Generated(
        preset=options["preset"],
        duration_s=None if days is None else _number(days, "days") * 86_400.0,
        fault_factor=_number(options.get("fault_factor", 1.0), "fault_factor"),
        repair=None if options.get("repair") is None else Repair.parse(str(options["repair"])),
        racks=None if options.get("racks") is None else _racks(options["racks"]),
    )


def _racks(told: object) -> Racks:
    options = _mapping(told, "racks")
    require_keys(options, ("nodes", "share"), "racks", ("nodes", "share"))
    require_count("nodes of a rack", options["nodes"], 1)
    return Racks(nodes=options["nodes"], share=_number(options["share"], "share of racks"))


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {value!r}: it must be an object")
    return value


def _number(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: it must be a number")
    if abs(value) > sys.float_info.max:
        raise ValueError(f"{name} is {shown(value)}: nobody needs so large a number")
    return float(value)
