"""The mean over ranks is right in every type, and ranks that ask for different things are told so at once."""

from __future__ import annotations

import itertools
import math
import os
import re
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from unicron_elastic import Run
from unicron_elastic.engine.protocol.agreement import reports_to_give
from unicron_elastic.engine.protocol.said import MismatchError, Report, Said
from unicron_elastic.training.group.mean_share import FEW, MEAN, MESSAGE_BYTES, SUM, MeanShare, check_same

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("no_launcher")


FLOATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")
INTEGERS = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
COMPLEX = ("complex32", "complex64", "complex128")


def _summed(shares: list[MeanShare]) -> Any:
    """As the members' all_reduce, of what one rank gives there: the sum of what all have, scaled alike."""

    def all_reduce(tensor: Tensor) -> None:
        own = shares[0].numbers
        scale = tensor[0] / own[0] if own.numel() else torch.tensor(1.0)
        tensor.copy_(sum(share.numbers * scale.to(tensor.dtype) for share in shares))

    return SimpleNamespace(sum=all_reduce)


def _mean(*values: Any, call: str = MEAN) -> Tensor:
    """What each of these ranks gets."""
    shares = [MeanShare.of(value, CPU, call) for value in values]
    messages = [share.message(f"run.mean() number 1, of {share.kind}") for share in shares]
    check_same(messages)
    return shares[0].given_back(shares[0].result(messages, _summed(shares)))


def _given(dtype: str, *numbers: float) -> list[Tensor]:
    return [torch.tensor(number, dtype=torch.float64).to(getattr(torch, dtype)) for number in numbers]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_numbers_have_a_mean_of_their_type(dtype: str) -> None:
    kind = getattr(torch, dtype)
    found = _mean(*_given(dtype, 1.0, 2.0, 3.0))
    assert (found.dtype, found.shape, float(found)) == (kind, torch.Size([]), 2.0)
    largest = torch.finfo(kind).max
    assert float(_mean(*_given(dtype, *[largest] * 3))) == largest
    assert float(_mean(*_given(dtype, largest, -largest))) == 0.0


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 64])
def test_the_mean_of_equal_numbers_is_that_number(ranks: int) -> None:
    for number in (0.1, 1e308, 1e-300, 3.0, -7.25):
        assert float(_mean(*[number] * ranks)) == pytest.approx(number, rel=1e-15)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_have_a_mean_in_float64(dtype: str) -> None:
    kind = getattr(torch, dtype)
    most = 1 if dtype == "bool" else min(torch.iinfo(kind).max, 2**52)
    found = _mean(*_given(dtype, most, most))
    assert (found.dtype, float(found)) == (torch.float64, float(most))
    assert float(_mean(*_given(dtype, most, 0))) == most / 2
    if dtype.startswith("int"):
        assert float(_mean(*_given(dtype, -100, 101))) == 0.5


def test_what_was_wrong_once() -> None:
    assert float(_mean(torch.tensor(True), torch.tensor(True))) == 1.0
    assert float(_mean(*[torch.tensor(200, dtype=torch.uint8)] * 2)) == 200
    assert float(_mean(*[torch.tensor(100, dtype=torch.int8)] * 2)) == 100
    assert float(_mean(*[torch.tensor(60000, dtype=torch.float16)] * 2)) == 60000


@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_numbers_have_a_complex_mean(dtype: str) -> None:
    kind = getattr(torch, dtype)
    values = [torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128).to(kind), torch.tensor([3 + 0j, 1j]).to(kind)]
    found = _mean(*values)
    assert found.dtype == kind
    assert found.to(torch.complex128).tolist() == [2 + 1j, 1.5]
    assert _mean(*[value.to(torch.complex64).conj() for value in values]).tolist() == [2 - 1j, 1.5]


@pytest.mark.parametrize("value", [True, 3, 2.5, 1 + 2j, 10**20, float("inf")])
def test_a_number_of_pythons_has_a_mean(value: complex) -> None:
    found = _mean(value, value)
    assert found.dtype == (torch.complex128 if isinstance(value, complex) else torch.float64)
    assert found.item() == value


def test_nan_and_infinity_stay() -> None:
    assert math.isnan(float(_mean(torch.tensor(float("nan")), torch.tensor(1.0))))
    assert float(_mean(torch.tensor(float("inf")), torch.tensor(1.0))) == float("inf")


