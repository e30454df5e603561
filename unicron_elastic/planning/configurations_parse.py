"""A workload from a mapping, as it stands in a JSON or YAML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from unicron_elastic.planning.checks import require, require_keys
from unicron_elastic.planning.configurations import Workload
from unicron_elastic.planning.decoder import Decoder
from unicron_elastic.planning.throughput_shape import Transformer

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
