"""What a job's own agents have measured of it, as a value, and what follows from that for planning.

The record is what the store keeps of a job: how long steps take on how many nodes, and for how long it stands still
when its nodes change. It is small however long the job runs, and whoever writes it reads it first, so that nothing that
another agent wrote is lost.

FLOP/s on numbers of units on which a job never ran, from those that were measured and nothing else.

A step is taken to be a part that all units share and one that more of them do not shorten::

seconds per step = a + b / x FLOP/s = x / (a x + b), times a constant

with the step's samples as they are on one number of units. If each worker has a batch of its own, the same formula
says that a step takes ``b + a x``: it gets longer with every unit. ``a`` and ``b`` are 0 or more, so the FLOP/s of
a unit never grow with their number. Where the FLOPs or the batch of a job are known, ``throughput`` knows more.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations
from statistics import median
from typing import Any, Literal, NamedTuple

from unicron_elastic.base.require import require, require_count, require_keys
from unicron_elastic.planning.model.calibration import weighted_median
from unicron_elastic.planning.model.configurations import Workload
from unicron_elastic.planning.model.jobs import GPU_FLOPS, GivenRates, JobSpec, MeasuredSteps, Modelled
from unicron_elastic.planning.model.tasks import Transition
from unicron_elastic.planning.model.throughput import ThroughputModel, assumed_flops_per_sample, observed, rates

# The part that units do not share has to explain a fifth of itself. Measurements of 7 and of 8 units that differ by
# noise would give any share otherwise, and those of 4 and of 8 still say what it is.
SHARE_WEIGHT = 0.2
CLEARLY = 1e-9  # less is rounding, and the simpler line is taken


class _Line(NamedTuple):
    """Seconds per unit of work and unit, ``a x + b``."""

    a: float
    b: float

    def at(self, units: int) -> float:
        return self.a * units + self.b


def filled(rates_flops: Mapping[int, float], x_max: int) -> tuple[float, ...]:
    """FLOP/s by number of units from 0 to ``x_max``, by those that were measured: positive, by units from 1 on.

    What was measured stays as it is, and around it the line is moved to meet it. Nothing is above what the nearest
    smaller measured number promises if one more unit brings as much as each of those. 0.0 everywhere if nothing was
    measured.
    """
    points = sorted(rates_flops.items())
    if not points:
        return (0.0,) * (x_max + 1)
    line = _fitted([(units, units / rate) for units, rate in points])
    units = [each for each, _ in points]
    misses = [math.log(rate * line.at(each) / each) for each, rate in points]
    return (0.0, *(_rate(points, line, units, misses, x) for x in range(1, x_max + 1)))


def _rate(
    points: Sequence[tuple[int, float]], line: _Line, units: Sequence[int], misses: Sequence[float], x: int
) -> float:
    place = bisect_left(units, x)
    if place < len(units) and units[place] == x:
        return points[place][1]
    found = x / line.at(x) * math.exp(_between(units, misses, place, x))
    if place == 0:
        return found
    below, rate = points[place - 1]
    return min(found, rate * x / below)


def _between(units: Sequence[int], misses: Sequence[float], place: int, x: int) -> float:
    """Return by how much the line misses at ``x``: what it misses at the measured numbers around it, by ratio."""
    if place == 0:
        return misses[0]
    if place == len(units):
        return misses[-1]
    share = math.log(x / units[place - 1]) / math.log(units[place] / units[place - 1])
    return misses[place - 1] + share * (misses[place] - misses[place - 1])


def _fitted(points: Sequence[tuple[int, float]]) -> _Line:
    """The line through two points, or with one part alone through one, of which all are least far away in relation.

    Least absolute residuals: one that is far off pulls no harder than one that is a little off.
    """
    candidates = [_Line(0.0, y) for _, y in points]
    for (x, y), (other_x, other_y) in combinations(points, 2):
        a = (other_y - y) / (other_x - x)
        candidates.append(_Line(a, y - a * x))
    candidates += [_Line(y / x, 0.0) for x, y in points]
    best = candidates[0]
    least = _loss(best, points)
    for each in candidates[1:]:
        if each.a >= 0.0 and each.b >= 0.0 and (loss := _loss(each, points)) < least - CLEARLY:
            best, least = each, loss
    return best


def _loss(line: _Line, points: Sequence[tuple[int, float]]) -> float:
    most = points[-1][0]
    share = line.a * most / line.at(most)
    return sum(abs(line.at(x) / y - 1.0) for x, y in points) + SHARE_WEIGHT * share


Kind = Literal["grow", "shrink", "replace"]

NUMBERS_MAX = 64  # of nodes, of which the record knows
STAYS_MAX = 5  # on one number of nodes
TRANSITIONS_MAX = 15  # of one kind
ENOUGH_STEPS = 50  # of one stay: what earlier ones were like is history then
TRANSITION_S = 60.0  # while none was measured
UNSAVED_LEAST_S = 60.0  # less is not counted
STALE_S = 30.0  # after which nobody knows whether the job still trains
JSON_MAX_BYTES = 128 * 1024
NODES_MAX = 1_000_000
STEP_MIN_S, SECONDS_MAX = 1e-6, 1e9
STEP_FLOPS_MAX = 1e26
MOMENT_MAX_UNIX_S = 1e12
RATE_MIN_FLOPS, RATE_MAX_FLOPS = 1e-9, 1e29  # of what runs; the store takes no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """The median ``step_s`` of ``steps`` optimizer steps, from one time that the job was on as many nodes.

    ``since_unix_s`` tells it from others. ``flops_per_step``: model FLOPs of a step of the whole job, as the script
    told them then. Raises ``ValueError`` for what no job can do.
    """

    since_unix_s: float
    step_s: float
    steps: int
    flops_per_step: float | None = None

    def __post_init__(self) -> None:
        _require_moment("since_unix_s", self.since_unix_s)
        _require_step("step_s", self.step_s)
        require_count("steps", self.steps, 1)
        require(self.steps < 2**53, f"steps is {self.steps}: that is no count of steps")
        told = self.flops_per_step
        require(
            told is None or 0.0 < _float(told) <= STEP_FLOPS_MAX,
            f"flops_per_step is {told!r}: it must be FLOPs, more than 0 and at most {STEP_FLOPS_MAX:g}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OnNodes:
    """What was measured on ``nodes``, the earliest stay first. Raises ``ValueError`` if that is none, or too many."""

    nodes: int
    stays: tuple[Stay, ...]

    def __post_init__(self) -> None:
        _require_nodes(self.nodes)
        require(
            0 < len(self.stays) <= STAYS_MAX,
            f"stays on {self.nodes} nodes are {len(self.stays)}: they must be 1 to {STAYS_MAX}",
        )

    @property
    def step_s(self) -> float:
        """Return the seconds of a step over all stays together."""
        return weighted_median([each.step_s for each in self.stays], [float(each.steps) for each in self.stays])

    @property
    def flops_per_step(self) -> float | None:
        """Return the FLOP of a step as told last; None: never."""
        return next((each.flops_per_step for each in reversed(self.stays) if each.flops_per_step is not None), None)

    def with_stay(self, stay: Stay) -> OnNodes:
        """After a stay went on or began: enough steps of it stand for themselves."""
        if stay.steps >= ENOUGH_STEPS:
            return replace(self, stays=(stay,))
        others = [each for each in self.stays if each.since_unix_s != stay.since_unix_s]
        return replace(self, stays=(*others, stay)[-STAYS_MAX:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """The newest measurement. Raises ``ValueError`` for what no job can do.

    ``unsaved_s``: how long it had trained since its last save that outlives its processes.
    """

    nodes: int
    step_s: float
    at_unix_s: float
    unsaved_s: float = 0.0

    def __post_init__(self) -> None:
        _require_nodes(self.nodes)
        _require_step("step_s", self.step_s)
        _require_moment("at_unix_s", self.at_unix_s)
        unsaved_s = self.unsaved_s
        require(0.0 <= _float(unsaved_s) <= SECONDS_MAX, f"unsaved_s is {unsaved_s!r}: it must be seconds, 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredJob:
    """What was measured of one job.

    ``is_global_batch_fixed``: a step has the same samples on any number of nodes, as under ``unicron_elastic.Run``;
    else each worker has as many. ``steps``: by number of nodes, the first to be measured first: where FLOPs are not
    known, that one is what others are compared with. ``grow_s`` and so on: for how long the job stood still each time,
    the newest last. Raises ``ValueError`` for more than is kept, and for a number of nodes that comes twice.
    """

    is_global_batch_fixed: bool = False
    steps: tuple[OnNodes, ...] = ()
    now: Now | None = None
    grow_s: tuple[float, ...] = ()
    shrink_s: tuple[float, ...] = ()
    replace_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(
            isinstance(self.is_global_batch_fixed, bool),
            f"is_global_batch_fixed is {self.is_global_batch_fixed!r}: it must be true or false",
        )
        numbers = [each.nodes for each in self.steps]
        require(len(numbers) <= NUMBERS_MAX, f"steps are of {len(numbers)} numbers of nodes: at most {NUMBERS_MAX}")
        require(len(set(numbers)) == len(numbers), "steps have a number of nodes twice: each must be there once")
        for name in ("grow_s", "shrink_s", "replace_s"):
            _require_transitions(name, getattr(self, name))

    def with_steps(self, nodes: int, stay: Stay, *, is_global_batch_fixed: bool, now: Now) -> MeasuredJob:
        """After a stay on ``nodes`` went on or began.

        Steps of another kind of batch are no longer compared with. Raises ``ValueError`` for what no job can do.
        """
        known = self.steps if is_global_batch_fixed == self.is_global_batch_fixed else ()
        if any(each.nodes == nodes for each in known):
            steps = tuple(each.with_stay(stay) if each.nodes == nodes else each for each in known)
        else:
            kept = known if len(known) < NUMBERS_MAX else (known[0], *known[2:])
            steps = (*kept, OnNodes(nodes=nodes, stays=(stay,)))
        return replace(self, is_global_batch_fixed=is_global_batch_fixed, steps=steps, now=now)

    def with_transition(self, kind: Kind, stood_s: float) -> MeasuredJob:
        """After the job stood still for ``stood_s``. Twice the very same is once, written again.

        Raises ``ValueError`` if that is negative or not finite.
        """
        name = f"{kind}_s"
        before: tuple[float, ...] = getattr(self, name)
        if before and before[-1] == stood_s:
            return self
        changed: dict[str, Any] = {name: (*before, float(stood_s))[-TRANSITIONS_MAX:]}
        return replace(self, **changed)

    def to_json(self) -> bytes:
        """Return what was measured as the store keeps it."""
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> MeasuredJob:
        """What ``to_json`` gave. Raises ``ValueError`` for anything else."""
        require(len(text) <= JSON_MAX_BYTES, f"it has {len(text)} bytes: at most {JSON_MAX_BYTES} are read")
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            told = None
        options = _options(told, cls, "it")
        values: dict[str, Any] = {name: _numbers(options, name) for name in ("grow_s", "shrink_s", "replace_s")}
        now = options["now"]
        return cls(
            is_global_batch_fixed=options["is_global_batch_fixed"],
            steps=tuple(_on_nodes(each) for each in _list(options["steps"], "steps")),
            now=None if now is None else Now(**_options(now, Now, "now", ("unsaved_s",))),
            **values,
        )


def first_rates(spec: JobSpec, x_max: int, gpu_flops: float = GPU_FLOPS) -> tuple[float, ...]:
    """T(t, x) by units from 0 to ``x_max``, before anything is measured; 0.0 where the job cannot run.

    ``gpu_flops``: what a GPU is taken to achieve where the spec does not say it. Raises ``ValueError`` if ``x_max`` is
    negative.
    """
    require_count("x_max", x_max)
    match spec.throughput:
        case GivenRates(given):
            return (*given[: x_max + 1], *(0.0,) * (x_max + 1 - len(given)))
        case Modelled(workload):
            return rates(ThroughputModel(workload=workload, gpu_flops=gpu_flops), x_max)
        case MeasuredSteps():
            gpu_flops = _assumed_flops(spec, gpu_flops)
            numbers = range(spec.unit_nodes, (x_max + 1) * spec.unit_nodes, spec.unit_nodes)
            return (0.0, *(_bounded(gpu_flops * _gpus(spec, nodes)) for nodes in numbers))


def newest_rates(
    spec: JobSpec, measured: MeasuredJob | None, x_max: int, gpu_flops: float = GPU_FLOPS
) -> tuple[float, ...]:
    """The same with what was measured. Numbers of nodes that are no whole number of units say nothing.

    Rates that were given stay as they are, and a modelled job counts the FLOPs that its workload says. Of a job whose
    FLOPs nobody tells, each GPU counts as achieving ``gpu_flops`` on the nodes that were measured first. Raises
    ``ValueError`` if ``x_max`` is negative.
    """
    found = _in_units(spec, measured)
    if not found or measured is None or isinstance(spec.throughput, GivenRates):
        return first_rates(spec, x_max, gpu_flops)
    require_count("x_max", x_max)
    if isinstance(spec.throughput, Modelled):
        workload = _with_flops(spec.throughput.workload, found[0], spec, gpu_flops)
        return _modelled(workload, found, spec, x_max)
    scale = _Scale(spec, measured, found, gpu_flops)
    return filled({each.nodes // spec.unit_nodes: scale.flops(each.nodes, each.step_s) for each in found}, x_max)


def transition_of(measured: MeasuredJob | None) -> Transition:
    """For how long the job stands still when its nodes change: the median of what was measured.

    A kind that was not is taken to last as long as the longest of those that were. What it would do again is counted in
    powers of two, as a new figure is another situation, for which the plans are made anew.
    """
    told = MeasuredJob() if measured is None else measured
    medians = [median(each) if each else None for each in (told.grow_s, told.shrink_s, told.replace_s)]
    longest_s = max((each for each in medians if each is not None), default=TRANSITION_S)
    grow_s, shrink_s, replace_s = (longest_s if each is None else each for each in medians)
    unsaved_s = 0.0 if told.now is None else told.now.unsaved_s
    return Transition(
        grow_s=grow_s,
        shrink_s=shrink_s,
        replace_s=replace_s,
        stop_s=max(grow_s, shrink_s, replace_s),
        unsaved_s=0.0 if unsaved_s < UNSAVED_LEAST_S else 2.0 ** math.floor(math.log2(unsaved_s)),
    )


def achieved_flops_now(
    spec: JobSpec, measured: MeasuredJob | None, rates_flops: Sequence[float], at_unix_s: float
) -> float:
    """The FLOP/s that the job achieves at ``at_unix_s``; 0.0 if nothing was heard of it for 30 s.

    Clocks of hosts differ, so a moment that lies a little ahead is as good. ``rates_flops``: by units, for a job whose
    rates were given.
    """
    now = None if measured is None else measured.now
    if measured is None or now is None or abs(at_unix_s - now.at_unix_s) >= STALE_S:
        return 0.0
    if isinstance(spec.throughput, GivenRates):
        units = now.nodes // spec.unit_nodes
        return rates_flops[units] if units < len(rates_flops) else 0.0
    found = _in_units(spec, measured) or measured.steps
    if not found:
        return 0.0
    if isinstance(spec.throughput, Modelled):
        return _bounded(_with_flops(spec.throughput.workload, found[0], spec).step_flops / now.step_s)
    return _Scale(spec, measured, found).flops(now.nodes, now.step_s)


class _Scale:
    """How many FLOPs a step of a job has, by the script's word or by what its GPUs count as."""

    def __init__(
        self, spec: JobSpec, measured: MeasuredJob, found: Sequence[OnNodes], gpu_flops: float = GPU_FLOPS
    ) -> None:
        """``found``: what was measured, at least once."""
        self._is_fixed = measured.is_global_batch_fixed
        self._told = {each.nodes: each.flops_per_step for each in measured.steps if each.flops_per_step is not None}
        first = found[0]
        gpu_flops = _assumed_flops(spec, gpu_flops)
        self._known = first.nodes, gpu_flops * _gpus(spec, first.nodes) * first.step_s
        if self._told and first.nodes not in self._told:
            self._known = next(iter(self._told.items()))
        elif self._told:
            self._known = first.nodes, self._told[first.nodes]

    def flops(self, nodes: int, step_s: float) -> float:
        """FLOP/s on ``nodes`` with steps of ``step_s``."""
        told = self._told.get(nodes)
        if told is None:
            known_nodes, step_flops = self._known
            told = step_flops * (1.0 if self._is_fixed else nodes / known_nodes)
        return _bounded(told / step_s)