SHAPES: list[tuple[str, Callable[[], Tensor]]] = [
    ("a number", lambda: torch.rand(())),
    ("none", lambda: torch.rand(0, 3)),
    ("one dimension", lambda: torch.rand(7)),
    ("transposed", lambda: torch.rand(3, 5).t()),
    ("every second", lambda: torch.rand(20)[::2]),
    ("expanded", lambda: torch.rand(1, 4).expand(3, 4)),
    ("channels last", lambda: torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    ("as many as go into a message", lambda: torch.rand(FEW)),
    ("one more", lambda: torch.rand(FEW + 1)),
    ("many", lambda: torch.rand(100_000)),
    ("a parameter", lambda: nn.Parameter(torch.rand(2, 2))),
    ("with a graph", lambda: torch.rand(3, requires_grad=True) * 2),
    ("many dimensions", lambda: torch.rand([1] * 60)),
]


@pytest.mark.parametrize(("_name", "make"), SHAPES)
def test_any_shape(_name: str, make: Callable[[], Tensor]) -> None:
    values = [make() for _ in range(3)]
    before = [value.detach().clone() for value in values]
    found = _mean(*values)
    expected = torch.stack([value.detach().double() for value in values]).mean(0).float()
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad
    assert all(torch.equal(value, old) for value, old in zip(values, before, strict=True))


@pytest.mark.parametrize("dtype", [each for each in (*FLOATS, *INTEGERS, *COMPLEX) if each != "uint64"])
@pytest.mark.parametrize("shape", [(), (3,), (FEW + 1,)])
def test_the_sum_of_numbers_has_their_type_and_of_integers_all_their_digits(dtype: str, shape: tuple[int, ...]) -> None:
    kind = getattr(torch, dtype)
    values = [torch.ones(shape, dtype=torch.float32).to(kind) for _ in range(3)]
    found = _mean(*values, call=SUM)
    is_whole = dtype in INTEGERS
    assert (found.dtype, found.shape) == (torch.int64 if is_whole else kind, shape)
    assert torch.equal(found.to(torch.complex128), torch.full(shape, 3.0, dtype=torch.complex128))


def test_sums_of_integers_are_exact_and_those_of_floats_do_not_overflow_on_the_way() -> None:
    for shape in ((), (FEW + 1,)):
        large = [torch.full(shape, number) for number in (2**62 + 1, 1, -(2**62))]
        assert _mean(*large, call=SUM).unique().tolist() == [2]
        assert _mean(*[torch.full(shape, 1e308, dtype=torch.float64)] * 2, call=SUM).unique().tolist() == [math.inf]
        floats = [torch.full(shape, number, dtype=torch.float64) for number in (1e308, 1e308, -1e308)]
        assert _mean(*floats, call=SUM).unique().tolist() == pytest.approx([1e308])


@pytest.mark.parametrize(
    ("value", "expected", "dtype"),
    [
        (True, 2, torch.int64),
        (2**53 + 1, 2**54 + 2, torch.int64),
        (0.5, 1.0, torch.float64),
        (1j, 2j, torch.complex128),
    ],
)
def test_the_sum_of_numbers_of_pythons(value: complex, expected: complex, dtype: torch.dtype) -> None:
    found = _mean(value, value, call=SUM)
    assert (found.dtype, found.item()) == (dtype, expected)


def test_integers_that_have_no_sum_are_refused() -> None:
    with pytest.raises(OverflowError, match=r"run.all_reduce\(value\) takes integers below 2\*\*63, and got 922337203"):
        MeanShare.of(2**63, CPU, SUM)
    with pytest.raises(TypeError, match=r"run.all_reduce\(value\) takes no uint64"):
        MeanShare.of(torch.ones(1, dtype=torch.uint64), CPU, SUM)
    with pytest.raises(TypeError, match=r"run.all_reduce\(value\) takes a tensor or a number, and not a list"):
        MeanShare.of(cast("Any", [1]), CPU, SUM)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.eye(2).to_sparse(), r"sparse_coo.*to_dense"),
    (lambda: torch.eye(2).to_sparse_csr(), r"sparse_csr.*to_dense"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized tensor: give it value.dequan"),
    (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
    (lambda: torch.ones(2, device="meta"), "meta device"),
    (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "cannot sum float4"),
    (lambda: [1.0, 2.0], "takes a tensor or a number, and not a list"),
    (lambda: None, "takes a tensor or a number, and not a NoneType"),
    (lambda: "0.5", "takes a tensor or a number, and not a str"),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED)
def test_what_has_no_mean_is_refused(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        MeanShare.of(make(), CPU)


def test_other_types_shapes_and_numbers_of_calls_are_told_by_rank() -> None:
    one, two = (Report(until=9, state=3, number=number, kind="float32 [2]") for number in (1, 2))
    other = Report(until=9, state=3, number=1, kind="float64 [2]")
    share = MeanShare.of(torch.ones(2), CPU)
    for asked in itertools.permutations([one, two, other], 2):
        messages = [share.message(report.label) for report in (asked[0], *asked)]
        with pytest.raises(MismatchError, match=r"rank 0 waits for run.mean\(\) number .*and rank 2 for"):
            check_same(messages)
    long = [MeanShare.of(torch.ones([1] * 60 + [last]), CPU) for last in (1, 2)]
    messages = [share.message(share.kind) for share in long]
    assert {len(message) for message in messages} == {MESSAGE_BYTES}
    with pytest.raises(MismatchError):
        check_same(messages)


def test_a_result_goes_to_those_who_wait_for_it_from_one_who_has_it() -> None:
    report = Report(until=9, state=3, number=2, kind="float32 [2]")
    waits, has, ahead = Said(state=3, asks=report), Said(state=4, report=report), Said(state=4)
    assert reports_to_give([waits, ahead, has, waits, has]) == [(2, 0), (2, 3)]
    assert reports_to_give([waits, ahead]) == []
    assert reports_to_give([Said(state=3, asks=report, report=report), has]) == []


# -- real processes ---------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from unicron_elastic import Run
model = nn.Linear(2, 1)
run = Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), timeout_s=60)
rank = run.rank
for total in (2, 4):
    for step in run.steps(total, 4):
        for index in step:
            step.backward(model(torch.ones(1, 2)).mean())
        {in_step}
        print("step", step.number, flush=True)
    {behind}
