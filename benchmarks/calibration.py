"""How far the throughput model is off, on public measurements. Prints Markdown; takes a few seconds and no GPU.

    python benchmarks/calibration.py

"Leave one out" predicts each measurement of a model from all others of that model on the same GPU; "from one" predicts
each from each other alone, which is what a planner has of a job that has run on one number of workers only. Beside it
stand the same errors of two simpler models: FLOP/s per GPU that are always the same, and a fixed overhead per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from _calibration_data import (
    INTERNEVO,
    INTERNEVO_MEMORY_GB,
    INTERNEVO_TENSOR,
    INTERNLM_7B,
    MEGATRON_A100,
    MEGATRON_H100,
    Row,
    internevo,
    mosaicml,
)

from unicron_elastic.planning.model.calibration import Overheads, Point, correction, fit, slowdown
from unicron_elastic.planning.model.configurations import Configuration, Workload
from unicron_elastic.planning.model.memory import fits, memory_bytes
from unicron_elastic.planning.model.throughput import GPU_FLOPS, ThroughputModel, observed, rates

Predict = Callable[[Sequence[Point], Point], float]


def same_per_gpu(known: Sequence[Point], asked: Point) -> float:
    """The simplest model: what a GPU achieves does not depend on how many there are."""
    return median(point.flops_per_s / point.configuration.gpus for point in known) * asked.configuration.gpus


def fixed_overhead(known: Sequence[Point], asked: Point) -> float:
    """u / (1 + c x / B): every step loses the same time, which is fitted, and nothing else is lost."""
    only = Overheads(micro_batch_tokens=0.0, per_doubling=0.0)
    plain = [point._replace(workload=replace(point.workload, sharding="none")) for point in [*known, asked]]
    return predictor(only, is_corrected=False)(plain[:-1], plain[-1])


def predictor(overheads: Overheads, *, is_corrected: bool = True) -> Predict:
    """The model as ``ThroughputModel`` uses it, for points that need not be of one global batch."""

    def predict(known: Sequence[Point], asked: Point) -> float:
        found = fit(known, overheads, GPU_FLOPS)

        def modelled(point: Point) -> float:
            slower = slowdown(point.workload, point.configuration, overheads, found.scale)
            return found.gpu_flops * point.configuration.gpus / slower

        if not is_corrected:
            return modelled(asked)
        residuals = [(point, math.log(point.flops_per_s / modelled(point))) for point in known]
        return modelled(asked) * correction(residuals, asked.configuration)

    return predict


def error(predicted: float, measured: float) -> float:
    """Relative, without sign."""
    return abs(predicted / measured - 1.0)


def leave_one_out(points: Sequence[Point], predict: Predict) -> list[float]:
    """The error of each point predicted from all others."""
    return [
        error(predict([*points[:place], *points[place + 1 :]], asked), asked.flops_per_s)
        for place, asked in enumerate(points)
    ]


def from_one(points: Sequence[Point], predict: Predict) -> list[float]:
    """The error of each point predicted from each other one."""
    return [
        error(predict([known], asked), asked.flops_per_s) for asked in points for known in points if asked is not known
    ]


def spread(errors: Sequence[float]) -> str:
    """Median and worst in percent."""
    return f"{100 * median(errors):.1f} / {100 * max(errors):.1f}"


def groups(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """Points by GPU and model, where there are at least three; and InternEvo's."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        found.setdefault(f"MosaicML {row.model}, {row.gpu}", []).append(row.point)
    found = {name: points for name, points in found.items() if len(points) >= 3}
    return {**found, **{f"InternEvo 7b, {name}": internevo(name) for name in INTERNEVO}}


def print_groups(named: dict[str, list[Point]]) -> None:
    """The table of predicted against measured."""
    judges = (
        (leave_one_out, predictor(Overheads())),
        (from_one, predictor(Overheads())),
        (leave_one_out, same_per_gpu),
        (leave_one_out, fixed_overhead),
    )
    print("| model, GPU | points | leave one out | from one | same per GPU | fixed overhead |")
    print("|---|---|---|---|---|---|")
    for name, points in named.items():
        columns = [judge(points, predict) for judge, predict in judges]
        print(f"| {name} | {len(points)} | {' | '.join(map(spread, columns))} |")
    for source in ("MosaicML", "InternEvo"):
        parts = [points for name, points in named.items() if name.startswith(source)]
        columns = [[each for points in parts for each in judge(points, predict)] for judge, predict in judges]
        count = sum(map(len, parts))
        print(f"| **all {source}** | {count} | {' | '.join(map(spread, columns))} |")
    print("\nRelative errors in percent, median / worst; the last two columns leave one out.\n")


