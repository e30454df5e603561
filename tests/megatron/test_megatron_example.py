"""The Megatron-Core example as a user runs it: it learns, and a step does not depend on the split by ranks."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from megatron_processes import EXAMPLE, needs_megatron, run

pytestmark = needs_megatron

STEPS = 8
SIZE = ("--layers", "4", "--hidden", "64", "--sequence", "32", "--micro-batch-size", "2", "--micro-batches", "4")
SLACK = 1.5e-4  # of losses that agree to 1e-4, when both are printed with four decimals
OVERLAPPED = ("--distributed-optimizer", "--overlap-grad-reduce")


def losses(out: str) -> list[float]:
    """The loss of each step."""
    found = re.findall(r"^step (\d+) loss (\d+\.\d{4})", out, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(1, STEPS + 1)), out
    return [float(loss) for _, loss in found]


def train(*arguments: str, ranks: int = 1, launcher: str = "torchrun") -> list[float]:
    """The losses of a run, which must have fallen."""
    options = ("--steps", str(STEPS), "--log-every", "1", *arguments)
    found = losses(run(EXAMPLE, *SIZE, *options, ranks=ranks, launcher=launcher))
    assert found[0] > 5, "a model that has seen nothing knows nothing"
    assert sum(found[-3:]) / 3 < found[0] - 0.3, found
    return found


@cache
def alone(*arguments: str) -> list[float]:
    """The losses of a run of one process."""
    return train(*arguments)


def digests(folder: Path) -> dict[str, str]:
    """The digest of each rank's weights, by its place in the split."""
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.slow
def test_replicas_train_as_one_process_does_and_stay_equal(tmp_path: Path) -> None:
    assert train("--digest", str(tmp_path), ranks=2) == pytest.approx(alone(), abs=SLACK)
    found = digests(tmp_path)
    assert found.keys() == {"tp0-pp0-dp0", "tp0-pp0-dp1"}
    assert len(set(found.values())) == 1


@pytest.mark.slow
def test_tensor_parallel_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    assert train("--tensor", "2", "--digest", str(tmp_path), ranks=2) == pytest.approx(alone(), abs=SLACK)
    found = digests(tmp_path)
    assert found.keys() == {"tp0-pp0-dp0", "tp1-pp0-dp0"}
    assert len(set(found.values())) == 2


@pytest.mark.slow
def test_pipeline_stages_train(tmp_path: Path) -> None:
    train("--pipeline", "2", "--digest", str(tmp_path), ranks=2)
    found = digests(tmp_path)
    assert found.keys() == {"tp0-pp0-dp0", "tp0-pp1-dp0"}
    assert len(set(found.values())) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--overlap-grad-reduce",),
        ("--distributed-optimizer",),
        OVERLAPPED,
    ],
    ids=" ".join,
)
def test_uneven_replicas_train_as_one_process_does(arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert train(*arguments, "--digest", str(tmp_path), ranks=3) == pytest.approx(alone(), abs=SLACK)
    assert len(set(digests(tmp_path).values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--overlap-grad-reduce",), OVERLAPPED], ids=" ".join)
def test_interleaved_stages_train_alike_with_more_replicas(arguments: tuple[str, ...], tmp_path: Path) -> None:
    interleaved = ("--pipeline", "2", "--virtual-pipeline", "2")
    expected = train(*interleaved, ranks=2)
    assert train(*interleaved, *arguments, "--digest", str(tmp_path), ranks=4) == pytest.approx(expected, abs=SLACK)
    found = digests(tmp_path)
    assert found["tp0-pp0-dp0"] == found["tp0-pp0-dp1"]
    assert found["tp0-pp1-dp0"] == found["tp0-pp1-dp1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--tensor", "2", "--pipeline", "2"),
        ("--tensor", "2", "--bf16", *OVERLAPPED),
        ("--pipeline", "4", "--untied"),
        ("--pipeline", "2", "--dropout", "0.1", "--bf16"),
    ],
    ids=" ".join,
)
def test_four_ranks_train_the_same_whenever_they_are_started(arguments: tuple[str, ...], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(*arguments, "--digest", str(first), ranks=4) == train(*arguments, "--digest", str(second), ranks=4)
    assert digests(first) == digests(second)
    assert len(digests(first)) == 4


@pytest.mark.slow
def test_under_unicron_run(tmp_path: Path) -> None:
    assert train("--digest", str(tmp_path), ranks=2, launcher="unicron-run") == pytest.approx(alone(), abs=SLACK)
    assert len(set(digests(tmp_path).values())) == 1