"""


Ranks = Callable[..., tuple[list[str], list[int], float]]


@pytest.fixture
def ranks(warm_launchers: Any, tmp_path: Path) -> Ranks:
    """What two ranks write, their exit codes, and how long that took."""

    def run(in_step: str = "pass", behind: str = "pass") -> tuple[list[str], list[int], float]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(SCRIPT).format(in_step=in_step, behind=behind))
        env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 10_000)}
        said = [tmp_path / f"said-{rank}" for rank in range(2)]
        began = time.monotonic()
        workers = [warm_launchers.begin(said[rank], str(script), RANK=str(rank), **env) for rank in range(2)]
        codes = [worker.wait(50) for worker in workers]
        return [each.read_text() for each in said], codes, time.monotonic() - began

    return run


def test_means_of_two_ranks(ranks: Ranks) -> None:
    lines = [
        "assert float(run.mean(torch.tensor(200 + rank, dtype=torch.uint8))) == 200.5",
        "assert float(run.mean(torch.arange(300_000.0)[-1:] + rank)) == 299_999.5",
        "assert float(run.mean(torch.arange(300_000.0) + rank)[-1]) == 299_999.5",
        "assert float(run.mean(rank == 0)) == 0.5",
        "assert run.mean(torch.zeros(0, 2)).shape == (0, 2)",
    ]
    said, codes, _ = ranks(in_step="; ".join(lines), behind="assert float(run.mean(rank)) == 0.5")
    assert codes == [0, 0], said


UNEVEN = [
    ("run.mean(torch.ones(70_000 + rank))", "pass", r"float32 \[70000\].*float32 \[70001\]"),
    ("[run.mean(1.0) for _ in range(1 + rank * (step.number == 1))]", "pass", r"the end of run.steps\(total=2\)"),
    pytest.param(
        "run.mean(1.0) if rank == 0 else None", "pass", "the gradients of step 1", marks=pytest.mark.slow, id="one rank"
    ),
    pytest.param(
        "pass",
        "[run.mean(1.0) for _ in range(1 + rank)]",
        "the gradients of step 2.*number 2 behind step 2 of 2",
        marks=pytest.mark.slow,
        id="in the next call",
    ),
]


@pytest.mark.parametrize(("in_step", "behind", "sentence"), UNEVEN)
def test_uneven_means_of_two_ranks_are_told_at_once(ranks: Ranks, in_step: str, behind: str, sentence: str) -> None:
    said, codes, took_s = ranks(in_step, behind)
    assert codes == [1, 1], said
    for each in said:
        last = each.strip().splitlines()[-1]
        assert "MismatchError: rank 0 waits for" in last, each
        assert re.search(sentence, last), last
    assert took_s < 30


def test_a_run_alone_gives_back_what_it_gets() -> None:
    run = Run(model=nn.Linear(1, 1))
    for step in run.steps(1, 1):
        for _ in step:
            step.backward(run._model(torch.ones(1, 1)).mean())
        with torch.inference_mode():
            assert run.mean(torch.tensor([3, 4])).tolist() == [3.0, 4.0]
        assert run.mean(torch.tensor(0.25, dtype=torch.float16)).dtype == torch.float16
