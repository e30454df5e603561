"""What a step computes, and the ways in which a number of GPUs can share it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from unicron_elastic.base.require import require, require_count, require_keys
from unicron_elastic.planning.model.decoder import Decoder
from unicron_elastic.planning.model.shape import Transformer, require_counts

Sharding = Literal["none", "optimizer", "full"]
SHARDINGS: tuple[Sharding, ...] = ("none", "optimizer", "full")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Configuration:
    """How GPUs share a step: ``replicas`` of the model, each on ``tensor * pipeline`` GPUs (DP, TP and PP).

    ``micro_batch`` is in samples. With ``recompute`` activations are computed a second time instead of kept.
    Raises ``ValueError`` if a size is no whole number of at least 1.
    """

    replicas: int
    tensor: int = 1
    pipeline: int = 1
    micro_batch: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        require_counts(replicas=self.replicas, tensor=self.tensor, pipeline=self.pipeline, micro_batch=self.micro_batch)

    @property
    def gpus(self) -> int:
        """How many GPUs it takes."""
        return self.replicas * self.tensor * self.pipeline

    def __str__(self) -> str:
        again = ", recomputed activations" if self.recompute else ""
        return f"DP {self.replicas} x TP {self.tensor} x PP {self.pipeline}, micro-batch {self.micro_batch}{again}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a job computes in a step, and where it may run. The global batch is the same on any number of workers.

    A unit is what the planner hands out: a GPU, or with ``gpus_per_unit`` a node. A plain data-parallel script needs
    ``global_batch`` and ``micro_batch_sizes`` only. ``max_tensor`` and ``max_pipeline`` say what the script can do,
    which the shape of a model does not tell.

    Raises ``ValueError`` if a size is not positive, or if two of them contradict each other.
    """

    global_batch: int  # samples of one optimizer step, of all replicas together
    micro_batch_sizes: tuple[int, ...] = (1,)  # samples; those that the script may be started with
    minimum: int = 1  # units
    maximum: int | None = None  # units; None: as many as there are
    gpus_per_unit: int = 1
    gpus_per_node: int = 8
    gpu_memory_bytes: int | None = None  # None: memory is not looked at
    uneven: bool = False  # replicas may have different numbers of micro-batches, as under unicron_elastic.Run
    transformer: Transformer | None = None
    parameters: int | None = None  # None: by the shape of the transformer, if that is known
    flops_per_sample: float | None = None  # model FLOPs; None: by the shape of the transformer
    # What the replicas divide between them: nothing, the optimizer's state (ZeRO-1), or weights too (ZeRO-3, FSDP).
    sharding: Sharding = "none"
    recompute: bool | None = False  # whether activations are computed a second time; None: either is possible
    shard_copies: int = 0  # of every optimizer shard, in the memory of hosts (host_bytes)
    max_tensor: int = 1
    max_pipeline: int = 1
    sequence_parallel: bool = False  # the ranks of a tensor group divide the tokens between its matrix products
    virtual_stages: int = 1  # that a GPU has of a pipeline, if there is one (interleaved 1F1B)

    def __post_init__(self) -> None:
        require_counts(
            global_batch=self.global_batch,
            minimum=self.minimum,
            gpus_per_unit=self.gpus_per_unit,
            gpus_per_node=self.gpus_per_node,
            max_tensor=self.max_tensor,
            max_pipeline=self.max_pipeline,
            virtual_stages=self.virtual_stages,
        )
        require_count("shard_copies", self.shard_copies)
        for name in ("maximum", "gpu_memory_bytes", "parameters"):
            if getattr(self, name) is not None:
                require_counts(**{name: getattr(self, name)})
        require(
            self.maximum is None or self.maximum >= self.minimum,
            f"maximum is {self.maximum}, less than minimum, {self.minimum}: it must be at least that",
        )
        _require_batches(self)
        _require_model(self)

    @property
    def step_flops(self) -> float:
        """Model FLOPs of one optimizer step. Raises ``ValueError`` if neither FLOPs nor a transformer are known."""
        per_sample = self.flops_per_sample
        if per_sample is None and self.transformer is not None:
            per_sample = self.transformer.flops_per_sample
        if per_sample is None:
            raise ValueError(
                "the FLOPs of a step are not known: give transformer or flops_per_sample, which "
                "assumed_flops_per_sample() makes from the time of a step"
            )
        return per_sample * self.global_batch


def _require_batches(workload: Workload) -> None:
    sizes = workload.micro_batch_sizes
    require(
        isinstance(sizes, tuple) and bool(sizes),
        f"micro_batch_sizes is {sizes!r}: it must be a tuple with at least one size",
    )
    for size in sizes:
        require_counts(**{"a size in micro_batch_sizes": size})
    require(
        any(workload.global_batch % size == 0 for size in sizes),
        f"no size in micro_batch_sizes, {', '.join(map(str, sizes))}, divides global_batch, {workload.global_batch}: "
        "at least one must",
    )


def _require_model(workload: Workload) -> None:
    shape, flops = workload.transformer, workload.flops_per_sample
    require(
        workload.sharding in SHARDINGS, f"sharding is {workload.sharding!r}: it must be one of {', '.join(SHARDINGS)}"
    )
    require(
        flops is None or (math.isfinite(flops) and flops > 0.0),
        f"flops_per_sample is {flops}: it must be a positive number",
    )
    require(
        workload.shard_copies == 0 or workload.sharding != "none",
        f"shard_copies is {workload.shard_copies}, but sharding is none: every replica then has the whole state, and "
        "shard_copies must be 0",
    )
    for name in ("max_tensor", "max_pipeline", "virtual_stages"):
        require(
            shape is not None or getattr(workload, name) == 1,
            f"{name} is {getattr(workload, name)}, but transformer is not given: without it, {name} must be 1",
        )


NUMBERS = ("flops_per_sample",)
FLAGS = ("uneven", "recompute", "sequence_parallel")


def parse_workload(options: Mapping[str, object]) -> Workload:
    """The workload with the fields that ``options`` names; ``micro_batch_sizes`` may be one number.

    Raises ``ValueError`` for an unknown or missing key and for a value of the wrong kind or size.
    """
    require_keys(options, _names(Workload), "a workload", ("global_batch",))
    values: dict[str, Any] = {key: _value(key, value) for key, value in options.items()}
    return Workload(**values)


def _value(key: str, value: object) -> object:
    if key == "transformer" and value is not None:
        require(isinstance(value, Mapping), f"transformer is {value!r}: it must be a mapping with the sizes of a model")
        return _parse_transformer(dict(value))  # type: ignore[call-overload]
    if key == "micro_batch_sizes":
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return tuple(value) if is_list else (value,)  # type: ignore[arg-type]
    if key in FLAGS:
        is_flag = isinstance(value, bool) or (key == "recompute" and value is None)
        require(is_flag, f"{key} is {value!r}: it must be true or false")
    elif key in NUMBERS:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        require(is_number or value is None, f"{key} is {value!r}: it must be a positive number")
    return value


def _parse_transformer(sizes: dict[str, Any]) -> Transformer:
    """The approximation where only its sizes are given, the exact decoder with any key more."""
    plain = _names(Transformer)
    require_keys(sizes, _names(Decoder), "transformer", plain)
    return Transformer(**sizes) if set(sizes) <= set(plain) else Decoder(**sizes)


def _names(made: type[Any]) -> list[str]:
    return [field.name for field in fields(made)]
