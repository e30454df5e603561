"""What one job achieves on how many nodes, by the planner's model of throughput, and how it is laid out there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from unicron_elastic.planning.model.configurations import Workload
from unicron_elastic.planning.model.jobs import GivenRates, JobSpec, MeasuredSteps, Modelled
from unicron_elastic.planning.model.measured import first_rates
from unicron_elastic.planning.model.memory import parameters
from unicron_elastic.planning.model.throughput import Estimate, ThroughputModel, estimates

STEP_S = 10.0  # of a job whose rates are given: nothing is known of its steps; those of GPT-3 sizes take 3 to 30 s
PARAMETERS = 7e9  # of such a job, for the bytes that it moves


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """One job on 0 to so many nodes; tuples are by number of units of ``unit_nodes``.

    ``rates_flops``: T(t, x), 0.0 where it cannot run. ``replicas``: of the model; ``layouts``: what a replica is made
    of, equal where nodes can come and go without another division of the model.
    """

    rates_flops: tuple[float, ...]
    replicas: tuple[int, ...]
    layouts: tuple[tuple[int, int], ...]
    unit_nodes: int
    parameters: float
    step_flops: float | None
    node_gpus: int
    _best: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)  # units, by the most

    def units(self, nodes: int) -> int:
        """The largest number of units in ``nodes`` on which it is fastest; 0 if it cannot run on any."""
        most = min(nodes // self.unit_nodes, len(self.rates_flops) - 1)
        if most not in self._best:
            self._best[most] = self._fastest(most)
        return self._best[most]

    def _fastest(self, most: int) -> int:
        best = 0
        for units in range(most, 0, -1):
            if self.rates_flops[units] > self.rates_flops[best]:
                best = units
            if best and units * 2 < most:
                break  # no configuration makes half as many faster
        return best

    def rate_flops(self, nodes: int) -> float:
        """What it achieves with ``nodes``, of which it leaves idle what would make it slower."""
        return self.rates_flops[self.units(nodes)]

    def used_nodes(self, nodes: int) -> int:
        """How many of ``nodes`` it makes use of."""
        return self.units(nodes) * self.unit_nodes

    def replicas_on(self, nodes: int) -> int:
        """How many copies of the model there are."""
        return self.replicas[self.units(nodes)]

    def layout_on(self, nodes: int) -> tuple[int, int]:
        """TP and PP; (0, 0): it does not run."""
        return self.layouts[self.units(nodes)]

    def lost_part(self, nodes: int, gpus: int) -> float:
        """Which part of the job stands still without ``gpus`` of those on ``nodes``, the others going on."""
        replicas = self.replicas_on(nodes)
        if not replicas:
            return 1.0
        tensor, pipeline = self.layout_on(nodes)
        per_replica = max(tensor * pipeline, 1)
        return min(1.0, -(-gpus // per_replica) / replicas)

    def step_s(self, nodes: int) -> float:
        """How long a step takes."""
        rate = self.rate_flops(nodes)
        return STEP_S if self.step_flops is None or not rate else self.step_flops / rate


def shape_of(spec: JobSpec, nodes: int, *, uneven: bool) -> JobShape:
    """The shape of a job on at most ``nodes``; ``uneven``: replicas may have different numbers of micro-batches.

    Raises ``ValueError`` for a job of which neither rates nor a workload are given.
    """
    most = min(nodes, nodes if spec.max_nodes is None else spec.max_nodes) // spec.unit_nodes
    if isinstance(spec.throughput, MeasuredSteps):
        raise ValueError(
            f"job {spec.name}: its throughput is to be measured, which a simulation cannot: "
            "give rates_flops or workload"
        )
    if isinstance(spec.throughput, GivenRates):
        rates = first_rates(spec, most)
        replicas = tuple(units if rate else 0 for units, rate in enumerate(rates))
        layouts = tuple((spec.nproc_per_node * spec.unit_nodes, 1) if rate else (0, 0) for rate in rates)
        return JobShape(
            rates_flops=rates,
            replicas=replicas,
            layouts=layouts,
            unit_nodes=spec.unit_nodes,
            parameters=PARAMETERS,
            step_flops=None,
            node_gpus=spec.nproc_per_node,
        )
    return _modelled(spec, spec.throughput, most, uneven)


def _modelled(spec: JobSpec, throughput: Modelled, most: int, uneven: bool) -> JobShape:
    workload = replace(throughput.workload, uneven=uneven or throughput.workload.uneven)
    found = _estimates(workload, most)
    known = [each.configuration for each in found]
    is_known = workload.flops_per_sample is not None or workload.transformer is not None
    return JobShape(
        rates_flops=tuple(each.flops_per_s for each in found),
        replicas=tuple(0 if each is None else each.replicas for each in known),
        layouts=tuple((0, 0) if each is None else (each.tensor, each.pipeline) for each in known),
        unit_nodes=spec.unit_nodes,
        parameters=float(parameters(workload) or PARAMETERS),
        step_flops=workload.step_flops if is_known else None,
        node_gpus=spec.nproc_per_node,
    )


@lru_cache(maxsize=256)  # jobs of the same kind, policies and seeds share it
def _estimates(workload: Workload, most: int) -> tuple[Estimate, ...]:
    return estimates(ThroughputModel(workload=workload), most)
