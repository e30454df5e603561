"""How fast a configuration is, relative to others, and how measured steps set the scale.

The time of a step is modelled as that of one replica's GPUs, in samples that they could have computed meanwhile::

    busy     = (k + (PP - 1)/v) * (micro_batch + s * g) + s * c * (1 - 1/DP)
    slowdown = busy / (B / DP) * (1 + t) * r * (1 + d)^log2(GPUs)
    FLOP/s   = u * GPUs / slowdown

with a global batch ``B``, ``k`` micro-batches on the replica that has most, ``(PP - 1)/v`` more for the pipeline's
bubble (1F1B with ``v`` virtual stages per GPU), ``g`` lost with every micro-batch and ``c`` with every step that
replicas synchronise, ``t`` for tensor parallelism, ``r`` for recomputed activations and ``d`` for every doubling.
``u`` and ``s`` are fitted to what was measured; the others are ``Overheads``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from unicron_elastic.base.require import require
from unicron_elastic.planning.model.configurations import Configuration, Workload

# The smallest micro-batch, where nobody says how many tokens a sample has.
MICRO_BATCH_TOKENS = 4096.0
RECOMPUTED = 4.0 / 3.0  # forward, forward again and backward, which takes twice as long as forward
SCALES = tuple(2.0 ** (power / 4) for power in range(-12, 13))  # of the overheads: an eighth to eight times
# A scale e times larger or smaller than 1 has to explain 5 % more of one measurement. Without such a weight, two
# measurements that differ by noise would give any scale.
SCALE_WEIGHT = 0.05
POINT_WEIGHT_MAX = 4.0  # that one point has in the fit, however often it was measured
RESIDUAL_MAX = 0.2  # beyond it a residual says more about that measurement than about its neighbours
RESIDUAL_WEIGHT = 1.0  # of "the model is right", beside the measurements around
OTHER_LAYOUT = 0.5  # how much a measurement says of another TP or PP


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What is assumed before anything is measured. A token of overhead is the time to compute one token.

    Both sides of a synchronisation grow with the parameters on a GPU, the bytes and the FLOPs per token: so in tokens
    the overhead depends on the machine (FLOP/s to bytes/s) but hardly on the model. Values from public measurements:
    docs/throughput.md. Raises ``ValueError`` if one is negative or not finite.
    """

    step_tokens: float = 3000.0  # a step's synchronisation of gradients
    micro_batch_tokens: float = 400.0  # launches and small kernels
    gather_tokens: float = 2000.0  # instead of both with sharding "full", where every micro-batch gathers weights
    link_flops_per_byte: float = 1500.0  # FLOP/s of a GPU to bytes/s between the GPUs of a node
    per_doubling: float = 0.01  # for every doubling of GPUs: variance between them, longer ways

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            require(math.isfinite(value) and value >= 0.0, f"{field.name} is {value}: it must be a number, 0 or more")


class Point(NamedTuple):
    """What was measured of one configuration: the FLOP/s of all its GPUs, and how much that weighs.

    The workload is the job's as it was then: one whose batch grows has others later.
    """

    workload: Workload
    configuration: Configuration
    flops_per_s: float
    weight: float


class Fit(NamedTuple):
    """The two numbers of a job: FLOP/s of a GPU that is never held up, and the factor on the overheads."""

    gpu_flops: float
    scale: float


