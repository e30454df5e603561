"""Accelerate in place trains as it does without: what each step comes to is compared with one plain process."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = str(Path(__file__).with_name("train_accelerate.py"))
SAMPLES, EPOCHS, STEPS_PER_EPOCH = 110, 3, 7
ACCURACY = 1e-5


def steps_of(out: str) -> list[tuple[float, ...]]:
    """Return step, loss, learning rate and norm of the weights, of each step."""
    found = re.findall(r"^step (\d+) loss (\S+) rate (\S+) norm (\S+)$", out, re.MULTILINE)
    return [tuple(map(float, each)) for each in found]


@pytest.fixture(scope="module")
def plain() -> list[tuple[float, ...]]:
    """Return what one process comes to that has nothing of ours."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("UNICRON_", "PET_"))}
    command = [sys.executable, SCRIPT, "--plain"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return steps_of(done.stdout)


@pytest.fixture
def in_place(launcher: Any, short: dict[str, str]) -> Any:
    """Train on two ranks; return the run, which has ended well."""

    def run(*arguments: str) -> Any:
        command = ("--standalone", "--nproc-per-node=2", "--max-restarts=3", SCRIPT, *arguments)
        job = launcher.run(*command, fast=False, env={**short, "PROBE": str(launcher.folder), "OMP_NUM_THREADS": "1"})
        assert job.process.returncode == 0, job.out + job.err
        return job

    return run


def assert_alike(job: Any, plain: list[tuple[float, ...]]) -> None:
    """Fail if a step is not what it is without us, within rounding."""
    ours = steps_of(job.out)
    assert [each[0] for each in ours] == [each[0] for each in plain] == [*range(1, EPOCHS * STEPS_PER_EPOCH + 1)], (
        job.out
    )
    for own, other in zip(ours, plain, strict=True):
        assert own == pytest.approx(other, abs=ACCURACY), job.err


def assert_each_sample_once(job: Any) -> None:
    """Fail if what counts of an epoch is not each of its samples once: what is read again is of one micro-batch."""
    read = re.findall(r"^read (\d+) (\d+) (\[.*\])$", job.out, re.MULTILINE)
    batches = {(int(step), int(index)): ast.literal_eval(samples) for step, index, samples in read}
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH)
        of_epoch = [each for (step, _), samples in batches.items() if step in steps for each in samples]
        assert sorted(of_epoch) == list(range(SAMPLES))


def test_a_replacement_of_the_first_rank_joins_on_the_way(in_place: Any, plain: list[tuple[float, ...]]) -> None:
    job = in_place("--kill=0:9", "--wait=12")
    assert "1 rank goes on from the failed step." in job.err
    assert "rank 0 is back and joins the others: 2 ranks." in job.err
    assert_alike(job, plain)
    assert_each_sample_once(job)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--kill=1:0",), ("--kill=1:6", "--wait=13"), ("--kill=0:7", "--wait=13")])
def test_nothing_changes_what_a_step_comes_to(
    in_place: Any, plain: list[tuple[float, ...]], arguments: tuple[str, ...]
) -> None:
    job = in_place(*arguments)
    assert_alike(job, plain)
    assert_each_sample_once(job)
