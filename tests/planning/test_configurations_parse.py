"""A workload as it stands in a file."""

from __future__ import annotations

import pytest

from unicron_elastic.planning.model.configurations import Workload, parse_workload
from unicron_elastic.planning.model.shape import Transformer

SIZES = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 100}


def test_all_kinds_of_fields() -> None:
    options = {
        "global_batch": 8,
        "micro_batch_sizes": [2, 4],
        "transformer": SIZES,
        "uneven": True,
        "recompute": None,
        "sharding": "full",
        "flops_per_sample": 1e9,
    }
    assert parse_workload(options) == Workload(
        global_batch=8,
        micro_batch_sizes=(2, 4),
        transformer=Transformer(layers=2, hidden=64, heads=4, sequence=32, vocabulary=100),
        uneven=True,
        recompute=None,
        sharding="full",
        flops_per_sample=1e9,
    )


def test_one_micro_batch_size() -> None:
    assert parse_workload({"global_batch": 8, "micro_batch_sizes": 4}).micro_batch_sizes == (4,)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "a workload has no global_batch: it must be given"),
        (
            {"global_batch": 8, "globl_batch": 8},
            "a workload has the unknown key 'globl_batch': did you mean global_batch?",
        ),
        ({"global_batch": 8, "zzz": 1}, "a workload has the unknown key 'zzz': known are global_batch"),
        ({"global_batch": "8"}, "global_batch is '8': it must be a whole number"),
        ({"global_batch": True}, "global_batch is True"),
        ({"global_batch": 8, "uneven": "no"}, "uneven is 'no': it must be true or false"),
        ({"global_batch": 8, "flops_per_sample": "1e9"}, "flops_per_sample is '1e9'"),
        ({"global_batch": 8, "sharding": 1}, "sharding is 1: it must be one of"),
        ({"global_batch": 8, "micro_batch_sizes": "4"}, "a size in micro_batch_sizes is '4'"),
        ({"global_batch": 8, "transformer": 7}, "transformer is 7: it must be a mapping"),
        ({"global_batch": 8, "transformer": {"layers": 2}}, "transformer has no hidden"),
        ({"global_batch": 8, "transformer": {**SIZES, "head": 2}}, "did you mean heads?"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_workload(options)
    assert said in str(raised.value)
