"""T(t, x): the FLOP/s that a job achieves on x units, measured where it was measured and modelled elsewhere.

The product is ``rates(model, x_max)``: FLOP/s by number of units, 0.0 where the job cannot run. It is neither concave
nor monotone: seven workers may be slower than six, and five may be impossible where four are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from unicron_elastic.base.require import require
from unicron_elastic.planning.model.calibration import Overheads, Point, correction, fit, slowdown, weighted_median
from unicron_elastic.planning.model.configurations import Configuration, Workload
from unicron_elastic.planning.model.memory import memory_bytes
from unicron_elastic.planning.model.search import configurations, is_allowed, why_none
from unicron_elastic.planning.model.shape import require_counts

# Per GPU, before anything is measured: 40 % of an A100's 312 TFLOP/s in bf16. Another GPU needs another value.
GPU_FLOPS = 125e12
DEFAULTS = Overheads()
# More that a modelled configuration must promise to be preferred to one that divides the model less: between TP and PP
# the model is no better than that (docs/throughput.md).
LAYOUT_MARGIN = 0.1
KEPT = 15  # measurements of one configuration on x units; older ones are dropped, so that a changed machine is seen


@dataclass(frozen=True, slots=True)
class Measurement:
    """``flops_per_s`` of all GPUs of ``units`` together. ``configuration`` is None where nobody said which it was."""

    units: int
    flops_per_s: float
    weight: float
    configuration: Configuration | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputModel:
    """One job: what it computes, what was measured of it, and what is assumed of the rest.

    ``gpu_flops``: model FLOP/s that a GPU is expected to achieve, before anything is measured. ``refused``: where it
    was tried and did not run; a configuration of None stands for all. Raises ``ValueError`` if ``gpu_flops`` is not
    positive.
    """

    workload: Workload
    measured: tuple[Measurement, ...] = ()
    refused: frozenset[tuple[int, Configuration | None]] = frozenset()
    overheads: Overheads = DEFAULTS
    gpu_flops: float = GPU_FLOPS

    def __post_init__(self) -> None:
        _require_positive("gpu_flops", self.gpu_flops)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a job achieves on ``units``, and how. ``reason`` says where the figure is from, or why it is 0."""

    units: int
    flops_per_s: float
    configuration: Configuration | None
    is_measured: bool
    reason: str


def observed(
    model: ThroughputModel,
    units: int,
    flops_per_s: float,
    *,
    weight: float = 1.0,
    configuration: Configuration | None = None,
) -> ThroughputModel:
    """The model after one more measurement of ``units``; ``weight`` is, say, how many steps it is the mean of.

    What ran can run: a measurement lifts what ``ruled_out`` said of the same configuration there. Raises ``ValueError``
    if ``units`` is no whole number of at least 1, a number is not positive, or the configuration takes other GPUs.
    """
    require_counts(units=units)
    _require_positive("flops_per_s", flops_per_s)
    _require_positive("weight", weight)
    _require_all_gpus(model.workload, units, configuration)
    key = units, configuration
    alike = [place for place, each in enumerate(model.measured) if (each.units, each.configuration) == key]
    dropped = alike[: len(alike) - KEPT + 1] if len(alike) >= KEPT else []
    kept = (each for place, each in enumerate(model.measured) if place not in dropped)
    latest = Measurement(units, float(flops_per_s), float(weight), configuration)
    return replace(model, measured=(*kept, latest), refused=model.refused - {key, (units, None)})


def ruled_out(model: ThroughputModel, units: int, configuration: Configuration | None = None) -> ThroughputModel:
    """The model after an attempt that did not run, for lack of memory say: in that configuration, or in any at all.

    Raises ``ValueError`` if ``units`` is no whole number of at least 1, or if the configuration takes other GPUs.
    """
    require_counts(units=units)
    _require_all_gpus(model.workload, units, configuration)
    measured = model.measured
    if configuration is not None and configuration == _likely(model, units):
        # What was measured there without a configuration is thought to have been this one.
        measured = tuple(each for each in measured if (each.units, each.configuration) != (units, None))
    return replace(model, measured=measured, refused=model.refused | {(units, configuration)})


def rates(model: ThroughputModel, x_max: int) -> tuple[float, ...]:
    """FLOP/s by number of units from 0 to ``x_max``, so ``x_max + 1`` of them; 0.0 where the job cannot run.

    Raises ``ValueError`` if ``x_max`` is negative.
    """
    return tuple(each.flops_per_s for each in estimates(model, x_max))


def estimates(model: ThroughputModel, x_max: int) -> tuple[Estimate, ...]:
    """The same with configurations and reasons. Raises ``ValueError`` if ``x_max`` is negative."""
    require(isinstance(x_max, int) and x_max >= 0, f"x_max is {x_max!r}: it must be a whole number, at least 0")
    fitted = _Fitted(model)
    return tuple(fitted.estimate(units) for units in range(x_max + 1))


def estimate(model: ThroughputModel, units: int) -> Estimate:
    """What the job achieves on ``units``. Raises ``ValueError`` if that is negative."""
    require(isinstance(units, int) and units >= 0, f"units is {units!r}: it must be a whole number, at least 0")
    return _Fitted(model).estimate(units)


def achieved_flops(workload: Workload, step_s: float) -> float:
    """FLOP/s of a job whose step takes ``step_s``. Raises ``ValueError`` if that is not positive, or FLOPs unknown."""
    _require_positive("step_s", step_s)
    return workload.step_flops / step_s


