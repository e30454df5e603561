"""A script with transformers' Trainer that imports nothing of ours goes on from memory, and ends with the same bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = str(Path(__file__).with_name("train_attached.py"))
SAID = "unicron: transformers' Trainer keeps its state in memory every 10 steps"


@pytest.fixture
def train(launcher: Any, short: dict[str, str]) -> Any:
    """Train on two ranks; return the run, which has ended well."""

    def run(*arguments: str, options: tuple[str, ...] = ("--attach=auto",)) -> Any:
        command = ("--standalone", "--nproc-per-node=2", "--max-restarts=3", *options, SCRIPT, *arguments)
        job = launcher.run(*command, fast=False, env={**short, "PROBE": str(launcher.folder), "OMP_NUM_THREADS": "1"})
        assert job.process.returncode == 0, job.out + job.err
        return job

    return run


def ends(job: Any) -> list[str]:
    """Return what each rank came to: the sum of its weights with all digits, and what it has logged."""
    return sorted(re.findall(r"^end .*$", job.out, re.MULTILINE))


@pytest.mark.parametrize(
    ("kill", "step", "order"),
    [
        ("--kill=1:37", 30, ["--own-order"]),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [
                ("--kill=1:15", 10, []),
                ("--kill=0:20", 20, []),
                ("--kill-evaluating=1:20", 10, []),
                ("--kill=1:37", 30, []),
                ("--kill=0:13", 10, ["--own-order"]),
            ]
        ),
    ],
)
def test_a_killed_rank_changes_no_bit(train: Any, launcher: Any, kill: str, step: int, order: list[str]) -> None:
    undisturbed = train(str(launcher.folder / "undisturbed"), *order, options=())
    assert "unicron: " not in undisturbed.err
    job = train(str(launcher.folder / "killed"), kill, *order)
    assert SAID in job.err
    assert f"All ranks go on from step {step}, from the memory of their hosts." in job.err
    assert job.err.count("unicron: what the dataset or the collator draws while samples are read is not what it") == 1
    assert ends(job) == ends(undisturbed)
    assert len(ends(job)) == 2


@pytest.mark.slow
def test_a_checkpoint_of_the_trainers_that_is_newer_goes_first(train: Any, launcher: Any) -> None:
    undisturbed = train(str(launcher.folder / "undisturbed"), options=())
    job = train(str(launcher.folder / "killed"), "--resume", "--kill=1:18")
    assert SAID in job.err
    assert "from the memory of their hosts" not in job.err  # the checkpoint is of step 15
    ours, theirs = ([line.partition(" log ")[0] for line in ends(each)] for each in (job, undisturbed))
    assert ours == theirs


@pytest.mark.slow
def test_a_script_that_has_ours_is_left_alone(train: Any, launcher: Any) -> None:
    job = train(str(launcher.folder / "own"), "--ours")
    assert SAID not in job.err
