"""What a GPU of this cluster achieves, for jobs of which that is not known yet.

A plan compares FLOP/s. If one job was measured, and another still counts with what is assumed of some GPU
elsewhere, the comparison says nothing: the assumption may be off by any factor. So what jobs of the cluster are
known to achieve per GPU is taken for the others until they are measured as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

from unicron_elastic.planning.model.jobs import GPU_FLOPS, GivenRates, JobSpec, MeasuredSteps
from unicron_elastic.planning.model.measured import MeasuredJob, newest_rates

STEPS_PER_DECADE = 20  # 12 % each: what a GPU is taken to achieve must not change with every measurement


def known_gpu_flops(jobs: Iterable[tuple[JobSpec, MeasuredJob | None]]) -> float:
    """FLOP/s of one GPU: the median of the jobs that are known by more than an assumption, roughly."""
    found = [rate for spec, measured in jobs if (rate := _gpu_flops(spec, measured)) > 0.0]
    if not found:
        return GPU_FLOPS
    return float(10.0 ** (round(math.log10(median(found)) * STEPS_PER_DECADE) / STEPS_PER_DECADE))


def _gpu_flops(spec: JobSpec, measured: MeasuredJob | None) -> float:
    """On the fewest nodes that are known; 0.0 if nobody knows the job's FLOPs."""
    if isinstance(spec.throughput, GivenRates):
        rates = spec.throughput.rates_flops
    elif measured is None or not _has_flops(spec, measured):
        return 0.0
    else:
        fit = (each.nodes for each in measured.steps if each.nodes % spec.unit_nodes == 0)
        units = min(fit, default=0) // spec.unit_nodes
        rates = (0.0, *newest_rates(spec, measured, units)[units:][:1])
        return rates[1] / (units * spec.unit_nodes * spec.nproc_per_node) if units and len(rates) > 1 else 0.0
    least = next((units for units, rate in enumerate(rates) if rate > 0.0), 0)
    return rates[least] / (least * spec.unit_nodes * spec.nproc_per_node) if least else 0.0


def _has_flops(spec: JobSpec, measured: MeasuredJob) -> bool:
    """Whether the script or a workload says how many FLOPs a step has."""
    if isinstance(spec.throughput, MeasuredSteps):
        return any(each.flops_per_step is not None for each in measured.steps)
    workload = getattr(spec.throughput, "workload", None)
    return workload is not None and (workload.flops_per_sample is not None or workload.transformer is not None)