def assumed_flops_per_sample(workload: Workload, units: int, step_s: float, gpu_flops: float = GPU_FLOPS) -> float:
    """FLOPs per sample for a job of which nobody tells them: its GPUs count as achieving ``gpu_flops`` each at present.

    So a job without known FLOPs is worth as much per GPU, where it runs now, as any other that achieves ``gpu_flops``,
    and weights mean the same for both. Give all such jobs of a cluster the same ``gpu_flops``, best what its other jobs
    achieve. Raises ``ValueError`` if a number is not positive.
    """
    require_counts(units=units)
    _require_positive("step_s", step_s)
    _require_positive("gpu_flops", gpu_flops)
    return gpu_flops * units * workload.gpus_per_unit * step_s / workload.global_batch


class _Fitted:
    """A model with its fit, computed once for all numbers of units."""

    def __init__(self, model: ThroughputModel) -> None:
        self._model = model
        self._points: dict[tuple[int, Configuration | None], Point] = {}
        for units, configuration in dict.fromkeys((each.units, each.configuration) for each in model.measured):
            point = _point(model, units, configuration)
            if point is not None:
                self._points[units, configuration] = point
        points = list(self._points.values())
        self._fit = fit(points, model.overheads, model.gpu_flops)
        modelled = [self._modelled(point.configuration) for point in points]
        self._residuals = [
            (point, math.log(point.flops_per_s / value)) for point, value in zip(points, modelled, strict=True)
        ]
        # What needs no more than what has run fits too, whatever the estimate of memory says.
        ran = [memory_bytes(model.workload, point.configuration) for point in points]
        self._proven_bytes = max(ran, default=0.0)

    def estimate(self, units: int) -> Estimate:
        workload, refused = self._model.workload, self._model.refused
        if not is_allowed(workload, units):
            return _none(units, why_none(workload, units))
        if (units, None) in refused:
            return _none(units, "it was tried and did not run")
        measured = self._measured(units)
        if measured is not None:
            return measured
        possible = configurations(workload, units, self._proven_bytes)
        tried = [each for each in possible if (units, each) not in refused]
        if not tried:
            return _none(units, "what could be tried did not run" if possible else why_none(workload, units))
        return self._best(units, tried)

    def _measured(self, units: int) -> Estimate | None:
        """The best of what was measured on ``units``; None if nothing was, or does not run any more."""
        found = [
            _median(self._model, units, configuration)
            for configuration in dict.fromkeys(
                each.configuration for each in self._model.measured if each.units == units
            )
            if (units, configuration) not in self._model.refused
        ]
        if not found:
            return None
        best = max(found, key=lambda each: each.flops_per_s)
        configuration = best.configuration or _likely(self._model, units)
        return Estimate(units, best.flops_per_s, configuration, True, "measured")

    def _best(self, units: int, possible: list[Configuration]) -> Estimate:
        layouts = {(each.tensor, each.pipeline): each for each in possible}
        factors = {layout: correction(self._residuals, each) for layout, each in layouts.items()}
        rated = [(self._modelled(each) * factors[each.tensor, each.pipeline], each) for each in possible]
        least = min(each.tensor * each.pipeline for each in possible)
        simple = max((pair for pair in rated if pair[1].tensor * pair[1].pipeline == least), key=_rate)
        best, configuration = max(rated, key=_rate)  # of equals the first
        if best <= (1.0 + LAYOUT_MARGIN) * simple[0]:
            best, configuration = simple
        count = len(self._points)
        reason = f"modelled after {count} measured configuration{'s' * (count != 1)}" if count else "modelled"
        return Estimate(units, best, configuration, False, reason)

    def _modelled(self, configuration: Configuration) -> float:
        slower = slowdown(self._model.workload, configuration, self._model.overheads, self._fit.scale)
        return self._fit.gpu_flops * configuration.gpus / slower


def _rate(pair: tuple[float, Configuration]) -> float:
    return pair[0]


def _none(units: int, reason: str) -> Estimate:
    return Estimate(units, 0.0, None, False, reason)


def _median(model: ThroughputModel, units: int, configuration: Configuration | None) -> Measurement:
    """All measurements of one configuration on ``units`` as one."""
    alike = [each for each in model.measured if (each.units, each.configuration) == (units, configuration)]
    weights = [each.weight for each in alike]
    middle = weighted_median([each.flops_per_s for each in alike], weights)
    return Measurement(units, middle, sum(weights), configuration)


def _point(model: ThroughputModel, units: int, configuration: Configuration | None) -> Point | None:
    """The same for the fit; None if nobody knows a configuration in which it can have run."""
    median = _median(model, units, configuration)
    known = configuration or _likely(model, units)
    return Point(model.workload, known, median.flops_per_s, median.weight) if known is not None else None


def _likely(model: ThroughputModel, units: int) -> Configuration | None:
    """The configuration that the job has taken, if nobody says which: the fastest by what is assumed.

    If by the estimate of memory none can have run, though one has, then the one that needs least.
    """
    workload, refused = model.workload, model.refused
    possible = [each for each in configurations(workload, units) if (units, each) not in refused]
    if possible:
        return min(possible, key=lambda each: slowdown(workload, each, model.overheads, 1.0))
    possible = [each for each in configurations(workload, units, math.inf) if (units, each) not in refused]
    return min(possible, key=lambda each: memory_bytes(workload, each), default=None)


def _require_positive(name: str, value: float) -> None:
    require(math.isfinite(value) and value > 0.0, f"{name} is {value}: it must be a positive number")


def _require_all_gpus(workload: Workload, units: int, configuration: Configuration | None) -> None:
    gpus = units * workload.gpus_per_unit
    require(
        configuration is None or configuration.gpus == gpus,
        f"the configuration ({configuration}) takes {configuration.gpus if configuration else 0} GPUs: "
        f"on {units} units it must take {gpus}",
    )