def print_fixed_batch() -> None:
    """InternEvo's steps of 2048 sequences of 2048 tokens on more and more GPUs, from the one on 256."""
    print("| 7b, batch of 4 M tokens | GPUs | measured | from 256 GPUs | error | same per GPU |")
    print("|---|---|---|---|---|---|")
    for name in INTERNEVO:
        by_gpus = {p.configuration.gpus: p for p in internevo(name) if p.workload.global_batch == 2048}
        sizes = tuple(sorted({point.configuration.micro_batch for point in by_gpus.values()}))
        workload = Workload(global_batch=2048, micro_batch_sizes=sizes, transformer=INTERNLM_7B, sharding="optimizer")
        known = by_gpus[256]
        model = observed(ThroughputModel(workload=workload), 256, known.flops_per_s, configuration=known.configuration)
        predicted = rates(model, 1024)
        for gpus in (512, 1024):
            measured = by_gpus[gpus].flops_per_s
            linear = known.flops_per_s * gpus / 256
            print(
                f"| {name} | {gpus} | {measured / gpus / 1e12:.0f} | {predicted[gpus] / gpus / 1e12:.0f} "
                f"| {100 * error(predicted[gpus], measured):.0f} % | {100 * error(linear, measured):.0f} % |"
            )
    print("\nTFLOP/s per GPU.\n")


def print_unmeasured(rows: Sequence[Row]) -> None:
    """What it costs to assume 40 % of the peak where nothing is measured."""
    sources = {
        "MosaicML, A100": [r.point.flops_per_s / r.point.configuration.gpus / 312e12 for r in rows if "a100" in r.gpu],
        "MosaicML, H100": [r.point.flops_per_s / r.point.configuration.gpus / 989e12 for r in rows if "h100" in r.gpu],
        "Megatron-LM 2021, A100": [0.75 * teraflops / 312 for _, _, teraflops in MEGATRON_A100],
        "Megatron-Core 2024, H100": [teraflops / 989 for _, _, teraflops in MEGATRON_H100],
    }
    print("| nothing measured: 40 % of the peak | points | utilisation | error |")
    print("|---|---|---|---|")
    for name, used in sources.items():
        errors = [error(0.4, each) for each in used]
        print(f"| {name} | {len(used)} | {100 * min(used):.0f} to {100 * max(used):.0f} % | {spread(errors)} |")
    print()


def print_formulas(rows: Sequence[Row]) -> None:
    """FLOPs, parameters and memory against what was published."""
    flops, counts = [], []
    for row in rows:
        shape = row.point.workload.transformer
        assert shape is not None
        computed = row.tokens_per_s / shape.sequence * shape.flops_per_sample
        flops.append(error(computed, row.point.flops_per_s))
        counts.append(error(shape.parameters, row.parameters))
    said_to_fit = sum(fits(row.point.workload, row.point.configuration) for row in rows)
    ratios = []
    for tensor, pipeline, is_full, replicas, gigabytes in INTERNEVO_MEMORY_GB:
        configuration = Configuration(replicas=replicas, tensor=tensor, pipeline=pipeline, recompute=True)
        workload = Workload(
            global_batch=4 * replicas,
            transformer=INTERNLM_7B,
            sharding="full" if is_full else "optimizer",
        )
        ratios.append(gigabytes * 1e9 / memory_bytes(workload, configuration))
    print("| formula | points | against what was published |")
    print("|---|---|---|")
    print(f"| parameters | {len(counts)} | {spread(counts)} % off |")
    print(f"| FLOPs of a step | {len(flops)} | {spread(flops)} % off |")
    print(f"| memory, MosaicML | {len(rows)} | {said_to_fit} of {len(rows)} that ran are said to fit |")
    print(f"| memory, InternEvo | {len(ratios)} | {min(ratios):.2f} to {max(ratios):.2f} times the estimate was used |")


def print_tensor() -> None:
    """What TP 2 costs where TP 1 would do."""
    print("| 7b, TP 2 for TP 1 | measured | modelled |")
    print("|---|---|---|")
    for gpus, (tokens_1, tokens_2) in INTERNEVO_TENSOR.items():
        slower = []
        for tensor, micro_batch in ((1, 2), (2, 4)):
            configuration = Configuration(replicas=gpus // tensor, tensor=tensor, micro_batch=micro_batch)
            workload = Workload(
                global_batch=8 * gpus,
                micro_batch_sizes=(micro_batch,),
                transformer=INTERNLM_7B,
                sharding="optimizer",
                max_tensor=2,
            )
            slower.append(slowdown(workload, configuration, Overheads(), 1.0))
        print(
            f"| {gpus} GPUs | {100 * (tokens_2 / tokens_1 - 1):+.1f} % | {100 * (slower[0] / slower[1] - 1):+.1f} % |"
        )
    print()


def main() -> None:
    """Prints all tables."""
    rows = mosaicml()
    print_groups(groups(rows))
    print_fixed_batch()
    print_tensor()
    print_unmeasured(rows)
    print_formulas(rows)


if __name__ == "__main__":
    main()
