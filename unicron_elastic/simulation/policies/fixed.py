"""A cluster without a coordinator: nodes are divided once, and each job keeps its own.

A node that comes back goes to the job that lost it. Spares, and nodes that no job had use for, take the place of lost
ones at once. The oracle divides anew at every change, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable

from unicron_elastic.planning.model.jobs import JobSpec
from unicron_elastic.simulation.model.accounting import IncidentEntry
from unicron_elastic.simulation.model.engine import SimulationEngine
from unicron_elastic.simulation.model.shape import JobShape
from unicron_elastic.simulation.model.training import Training
from unicron_elastic.simulation.policies.division import Jobs, best_division, division

Joins = Callable[[Training, int, IncidentEntry | None], None]


class FixedCluster:
    """Nodes by number. ``joins``: has so many nodes join a job, which takes the time that the policy needs."""

    def __init__(
        self,
        engine: SimulationEngine,
        jobs: dict[str, tuple[JobSpec, JobShape, Training]],
        rule: str,
        node_gpus: int,
        joins: Joins,
    ) -> None:
        self._engine, self._jobs, self._rule, self._node_gpus, self._joins = engine, jobs, rule, node_gpus, joins
        self._alive: list[str] = []
        self._nodes: dict[int, str] = {}  # those that are there, and the job that each is for
        self._lost_by: dict[int, str] = {}
        self._wants: dict[str, int] = {}  # how many nodes a job is to have
        self.plans = self.moves = self.looks = self.writes = 0

    # -- what the world does to it ---------------------------------------------------------------------------------

    def begin(self, nodes: list[int], names: list[str]) -> None:
        """All these nodes and jobs are there."""
        self._nodes = dict.fromkeys(nodes, "")
        self._alive = list(names)
        self._divide()
        for name in names:
            count = sum(job == name for job in self._nodes.values())
            self.training(name).resize(count)

    def submit(self, name: str) -> None:
        """A job arrives: it gets what is idle, up to its share."""
        self._alive.append(name)
        self._wants = self._shares()
        self._fill(None)

    def end(self, name: str) -> None:
        """A job is done; its nodes are idle."""
        self._alive = [each for each in self._alive if each != name]
        self._wants.pop(name, None)
        self._nodes = {node: "" if job == name else job for node, job in self._nodes.items()}
        self.training(name).resize(0)
        self._fill(None)

    def come(self, node: int) -> None:
        """A node is there that was not: it goes to the job that lost it, or to one that lacks one."""
        if node in self._nodes:
            return
        self._nodes[node] = ""
        job = self._lost_by.pop(node, "")
        if job in self._alive and self._has(job) < self._wants.get(job, 0):
            self._give(node, job, None)
            return
        if all(self._has(name) >= count for name, count in self._wants.items()):
            self._wants = self._shares()  # there are more nodes than ever
        self._fill(None)

    def go(self, node: int, entry: IncidentEntry | None, *, is_broken: bool = False) -> None:  # noqa: ARG002
        """A node is gone."""
        job = self._nodes.pop(node, None)
        if not job:
            return
        self._lost_by[node] = job
        training = self.training(job)
        if entry is not None and training.size:
            training.lack(entry, self._node_gpus)
        elif training.size:
            training.grow(-1)
        self._fill(entry)

    def drain(self, node: int) -> None:
        """A node is announced to go soon: nobody makes use of that."""

    # -- what is ---------------------------------------------------------------------------------------------------

    def job_of(self, node: int) -> str:
        """The job that a node is for; "" for none."""
        return self._nodes.get(node, "")

    def is_here(self, node: int) -> bool:
        """Whether it is there."""
        return node in self._nodes

    def training(self, name: str) -> Training:
        """How a job is carried out."""
        return self._jobs[name][2]

    def spec_min_nodes(self, name: str) -> int:
        """Without fewer a job cannot go on."""
        return self._jobs[name][0].least_nodes

    # -- division --------------------------------------------------------------------------------------------------

    def _shares(self) -> dict[str, int]:
        found: Jobs = [self._jobs[name][:2] for name in sorted(self._alive)]
        return division(self._rule, found, len(self._nodes))

    def _divide(self) -> None:
        self._wants = self._shares()
        idle = sorted(self._nodes)
        for name in sorted(self._wants):
            for node in idle[: self._wants[name]]:
                self._nodes[node] = name
            idle = idle[self._wants[name] :]

    def _has(self, name: str) -> int:
        return sum(job == name for job in self._nodes.values())

    def _fill(self, entry: IncidentEntry | None) -> None:
        """Idle nodes go to jobs that lack some."""
        idle = sorted(node for node, job in self._nodes.items() if not job)
        for name in sorted(self._wants):
            lacks = self._wants[name] - self._has(name)
            for node in idle[: max(lacks, 0)]:
                self._give(node, name, entry)
            idle = idle[max(lacks, 0) :]

    def _give(self, node: int, name: str, entry: IncidentEntry | None) -> None:
        self._nodes[node] = name
        self.moves += 1
        self._joins(self.training(name), 1, entry)


class OracleCluster(FixedCluster):
    """The best division at every moment. It knows what comes, so nothing has to be noticed, moved or computed again."""

    def _divide(self) -> None:
        found: Jobs = [self._jobs[name][:2] for name in sorted(self._alive)]
        counts = best_division(found, len(self._nodes))
        idle = sorted(self._nodes)
        self._nodes = dict.fromkeys(idle, "")
        for name, count in sorted(counts.items()):
            for node in idle[:count]:
                self._nodes[node] = name
            idle = idle[count:]
            self.training(name).resize(count)
        self.plans += 1

    def submit(self, name: str) -> None:
        self._alive.append(name)
        self._divide()

    def end(self, name: str) -> None:
        self._alive = [each for each in self._alive if each != name]
        self.training(name).resize(0)
        self._divide()

    def come(self, node: int) -> None:
        self._nodes.setdefault(node, "")
        self._divide()

    def go(self, node: int, entry: IncidentEntry | None, *, is_broken: bool = False) -> None:  # noqa: ARG002
        if self._nodes.pop(node, None) is not None:
            self._divide()
