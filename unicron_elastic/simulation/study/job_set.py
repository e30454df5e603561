"""Jobs to begin with, where nobody has given any: GPT-3 sizes, as in ``benchmarks/multi_task.py``, in whole nodes.

Known of the Unicron paper's comparison (arXiv 2401.00134), from memory and not from its text: six tasks on 128
GPUs, of 1.3 to 70 billion parameters, in five cases of sizes and weights of 0.5 to 2.0. Batches, minimums and which
case has which are chosen here: see docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from unicron_elastic.base.require import require
from unicron_elastic.planning.model.configurations import Workload
from unicron_elastic.planning.model.jobs import JobSpec, Modelled
from unicron_elastic.planning.model.shape import Transformer

GIB = 2**30
VOCABULARY, SEQUENCE = 51200, 2048
# Layers, hidden, heads, samples of a global batch, and the fewest nodes of 8 A100-80GB that have the memory. From table
# 2.1 of arXiv 2005.14165, and Llama 2's shape for 70B; as in benchmarks/_multi_task_cases.py.
SIZES: Mapping[str, tuple[int, int, int, int, int]] = MappingProxyType(
    {
        "1.3B": (24, 2048, 16, 512, 1),
        "7B": (32, 4096, 32, 1024, 1),
        "13B": (40, 5120, 40, 1024, 1),
        "70B": (80, 8192, 64, 1536, 2),
        "175B": (96, 12288, 96, 1536, 6),
    }
)
_SAME, _MIXED = ("7B",) * 6, ("1.3B", "1.3B", "7B", "7B", "13B", "70B")
_EQUAL, _RISING = (1.0,) * 6, (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)
JOB_SETS: Mapping[str, tuple[tuple[str, ...], tuple[float, ...]]] = MappingProxyType(
    {
        "case-1": (_SAME, _EQUAL),
        "case-2": (_SAME, _RISING),
        "case-3": (_MIXED, _EQUAL),
        "case-4": (_MIXED, _RISING),
        "case-5": (_MIXED, _RISING[::-1]),
        "one": (("175B",), (1.0,)),
    }
)
SIX_NODES = 64  # up to so many nodes six jobs are the default, above one
REPLICA_BATCH = 32  # samples per replica of the one job, where it has more nodes than its batch is meant for


def gpt(
    name: str, size: str, *, weight: float = 1.0, gpus_per_node: int = 8, max_nodes: int | None = None, batch: int = 0
) -> JobSpec:
    """A job that trains a GPT-3 of that size under Megatron-LM's rules: ZeRO-1, TP within a node, up to 16 stages."""
    require(size in SIZES, f"there is no size {size!r}: known are {', '.join(SIZES)}")
    layers, hidden, heads, samples, least = SIZES[size]
    workload = Workload(
        global_batch=batch or samples,
        micro_batch_sizes=(1, 2, 4, 8),
        gpus_per_unit=gpus_per_node,
        gpus_per_node=gpus_per_node,
        gpu_memory_bytes=80 * GIB,
        transformer=Transformer(layers=layers, hidden=hidden, heads=heads, sequence=SEQUENCE, vocabulary=VOCABULARY),
        sharding="optimizer",
        recompute=None,
        max_tensor=gpus_per_node,
        max_pipeline=16,
    )
    return JobSpec(
        name=name,
        command=("train.py",),
        directory="/",
        nproc_per_node=gpus_per_node,
        min_nodes=least,
        max_nodes=max_nodes,
        weight=weight,
        throughput=Modelled(workload),
    )


def job_set(name: str, nodes: int, gpus_per_node: int = 8) -> tuple[JobSpec, ...]:
    """Jobs by the name of a set. Raises ``ValueError`` for an unknown one."""
    require(name in JOB_SETS, f"there are no jobs {name!r}: known are {', '.join(JOB_SETS)}, or a file")
    if name == "one":
        replicas = nodes * gpus_per_node // 64  # of 64 GPUs or fewer, TP 8 and PP 8
        return (gpt("gpt", "175B", gpus_per_node=gpus_per_node, batch=max(1536, REPLICA_BATCH * replicas)),)
    sizes, weights = JOB_SETS[name]
    return tuple(
        gpt(f"job-{number}-{size}", size, weight=weight, gpus_per_node=gpus_per_node)
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True), 1)
    )


def default_jobs(nodes: int, gpus_per_node: int = 8) -> tuple[JobSpec, ...]:
    """Six of mixed sizes and equal weights on a small cluster, one large job on a large one."""
    return job_set("case-3" if nodes <= SIX_NODES else "one", nodes, gpus_per_node)
