"""Whether a failure is recognised when it comes again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.faults import Failure, signature

MESSAGES = [
    message
    for line in (Path(__file__).parent / "data" / "errors.jsonl").read_text(encoding="utf-8").splitlines()
    if (message := json.loads(line)["message"])
]


def _failure(**known: Any) -> Failure:
    return Failure(**{"at": 1.0, "rank": 3, "local_rank": 1, "pid": 4242, **known})


def _of(message: str) -> str:
    return signature(_failure(exception_type="RuntimeError", message=message, location="train.py:88 in step"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Connection closed by peer [127.0.0.1]:44696", "Connection closed by peer [10.11.1.20]:7"),
        ("Connect to fe80::966d:ae03:a2:8cf0%ib1<17943> failed", "Connect to fe80::1:2%ib1<5> failed"),
        ("opId=0x7f22ff731e10", "opId=0x55d15f6809da"),
        ("DataLoader worker (pid 46794) is killed", "DataLoader worker (pid 11011) is killed"),
        ("Tried to allocate 22.00 MiB. GPU 0", "Tried to allocate 1.37 GiB. GPU 3"),
        ("No such file: '/tmp/tmpab12x/part-0'", "No such file: '/tmp/tmpzz9qq/part-7'"),
        ("/dev/shm/nccl-EoOvZr (size 7340384)", "/dev/shm/nccl-WU88OE (size 9637888)"),
        ("shapes [4, 8, 16] and [4, 7]", "shapes [2, 2, 2, 2] and [9, 9, 9]"),
        (
            "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)",
            "mat1 and mat2 shapes cannot be multiplied (8x3 and 4x9)",
        ),
        ("loss is -0.5", "loss is 1.25e-05"),
        ("request 3f2b8c1e-0d4a-4e57-9b21-aa01bc23de45 failed", "request 00000000-1111-2222-3333-444444444444 failed"),
        ("commit deadbeef12 is bad", "commit 0123456789abcdef is bad"),
        (
            "boom\nException raised from f at a.cpp:1 (most recent call first):\nframe #0: g + 0x1 (0x7f in /a/lib.so)",
            "boom\nException raised from f at a.cpp:1 (most recent call first):\nframe #0: h + 0x2 (0x8e in /b/lib.so)",
        ),
    ],
)
def test_same_text_with_other_details_is_the_same(one: str, other: str) -> None:
    assert _of(one) == _of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("CUDA error: misaligned address", "CUDA error: device-side assert triggered"),
        ("No such file: '/data/a.bin'", "No such file: '/data/b.bin'"),
        ("'input_ids'", "'labels'"),
        ("c10d::Store failed", "c10d::Work failed"),
        ("loss is nan", "loss is 3"),
    ],
)
def test_other_text_is_another(one: str, other: str) -> None:
    assert _of(one) != _of(other)


BASE: dict[str, Any] = {"exception_type": "KeyError", "message": "'label'", "location": "train.py:88 in step"}


@pytest.mark.parametrize(
    "change",
    [
        {"at": 9.0},
        {"rank": 0},
        {"local_rank": 0},
        {"pid": 7},
        {"host": "b"},
        {"step": 8},
        {"stack": "x"},
        {"exit_code": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_circumstances_do_not_count(change: dict[str, Any]) -> None:
    assert signature(_failure(**BASE)) == signature(_failure(**{**BASE, **change}))


@pytest.mark.parametrize(
    "change",
    [{"exception_type": "IndexError"}, {"location": "train.py:89 in step"}, {"message": "'image'"}],
    ids=lambda change: next(iter(change)),
)
def test_type_place_and_text_count(change: dict[str, Any]) -> None:
    assert signature(_failure(**BASE)) != signature(_failure(**{**BASE, **change}))


def test_without_an_exception_the_end_counts() -> None:
    ends = [signature(_failure(exit_code=code)) for code in (None, 1, 2, -9, -11)]
    assert len(set(ends)) == len(ends)
    assert signature(_failure(exit_code=1, step=5)) == signature(_failure(exit_code=1))
    assert signature(_failure(exit_code=137)) == signature(_failure(exit_code=-9))


def test_script_in_a_temporary_folder() -> None:
    one, other = (
        signature(_failure(**{**BASE, "location": f"/tmp/{folder}/train.py:88 in step"})) for folder in ("a1", "b2")
    )
    assert one == other
    assert "88" in one


@given(st.sampled_from(MESSAGES), st.integers(0, 10**9), st.integers(0, 10**9))
def test_numbers_appended_to_real_texts_do_not_count(message: str, one: int, other: int) -> None:
    assert _of(f"id {one} {message}") == _of(f"id {other} {message}")


@given(st.text(max_size=500), st.one_of(st.none(), st.text(max_size=50)))
def test_any_text_gives_one_short_line(message: str, location: str | None) -> None:
    found = signature(_failure(exception_type="RuntimeError", message=message, location=location))
    assert len(found.splitlines()) == 1
    assert len(found) < 400
