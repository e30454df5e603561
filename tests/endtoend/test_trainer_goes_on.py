"""transformers' Trainer in place trains as it does without: what it logs is compared, step by step."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = str(Path(__file__).with_name("train_trainer.py"))
EVALUATING = "--evaluate=12"  # at the end of each epoch: five batches, of which the last one has one text
UNICRON_RUN = ("--standalone", "--nproc-per-node=2", "--max-restarts=3")
Logs = list[tuple[int, dict[str, float]]]


def logs_of(out: str) -> Logs:
    """Return what was logged, in order."""
    found = re.findall(r"^step (\d+) (\{.*\})$", out, re.MULTILINE)
    return [(int(step), {name: float(value) for name, value in ast.literal_eval(line).items()}) for step, line in found]


def end_of(out: str) -> str:
    """Return what was counted."""
    (found,) = re.findall(r"^end (.*)$", out, re.MULTILINE)
    return str(found)


def plain(folder: Path, *arguments: str) -> str:
    """Train in one process with nothing of ours; return what it printed."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("UNICRON_", "PET_"))}
    command = [sys.executable, SCRIPT, str(folder), "--plain", "--accumulate=4", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what the plain Trainer says of two epochs."""
    return plain(tmp_path_factory.mktemp("plain"), EVALUATING)


@pytest.fixture
def in_place(launcher: Any, short: dict[str, str]) -> Any:
    """Train on two ranks in place; return the run."""

    def run(*arguments: str, options: tuple[str, ...] = (), tool: str = "unicron-run") -> Any:
        command = (*UNICRON_RUN, *options, SCRIPT, str(launcher.folder / "of-ranks"), *arguments)
        env = {**short, "PROBE": str(launcher.folder), "OMP_NUM_THREADS": "1"}
        return launcher.run(*command, tool=tool, fast=False, env=env)

    return run


def assert_alike(job: Any, other: str) -> None:
    """Fail if steps, losses, gradient norms, learning rates or metrics are not those of the other within rounding."""
    assert job.process.returncode == 0, job.out + job.err
    ours, theirs = logs_of(job.out), logs_of(other)
    assert [step for step, _ in ours] == [step for step, _ in theirs], job.out + job.err
    for (step, own), (_, others) in zip(ours, theirs, strict=True):
        # A rank counts its own batches: of 45 that two ranks have it has 23.
        assert own.pop("epoch") == pytest.approx(others.pop("epoch"), abs=0.03), f"step {step}"
        assert own == pytest.approx(others, rel=1e-4, abs=1e-5), f"step {step}"


def test_an_undisturbed_job_logs_what_the_plain_trainer_does(in_place: Any, undisturbed: str) -> None:
    job = in_place(EVALUATING)
    assert_alike(job, undisturbed)
    assert len(logs_of(job.out)) == 27  # two epochs of 12 steps, an evaluation of each, and the means of all
    assert "evaluated 10" in undisturbed
    assert "evaluated 8" in job.out  # three of five, and the losses of all, twice
    assert end_of(job.out) == end_of(undisturbed)


def test_a_killed_rank_changes_nothing_that_is_logged(in_place: Any, undisturbed: str) -> None:
    job = in_place("--kill=1:5", EVALUATING)
    assert_alike(job, undisturbed)
    assert "1 rank goes on from the failed step." in job.err


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["0:5", "1:11", "0:12"])
def test_a_replacement_joins_on_the_way(in_place: Any, undisturbed: str, kill: str) -> None:
    job = in_place(f"--kill={kill}", "--wait-at=17", "--bar", EVALUATING)
    assert_alike(job, undisturbed)
    assert "joins the others: 2 ranks." in job.err, job.err


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["0:6", "1:6"])
def test_a_rank_lost_in_an_evaluation_changes_no_metric(in_place: Any, tmp_path: Path, kill: str) -> None:
    often = ("--evaluate=3", "--save=3")
    other = plain(tmp_path / "plain", *often)
    job = in_place(*often, f"--kill-evaluating={kill}")
    assert job.process.returncode == 0, job.out + job.err
    assert "of the evaluation for those lost." in job.err, job.err
    ours, theirs = ({step: each for step, each in logs_of(out) if "loss" in each} for out in (job.out, other))
    assert ours.keys() == theirs.keys()
    for step in ours:
        assert ours[step]["loss"] == pytest.approx(theirs[step]["loss"], rel=1e-4), f"step {step}"
    evaluated = ([each["eval_loss"] for _, each in logs_of(out) if "eval_loss" in each] for out in (job.out, other))
    assert next(evaluated) == pytest.approx(next(evaluated), rel=1e-4)
    assert end_of(job.out).rpartition("log")[2] == end_of(other).rpartition("log")[2]
    saved = [{each.name for each in folder.iterdir()} for folder in (tmp_path / "plain", tmp_path / "of-ranks")]
    assert saved[0] == saved[1]


@pytest.mark.slow
def test_all_stop_early_as_the_plain_trainer_does(in_place: Any, tmp_path: Path) -> None:
    often = ("--evaluate=3", "--save=3", "--stop-early", "--tokens")
    job = in_place(*often)
    other = plain(tmp_path / "plain", *often)
    assert_alike(job, other)
    assert end_of(job.out) == end_of(other)
    assert "differ" not in job.err


@pytest.mark.slow
def test_ranks_go_on_from_a_checkpoint_of_one_process(in_place: Any, tmp_path: Path) -> None:
    folder = tmp_path / "of-ranks"
    other = plain(folder, "--save=5")
    for step in (10, 15, 20, 24):
        shutil.rmtree(folder / f"checkpoint-{step}")
    job = in_place("--resume", "--kill=1:14", "--workers=1")
    assert job.process.returncode == 0, job.out + job.err
    ours, theirs = logs_of(job.out)[:-1], logs_of(other)[5:-1]  # without the means of all steps of a run
    assert [step for step, _ in ours] == [step for step, _ in theirs] == list(range(6, 25))
    for (_, own), (_, others) in zip(ours, theirs, strict=True):
        assert own["loss"] == pytest.approx(others["loss"], rel=1e-4)


@pytest.mark.slow
def test_all_go_on_from_memory_if_all_are_lost(in_place: Any, undisturbed: str) -> None:
    job = in_place("--snapshot-every=4", "--kill=0:14", options=("--unicron-chaos=kill:rank=1,step=15",))
    assert job.process.returncode == 0, job.out + job.err
    assert "All ranks go on from step 12, from the memory of their hosts." in job.err
    theirs = {step: each for step, each in logs_of(undisturbed)[:-1] if "loss" in each}
    for step, own in [(step, each) for step, each in logs_of(job.out)[:-1] if "loss" in each]:
        assert own["loss"] == pytest.approx(theirs[step]["loss"], rel=1e-4), f"step {step}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--other-order=1", "has the samples of epoch 0 in another order"),
        ("--mean", "its loss is not a sum"),
        ("--iterable", "can only be iterated"),
    ],
)
def test_what_would_train_otherwise_is_refused(in_place: Any, wrong: str, words: str) -> None:
    job = in_place(wrong, "--steps=5", options=("--max-restarts=0",))
    assert job.process.returncode == 1, job.out
    assert words in job.err
    assert logs_of(job.out) == []


@pytest.mark.slow
def test_the_same_script_runs_under_torchrun(in_place: Any, undisturbed: str) -> None:
    assert_alike(in_place(EVALUATING, tool="torchrun"), undisturbed)


@pytest.mark.slow
def test_losses_that_are_added_up_are_so_in_place(in_place: Any, tmp_path: Path) -> None:
    assert_alike(in_place("--classify", "--kill=1:5"), plain(tmp_path / "plain", "--classify"))


@pytest.mark.slow
def test_a_step_may_have_the_batches_of_more_ranks_than_there_are(in_place: Any, undisturbed: str) -> None:
    job = in_place("--ranks=4", "--accumulate=1")
    assert job.process.returncode == 0, job.err
    ours, theirs = ([each for each in logs_of(out) if "eval_loss" not in each[1]] for out in (job.out, undisturbed))
    assert [each.get("loss") for _, each in ours[:-1]] == pytest.approx([each.get("loss") for _, each in theirs[:-1]])
