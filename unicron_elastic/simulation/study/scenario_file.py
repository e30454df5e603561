"""A scenario from a JSON file, read strictly: what is wrong is told with what would be right."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unicron_elastic.base.require import require, require_count, require_keys
from unicron_elastic.base.text import shown
from unicron_elastic.planning.model.jobs import JobSpec, parse_job
from unicron_elastic.simulation.history.generate import Racks
from unicron_elastic.simulation.history.presets import PRESETS, Repair
from unicron_elastic.simulation.model.scenario import Generated, Replayed, Scenario, Source
from unicron_elastic.simulation.study.job_set import default_jobs, job_set

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
