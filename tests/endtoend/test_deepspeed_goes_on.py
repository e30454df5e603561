"""All ranks of a job with DeepSpeed go on from a snapshot, each with its own part, and end with the same numbers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from finals import final

pytestmark = [
    pytest.mark.trains,
    pytest.mark.timeout(5 * 150),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

SCRIPT = str(Path(__file__).with_name("train_deepspeed.py"))
RANKS = 2
DEADLINE_S = 150.0  # DeepSpeed is slow to import


@pytest.fixture
def train(launcher: Any, short: dict[str, str], tmp_path: Path) -> Any:
    """Train on ranks; return the run, which has ended well, and what each rank came to."""

    def run(*arguments: str, ranks: int = RANKS) -> tuple[Any, list[dict[str, Any]]]:
        probe = tmp_path / f"probe-{len(list(tmp_path.iterdir()))}"
        probe.mkdir()
        command = ("--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3", SCRIPT, *arguments)
        job = launcher.start(*command, fast=False, env={**short, "PROBE": str(probe), "OMP_NUM_THREADS": "1"})
        assert job.wait(DEADLINE_S) == 0, job.out + job.err
        return job, [final(probe, rank) for rank in range(ranks)]

    return run


def assert_same_but_for_the_begin(ours: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for own, other in zip(ours, others, strict=True):
        assert {**own, "begun": 0} == {**other, "begun": 0}


@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        ("1", "bf16"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [("0", "fp32"), ("0", "bf16"), ("1", "fp32")]),
        pytest.param("2", "bf16", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_changes_no_number(train: Any, stage: str, precision: str) -> None:
    _, undisturbed = train(stage, precision)
    job, struck = train(stage, precision, "--kill=1:13")
    assert "All ranks go on from step 10, from the memory of their hosts." in job.err
    assert [each["begun"] for each in struck] == [10, 10]
    assert_same_but_for_the_begin(struck, undisturbed)
    if stage != "0":
        assert struck[0]["masters"] != struck[1]["masters"]  # each has its own


@pytest.mark.slow
def test_parts_come_back_from_a_folder_to_as_many_ranks(train: Any, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    _, undisturbed = train("1", "bf16")
    train("1", "bf16", f"--folder={folder}", "--steps=10")
    _, later = train("1", "bf16", f"--folder={folder}")
    assert [each["begun"] for each in later] == [10, 10]
    assert_same_but_for_the_begin(later, undisturbed)
    _, more = train("1", "bf16", f"--folder={folder}", "--steps=12", ranks=3)
    assert [each["begun"] for each in more] == [0, 0, 0]
