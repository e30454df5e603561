"""Public measurements of training throughput, as points of the throughput model."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

from unicron_elastic.planning.model.calibration import Point
from unicron_elastic.planning.model.configurations import Configuration, Sharding, Workload
from unicron_elastic.planning.model.shape import Transformer

MOSAICML = Path(__file__).parent / "data" / "mosaicml_mfu_seq2048.csv"
GIB = 2**30
# Layers, hidden and heads of the MPT models, as in llm-foundry's configurations.
MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
MPT_VOCABULARY = 50368
SHARDINGS: dict[str, Sharding] = {"FULL_SHARD": "full", "SHARD_GRAD_OP": "optimizer"}
MEMORY_BYTES = {"a100_40gb": 40 * GIB, "a100_80gb": 80 * GIB, "h100_80gb": 80 * GIB}
PEAK_FLOPS = {"a100_40gb": 312e12, "a100_80gb": 312e12, "h100_80gb": 989e12}  # dense bf16

# InternEvo, 7B, A100-80GB, 4 x 100 Gb/s RoCE per node, sequence 2048, ZeRO-1 within the node: GPUs, micro-batch,
# micro-batches per GPU, TFLOP/s per GPU. https://github.com/InternLM/InternEvo/blob/develop/doc/en/train_performance.md,
# section "FLOPS Testing". Figures only.
INTERNEVO = {
    "activations kept": (
        (8, 2, 4, 183),
        (16, 2, 4, 177),
        (32, 2, 4, 176),
        (64, 2, 4, 174),
        (128, 2, 4, 173),
        (256, 2, 4, 173),
        (512, 2, 4, 173),
        (1024, 2, 4, 160),
        (512, 2, 2, 139),
        (1024, 2, 2, 124),
        (1024, 2, 1, 105),
    ),
    "activations recomputed": (
        (8, 8, 1, 193),
        (16, 8, 1, 191),
        (32, 8, 1, 188),
        (64, 8, 1, 188),
        (128, 8, 1, 187),
        (256, 8, 1, 187),
        (512, 8, 1, 186),
        (1024, 8, 1, 184),
        (512, 4, 1, 173),
        (1024, 4, 1, 160),
        (1024, 2, 1, 136),
    ),
}
# The same document, section "GPU Memory Usage Test": 7B on A800, recomputed activations, micro-batch 1, ZeRO-1 over all
# replicas or FSDP: TP, PP, FSDP or not, replicas, GB.
INTERNEVO_MEMORY_GB = (
    (1, 3, False, 1, 75),
    (1, 1, True, 3, 72),
    (1, 1, True, 4, 56),
    (4, 1, False, 1, 61),
    (1, 4, False, 1, 69),
    (1, 1, True, 5, 49),
    (1, 1, True, 6, 39),
)
# The same document, section "Throughput Measurement", 4 micro-batches, ZeRO-1 within the node: tokens/s per GPU with
# TP 1 and micro-batches of 2 samples, and with TP 2 and micro-batches of 4.
INTERNEVO_TENSOR = {8: (4078, 3761), 64: (3944, 3650), 1024: (3625, 3486)}
INTERNLM_7B = Transformer(layers=32, hidden=4096, heads=32, sequence=2048, vocabulary=103168)

# Megatron-LM, A100-80GB, all activations recomputed: parameters in 10^9, GPUs, TFLOP/s per GPU with recomputation
# counted (times 3/4 for model FLOPs). README of https://github.com/NVIDIA/Megatron-LM in April 2021; also table 1 of
# arXiv 2104.04473. Figures only.
MEGATRON_A100 = (
    (1.7, 32, 137),
    (3.6, 64, 138),
    (7.5, 128, 142),
    (18, 256, 135),
    (39, 512, 138),
    (76, 1024, 140),
    (145, 1536, 148),
    (310, 1920, 155),
    (530, 2520, 163),
    (1008, 3072, 163),
)
# Megatron-Core, H100, sequence 4096: parameters in 10^9, GPUs, model TFLOP/s per GPU. README of the same repository in
# 2024. Figures only.
MEGATRON_H100 = (
    (1.7, 48, 408.8),
    (7.1, 96, 465.9),
    (16, 192, 489.1),
    (32, 384, 459.6),
    (70, 768, 419.7),
    (119, 1536, 420.5),
    (177, 2304, 432.8),
    (314, 3072, 474.4),
    (462, 6144, 459.9),
)


class Row(NamedTuple):
    """One line of MosaicML's table as a point, with what else it says."""

    gpu: str
    model: str
    parameters: int
    tokens_per_s: float
    point: Point


def mosaicml() -> list[Row]:
    """All lines but the one in fp8, which is another machine as far as throughput goes."""
    with MOSAICML.open(encoding="utf-8", newline="") as file:
        return [_row(line) for line in csv.DictReader(file) if line["precision"] != "amp_fp8"]


def _row(line: dict[str, str]) -> Row:
    layers, hidden, heads = MPT[line["model"]]
    micro_batch, gpus = int(line["micro_bs"]), int(line["n_gpus"])
    workload = Workload(
        global_batch=micro_batch * int(line["grad_accum"]) * gpus,
        micro_batch_sizes=(micro_batch,),
        transformer=Transformer(layers=layers, hidden=hidden, heads=heads, sequence=2048, vocabulary=MPT_VOCABULARY),
        gpu_memory_bytes=MEMORY_BYTES[line["gpu"]],
        sharding=SHARDINGS[line["sharding"]],
        recompute=line["act_ckpt"] == "True",
    )
    configuration = Configuration(replicas=gpus, micro_batch=micro_batch, recompute=line["act_ckpt"] == "True")
    # The percentages have four digits, the TFLOP/s three.
    flops_per_s = float(line["mfu_pct"]) / 100 * PEAK_FLOPS[line["gpu"]] * gpus
    point = Point(workload, configuration, flops_per_s, 1.0)
    return Row(line["gpu"], line["model"], int(line["n_params"]), float(line["tokens_per_s"]), point)


def internevo(name: str) -> list[Point]:
    """The lines of one of InternEvo's two tables. Its FLOP/s count recomputation, so that is left out of both sides."""
    found = []
    for gpus, micro_batch, count, teraflops in INTERNEVO[name]:
        workload = Workload(
            global_batch=gpus * micro_batch * count,
            micro_batch_sizes=(micro_batch,),
            transformer=INTERNLM_7B,
            sharding="optimizer",
        )
        configuration = Configuration(replicas=gpus, micro_batch=micro_batch)
        found.append(Point(workload, configuration, teraflops * 1e12 * gpus, 1.0))
    return found