def are_flops_told(spec: JobSpec, measured: MeasuredJob | None) -> bool:
    """Whether somebody says what a step computes; else FLOP/s are an estimate, and only their ratios were measured."""
    match spec.throughput:
        case GivenRates():
            return True
        case Modelled(workload):
            return workload.flops_per_sample is not None or workload.transformer is not None
        case MeasuredSteps():
            steps = () if measured is None else measured.steps
            return any(each.flops_per_step is not None for each in steps)


def _modelled(workload: Workload, found: Sequence[OnNodes], spec: JobSpec, x_max: int) -> tuple[float, ...]:
    model = ThroughputModel(workload=workload)
    for each in found:
        for stay in each.stays:
            flops_per_s = _bounded(workload.step_flops / stay.step_s)
            model = observed(model, each.nodes // spec.unit_nodes, flops_per_s, weight=float(stay.steps))
    return rates(model, x_max)


def _with_flops(workload: Workload, first: OnNodes, spec: JobSpec, gpu_flops: float = GPU_FLOPS) -> Workload:
    """The workload with the FLOPs of a sample; where nobody knows them, such that GPUs count as they did at first."""
    if workload.flops_per_sample is not None or workload.transformer is not None:
        return workload
    units = max(1, first.nodes // spec.unit_nodes)
    return replace(workload, flops_per_sample=assumed_flops_per_sample(workload, units, first.step_s, gpu_flops))


def _in_units(spec: JobSpec, measured: MeasuredJob | None) -> tuple[OnNodes, ...]:
    """What was measured on whole numbers of units."""
    return () if measured is None else tuple(each for each in measured.steps if each.nodes % spec.unit_nodes == 0)


def _assumed_flops(spec: JobSpec, gpu_flops: float) -> float:
    """FLOP/s of a GPU: what a person has said of this job, else ``gpu_flops``."""
    said = spec.throughput
    return said.gpu_flops if isinstance(said, MeasuredSteps) and said != MeasuredSteps() else gpu_flops


def _gpus(spec: JobSpec, nodes: int) -> float:
    return float(spec.nproc_per_node * nodes)


def _bounded(rate: float) -> float:
    return max(RATE_MIN_FLOPS, min(rate, RATE_MAX_FLOPS))


def _on_nodes(told: object) -> OnNodes:
    options = _options(told, OnNodes, "an entry of steps")
    stays = _list(options["stays"], "stays")
    return OnNodes(nodes=options["nodes"], stays=tuple(Stay(**_options(each, Stay, "a stay")) for each in stays))


def _options(told: object, record: type, what: str, may_lack: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """An object with just the fields of ``record``."""
    if not isinstance(told, Mapping):
        raise ValueError(f"{what} is no JSON object")
    names = [each.name for each in fields(record)]
    require_keys(told, names, what, [name for name in names if name not in may_lack])
    return told


def _list(told: object, name: str) -> Sequence[Any]:
    if not isinstance(told, list):
        raise ValueError(f"{name} is {type(told).__name__}: it must be a list")
    return told


def _numbers(options: Mapping[str, Any], name: str) -> tuple[float, ...]:
    found = tuple(_list(options[name], name))
    _require_transitions(name, found)
    return tuple(float(each) for each in found)


def _require_transitions(name: str, values: tuple[Any, ...]) -> None:
    require(len(values) <= TRANSITIONS_MAX, f"{name} has {len(values)} values: at most {TRANSITIONS_MAX} are kept")
    for value in values:
        require(0.0 <= _float(value) <= SECONDS_MAX, f"{name} has {value!r}: each must be seconds, 0 or more")


def _require_nodes(value: object) -> None:
    require_count("nodes", value, 1)
    require(_float(value) <= NODES_MAX, f"nodes is {value!r}: it must be at most {NODES_MAX}")


def _require_step(name: str, value: object) -> None:
    is_time = STEP_MIN_S <= _float(value) <= SECONDS_MAX
    require(is_time, f"{name} is {value!r}: it must be seconds, from {STEP_MIN_S:g} to {SECONDS_MAX:g}")


def _require_moment(name: str, value: object) -> None:
    require(0.0 <= _float(value) <= MOMENT_MAX_UNIX_S, f"{name} is {value!r}: it must be a moment in unix seconds")


def _float(value: object) -> float:
    """The number; NaN, which is neither more nor less than any other, for what is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
