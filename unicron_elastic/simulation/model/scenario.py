"""What is simulated: a cluster, its jobs, and where the faults come from. Values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from unicron_elastic.base.require import require, require_count
from unicron_elastic.base.text import shown
from unicron_elastic.planning.model.jobs import JobSpec, MeasuredSteps
from unicron_elastic.simulation.history.events import History
from unicron_elastic.simulation.history.generate import Racks, generate
from unicron_elastic.simulation.history.presets import PRESETS, Repair
from unicron_elastic.simulation.history.replay import read_history
from unicron_elastic.simulation.model.durations import DURATIONS, with_own


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Histories of a preset, another one for each seed. None: as the preset has it."""

    preset: str
    duration_s: float | None = None
    fault_factor: float = 1.0
    repair: Repair | None = None
    racks: Racks | None = None

    def __post_init__(self) -> None:
        is_known = isinstance(self.preset, str) and self.preset in PRESETS
        require(is_known, f"there is no preset {shown(self.preset)}: known are {', '.join(PRESETS)}")

    def history(self, seed: int, nodes: int) -> History:
        """The history of a seed on so many nodes."""
        return generate(
            self.preset,
            seed,
            nodes=nodes,
            duration_s=self.duration_s,
            fault_factor=self.fault_factor,
            repair=self.repair,
            racks=self.racks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The history in a file, the same for every seed."""

    path: Path

    def history(self, seed: int, nodes: int) -> History:  # noqa: ARG002 - the file says what happens
        """What the file says; more nodes than it has are there all the time. Raises ``ValueError`` and ``OSError``."""
        found = read_history(self.path)
        return replace(found, nodes=max(nodes, found.nodes))


Source = Generated | Replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A cluster of ``nodes``, with ``spares`` more that are there from the beginning, and its jobs.

    ``checkpoint_s``: the interval of those policies that write checkpoints; None: of each its own.
    ``reattempt_fails`` and ``restart_fails``: how probable it is that a fault is worse than it seems, so that
    connecting anew, or restarting a process, does not help. Nobody has published either: 0 says that each fault is
    what the paper's table says it is, as its shares of severities do. ``durations``: what was measured on this cluster,
    by the names of ``durations.OWN``. Raises ``ValueError`` naming what is wrong.
    """

    name: str
    nodes: int
    jobs: tuple[JobSpec, ...]
    source: Source
    gpus_per_node: int = 8
    spares: int = 0
    checkpoint_s: float | None = None
    reattempt_fails: float = 0.0
    restart_fails: float = 0.0
    durations: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_count("nodes", self.nodes, 1)
        require_count("spares", self.spares)
        require_count("gpus_per_node", self.gpus_per_node, 1)
        require(len(self.jobs) > 0, "there are no jobs: give at least one")
        names = [job.name for job in self.jobs]
        require(len(set(names)) == len(names), "two jobs have the same name: each must have its own")
        for job in self.jobs:
            require(
                job.nproc_per_node == self.gpus_per_node,
                f"job {job.name}: nproc_per_node is {job.nproc_per_node}: "
                f"it must be gpus_per_node, which is {self.gpus_per_node}",
            )
            require(
                not isinstance(job.throughput, MeasuredSteps),
                f"job {job.name} has no throughput: a simulation needs rates_flops or workload",
            )
        for name in ("reattempt_fails", "restart_fails"):
            value = getattr(self, name)
            require(0.0 <= value <= 1.0, f"{name} is {value}: it must be a probability, from 0 to 1")
        with_own(DURATIONS, self.durations)
        require(
            self.checkpoint_s is None or (math.isfinite(self.checkpoint_s) and self.checkpoint_s > 0.0),
            f"checkpoint_s is {self.checkpoint_s}: it must be seconds, more than 0",
        )

    @property
    def all_nodes(self) -> int:
        """Return the number of nodes with spares."""
        return self.nodes + self.spares

    def history(self, seed: int) -> History:
        """What happens, for a seed. Raises ``ValueError`` or ``OSError`` for a file that cannot be read."""
        return self.source.history(seed, self.all_nodes)
