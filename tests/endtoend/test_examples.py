"""The examples as a user runs them: a rank dies on the way, and the losses go on as if it had not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trains

EXAMPLES = Path(__file__).parents[2] / "examples"
UNICRON_RUN = ("--standalone", "--nproc-per-node=2", "--max-restarts=3")
# The sum over micro-batches has another order when others compute them, and losses are printed to a thousandth.
SLACK = 0.002


def losses(out: str) -> list[tuple[int, float]]:
    """(step, loss) in the order in which they were printed.

    Two ranks that print at the same time may share a line: Python writes its end separately.
    """
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+)  loss (\d\.\d+)", out)]


def last_line(out: str) -> str:
    """Of what a script printed."""
    return out.rstrip().rpartition("\n")[2]


def started_from(out: str) -> list[int]:
    """The steps from which a world went on, in order."""
    return [int(step) for step in re.findall(r"  from step (\d+)", out)]


@cache
def undisturbed(name: str, *arguments: str) -> str:
    """What an example prints in one process, without any launcher, on one thread."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("UNICRON_", "PET_", "TORCHEL"))}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environ |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def killed(launcher: Any) -> Any:
    """Runs an example on two ranks under unicron-run; returns the run, which must have ended well."""

    def run(name: str, *arguments: str) -> Any:
        job = launcher.run(*UNICRON_RUN, str(EXAMPLES / name), *arguments, fast=False)
        assert job.process.returncode == 0, job.out + job.err
        return job

    return run


@pytest.mark.slow
def test_gpt_in_place_makes_each_step_once_with_the_same_losses(killed: Any) -> None:
    arguments = ("--steps", "16", "--batch-size", "2", "--log-every", "1")
    job = killed("train_gpt_in_place.py", *arguments, "--kill", "1:6")
    expected = losses(undisturbed("train_gpt_in_place.py", *arguments))
    seen = losses(job.out)
    assert [step for step, _ in seen] == list(range(1, 17)), job.out + job.err
    assert "1 rank goes on from the failed step" in job.err
    for (step, loss), (_, right) in zip(seen, expected, strict=True):
        assert abs(loss - right) <= SLACK, f"step {step}: {loss}, undisturbed {right}"


def test_gpt_in_place_loses_the_rank_that_prints(killed: Any) -> None:
    job = killed("train_gpt_in_place.py", "--steps", "12", "--batch-size", "2", "--log-every", "1", "--kill", "0:6")
    # The replacement may make a step that the other had made and printed already: it is the one that prints then.
    assert sorted({step for step, _ in losses(job.out)}) == list(range(1, 13)), job.out + job.err
    assert last_line(job.out).startswith("done: step 12  eval loss")


@pytest.mark.slow
def test_gpt_in_place_evaluates_and_saves_between_steps_and_is_started_again(launcher: Any, killed: Any) -> None:
    folder = launcher.folder / "saved"
    arguments = ("--batch-size", "2", "--log-every", "1", "--checkpoint-dir", str(folder), "--checkpoint-every", "5")
    job = killed("train_gpt_in_place.py", *arguments, "--steps", "12", "--evaluate-every", "4", "--kill", "1:6")
    assert [step for step, _ in losses(job.out)] == list(range(1, 13)), job.out + job.err
    assert re.findall(r"^step (\d+)  eval loss", job.out, re.MULTILINE) == ["4", "8"]
    again = killed("train_gpt_in_place.py", *arguments, "--steps", "14")
    assert started_from(again.out)[0] == 12
    assert [step for step, _ in losses(again.out)] == [13, 14]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("train_gpt_restored.py", ("--kill", "1:15")),
        ("train_fsdp2.py", ("--kill", "1:15", "--snapshot-every", "5")),
    ],
)
def test_restart_goes_on_from_memory_with_the_same_losses(killed: Any, name: str, arguments: tuple[str, ...]) -> None:
    job = killed(name, *arguments, "--steps", "18", "--batch-size", "2", "--log-every", "1")
    assert started_from(job.out) == [0, 10], job.out + job.err
    assert "All ranks go on from step 10, from the memory of their hosts." in job.err
    seen = losses(job.out)
    repeated = range(11, 15)
    assert [step for step, _ in seen] == [*range(1, 15), *range(11, 19)]
    for step in repeated:  # in order and number of ranks nothing has changed, so these are equal to the last bit
        first, second = (loss for number, loss in seen if number == step)
        assert first == second, f"step {step}"


@pytest.mark.slow
def test_restart_without_memory_goes_on_from_the_folder(launcher: Any, killed: Any) -> None:
    saved = ("--checkpoint-dir", str(launcher.folder / "saved"), "--checkpoint-every", "5")
    killed("train_gpt_restored.py", "--steps", "6", "--batch-size", "2", *saved)
    out = undisturbed("train_gpt_restored.py", "--steps", "8", "--batch-size", "2", "--log-every", "1", *saved)
    assert started_from(out) == [6]
    assert [step for step, _ in losses(out)] == [7, 8]


@pytest.mark.parametrize(
    ("kills", "goes_on_from"),
    [
        pytest.param(["1:12"], 11, id="in place", marks=pytest.mark.slow),
        pytest.param(["0:12", "1:12"], 10, id="all are lost", marks=pytest.mark.slow),
    ],
)
def test_tabular_ends_with_the_same_bits(killed: Any, kills: list[str], goes_on_from: int) -> None:
    arguments = ("--steps", "20", "--micro-batches", "4", "--precision", "fp16")
    job = killed("train_tabular.py", *arguments, *(f"--kill={kill}" for kill in kills))
    assert goes_on_from in started_from(job.out), job.out + job.err
    expected = last_line(undisturbed("train_tabular.py", *arguments))
    found = re.fullmatch(r"done: step 20  ([\d.]+)% of [\d,]{5,} held-out rows  parameters [0-9a-f]{12}", expected)
    assert found is not None, expected
    assert float(found[1]) > 60.0  # always naming the most frequent category is right for less than half
    assert last_line(job.out) == expected