def slowdown(workload: Workload, configuration: Configuration, overheads: Overheads, scale: float) -> float:
    """How much longer a step takes than if every GPU computed model FLOPs all the time. At least 1."""
    step, micro_batch = _overhead_samples(workload, configuration, overheads)
    replicas = configuration.replicas
    count = -(-workload.global_batch // (configuration.micro_batch * replicas))
    bubble = (configuration.pipeline - 1) / workload.virtual_stages  # arXiv 2104.04473, section 2.2
    busy = (count + bubble) * (configuration.micro_batch + scale * micro_batch)
    busy += scale * step * (1.0 - 1.0 / replicas)  # a ring's share: nothing is sent by one, nearly all by many
    growth = math.pow(1.0 + overheads.per_doubling, math.log2(configuration.gpus))
    again = RECOMPUTED if configuration.recompute else 1.0
    return (
        busy * replicas / workload.global_batch * (1.0 + _tensor(workload, configuration, overheads)) * again * growth
    )


def _overhead_samples(workload: Workload, configuration: Configuration, overheads: Overheads) -> tuple[float, float]:
    """The overhead of a step and that of a micro-batch, in samples of one replica."""
    if workload.transformer is not None:
        sample_tokens = float(workload.transformer.sequence)
    else:
        sample_tokens = MICRO_BATCH_TOKENS / min(workload.micro_batch_sizes)
    if workload.sharding == "full":
        return 0.0, overheads.gather_tokens / sample_tokens
    # A launch takes as long on a part of a layer, while the ranks of a tensor group compute the more tokens.
    launches = overheads.micro_batch_tokens * configuration.tensor
    return overheads.step_tokens / sample_tokens, launches / sample_tokens


def _tensor(workload: Workload, configuration: Configuration, overheads: Overheads) -> float:
    """What the all-reduces of tensor parallelism add to the time of computing.

    Four of them per layer, each sending ``2 (TP-1)/TP * 2 s b h`` bytes from a GPU (arXiv 2104.04473, section 3.2),
    while that GPU computes ``72 s b h^2 / TP`` FLOPs.
    """
    if workload.transformer is None:
        return 0.0
    return 16.0 / 72.0 * overheads.link_flops_per_byte * (configuration.tensor - 1) / workload.transformer.hidden


def fit(points: Sequence[Point], overheads: Overheads, gpu_flops: float) -> Fit:
    """The numbers that explain ``points`` best; ``gpu_flops`` and a scale of 1 where there are none.

    Least absolute residuals of log FLOP/s: a measurement that is far off pulls no harder than one that is a little off.
    """
    if not points:
        return Fit(gpu_flops, 1.0)
    weights = [min(point.weight, POINT_WEIGHT_MAX) for point in points]
    best: tuple[float, Fit] | None = None
    for scale in SCALES:
        unhindered = [
            math.log(point.flops_per_s / point.configuration.gpus)
            + math.log(slowdown(point.workload, point.configuration, overheads, scale))
            for point in points
        ]
        middle = weighted_median(unhindered, weights)
        loss = sum(weight * abs(value - middle) for value, weight in zip(unhindered, weights, strict=True))
        loss += SCALE_WEIGHT * abs(math.log(scale))
        if best is None or loss < best[0]:
            best = loss, Fit(math.exp(middle), scale)
    assert best is not None
    return best[1]


def correction(points: Sequence[tuple[Point, float]], configuration: Configuration) -> float:
    """The factor by which the model is wrong at ``configuration``, as far as measurements around it tell.

    ``points``: each with the log of measured over modelled. A measurement at half or twice the GPUs counts 1/e of one
    at the same number, and one of another TP or PP half; "the model is right" counts as one measurement.
    """
    total, weights = 0.0, RESIDUAL_WEIGHT
    layout = configuration.tensor, configuration.pipeline
    for point, residual in points:
        other = point.configuration
        doublings = abs(math.log2(other.gpus / configuration.gpus))
        weight = min(point.weight, 1.0) * math.exp(-doublings)
        weight *= 1.0 if (other.tensor, other.pipeline) == layout else OTHER_LAYOUT
        total += weight * max(-RESIDUAL_MAX, min(RESIDUAL_MAX, residual))
        weights += weight
    return math.exp(total / weights)


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The value with half of the weight on either side; between two such, their middle."""
    ordered = sorted(zip(values, weights, strict=True))
    half, below = sum(weights) / 2.0, 0.0
    for place, (value, weight) in enumerate(ordered):
        below += weight
        if below > half:
            return value
        if below == half and place + 1 < len(ordered):
            return (value + ordered[place + 1][0]) / 2.0
    return ordered[-1][0]
