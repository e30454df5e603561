"""The examples as a user runs them: saved and started again, under torchrun, and lost on the way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trains

EXAMPLES = Path(__file__).parents[2] / "examples"
UNICRON_RUN = ("--standalone", "--nproc-per-node=2", "--max-restarts=3")
TIERS = [pytest.param("", marks=pytest.mark.slow), pytest.param("_restored", marks=pytest.mark.slow), "_in_place"]
SMALL_GPT = ("--layers=1", "--width=16", "--batch-size=2", "--micro-batches=2", "--log-every=1")
SMALL_RESNET = ("--pictures=20", "--batch-size=24", "--log-every=1")


def losses(out: str) -> list[tuple[int, float]]:
    """(step, loss) in the order in which they were printed.

    Two ranks that print at the same time may share a line: Python writes its end separately.
    """
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+)  loss (\d+\.\d+)", out)]


def steps(out: str) -> list[int]:
    """Return the numbers of the steps in the order in which they were printed."""
    return [step for step, _ in losses(out)]


@pytest.fixture
def trained(launcher: Any, short: dict[str, str]) -> Any:
    """Runs an example on two ranks; returns the run, which must have ended well."""

    def run(name: str, *arguments: str, options: tuple[str, ...] = (), tool: str = "unicron-run") -> Any:
        command = (*UNICRON_RUN, *options, str(EXAMPLES / name), *arguments)
        job = launcher.run(*command, tool=tool, fast=False, env=short)
        assert job.process.returncode == 0, job.out + job.err
        return job

    return run


def test_fsdp2_restarts_from_memory_with_the_same_losses(trained: Any) -> None:
    arguments = ("--steps=18", "--batch-size=2", "--log-every=1", "--snapshot-every=5")
    job = trained("train_fsdp2.py", *arguments, options=("--unicron-chaos=kill:rank=1,step=15,phase=backward",))
    assert re.findall(r"  from step (\d+)", job.out) == ["0", "10"], job.out + job.err
    assert "All ranks go on from step 10, from the memory of their hosts." in job.err
    seen = losses(job.out)
    assert steps(job.out) == [*range(1, 15), *range(11, 19)]
    for step in range(11, 15):  # in order and number of ranks nothing has changed, so these are equal to the last bit
        first, second = (loss for number, loss in seen if number == step)
        assert first == second, f"step {step}"


@pytest.mark.parametrize("tier", TIERS)
def test_gpt_is_started_again_from_what_it_saved(launcher: Any, trained: Any, tier: str) -> None:
    arguments = (*SMALL_GPT, "--evaluate-every=3", f"--checkpoint-dir={launcher.folder / 'saved'}")
    job = trained(f"train_gpt{tier}.py", *arguments, "--steps=7")
    assert steps(job.out) == list(range(1, 8))
    assert re.findall(r"^step (\d+)  eval loss", job.out, re.MULTILINE) == ["3", "6"]
    again = trained(f"train_gpt{tier}.py", *arguments, "--steps=9")
    (first, *_) = re.findall(r"from step (\d+)", again.out)
    # Of tier 2, the state with which the step after the evaluation begins.
    assert first == ("7" if tier == "_in_place" else "6")
    assert steps(again.out) == list(range(int(first) + 1, 10))


@pytest.mark.parametrize("tier", TIERS)
def test_resnet_is_started_again_from_its_last_epoch(launcher: Any, trained: Any, tier: str) -> None:
    arguments = (*SMALL_RESNET, f"--checkpoint-dir={launcher.folder / 'saved'}")
    rates = r"^epoch (\d+)  accuracy .*  learning rate ([\d.]+)"
    job = trained(f"train_resnet{tier}.py", *arguments, "--epochs=2", "--decay-epochs=1")
    assert re.findall(rates, job.out, re.MULTILINE) == [("0", "0.1000"), ("1", "0.0100")]
    again = trained(f"train_resnet{tier}.py", *arguments, "--epochs=3", "--decay-epochs=1")
    assert re.findall(rates, again.out, re.MULTILINE) == [("2", "0.0010")]
    best = [float(re.findall(r"best accuracy ([\d.]+)", each.out)[0]) for each in (job, again)]
    assert best[0] <= best[1], "it knows the best of before"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("train_gpt.py", (*SMALL_GPT, "--steps=3")), ("train_resnet.py", (*SMALL_RESNET, "--epochs=1"))],
)
def test_plain_scripts_are_torchruns(trained: Any, name: str, arguments: tuple[str, ...]) -> None:
    job = trained(name, *arguments, tool="torchrun")
    assert steps(job.out) == [1, 2, 3], job.out + job.err
    assert re.findall("^done: ", job.out, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("train_gpt_in_place.py", (*SMALL_GPT, "--steps=3")),
        ("train_resnet_in_place.py", (*SMALL_RESNET, "--epochs=1")),
        ("train_fsdp2.py", ("--batch-size=2", "--log-every=1", "--steps=3")),
        ("train_fsdp2_in_place.py", ("--shard=1", "--batch-size=2", "--log-every=1", "--steps=3")),
        ("train_paragraphs_in_place.py", ("--tensor=1", "--micro-batches=2", "--log-every=1", "--steps=3")),
        ("train_accelerate_in_place.py", ("--samples=12", "--batch-size=2", "--epochs=1", "--log-every=1")),
        ("train_trainer_in_place.py", ("--paragraphs=100", "--width=16", "--log-every=1", "--steps=3")),
        ("train_lightning_in_place.py", ("--layers=1", "--width=16", "--batch-size=2", "--log-every=1", "--steps=3")),
    ],
)
def test_scripts_run_alone(name: str, arguments: tuple[str, ...]) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("UNICRON_", "PET_", "TORCHEL"))}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert steps(done.stdout) == [1, 2, 3], done.stdout
