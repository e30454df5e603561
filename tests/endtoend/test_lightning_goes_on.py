"""Lightning's Trainer in place trains as it does without: what each step comes to is compared."""

from __future__ import annotations

import ast
import csv
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.trains, pytest.mark.timeout(300)]

SCRIPT = str(Path(__file__).with_name("train_lightning.py"))
UNICRON_RUN = ("--standalone", "--nproc-per-node=2", "--max-restarts=3")
PRELOAD = "--unicron-preload=torch,lightning"  # which takes seconds to import
DEADLINE_S = 100.0
OFTEN = ("--evaluate=1.0", "--save=-1", "--schedule=plateau", "--epochs=3")
Steps = dict[int, dict[str, float]]


def steps_of(out: str) -> Steps:
    """Return what was written behind each step. Raises AssertionError if one is written twice."""
    found = re.findall(r"^step (\d+) (\{.*\})$", out, re.MULTILINE)
    steps = {int(step): ast.literal_eval(line) for step, line in found}
    assert len(steps) == len(found), out
    return steps


def lines_of(out: str, begin: str) -> list[str]:
    """Return the lines that begin so."""
    return [each for each in out.splitlines() if each.startswith(begin)]


def plain(folder: Path, *arguments: str) -> str:
    """Train in one process with nothing of ours; return what it printed."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("UNICRON_", "PET_"))}
    command = [sys.executable, SCRIPT, str(folder), "--plain", "--accumulate=4", *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what the plain Trainer says of three epochs, each with a validation and a checkpoint."""
    return plain(tmp_path_factory.mktemp("plain"), *OFTEN)


@pytest.fixture
def in_place(launcher: Any, short: dict[str, str]) -> Any:
    """Train on two ranks in place; return the run."""

    def run(*arguments: str, options: tuple[str, ...] = (), tool: str = "unicron-run") -> Any:
        own = (PRELOAD,) if tool == "unicron-run" else ()
        command = (*UNICRON_RUN, *own, *options, SCRIPT, str(launcher.folder / "of-ranks"), *arguments)
        env = {**short, "PROBE": str(launcher.folder), "OMP_NUM_THREADS": "1"}
        job = launcher.start(*command, tool=tool, fast=False, env=env)
        job.wait(DEADLINE_S)
        return job

    return run


def assert_alike(job: Any, other: str, kinds: tuple[str, ...] = ("evaluated", "best", "end")) -> None:
    """Fail if steps, losses, norms, rates, weights or what was evaluated are not the other's within rounding."""
    assert job.process.returncode == 0, job.out + job.err
    ours, theirs = steps_of(job.out), steps_of(other)
    assert list(ours) == list(theirs), job.out + job.err
    for step, values in theirs.items():
        assert ours[step] == pytest.approx(values, rel=1e-4, abs=1e-5), f"step {step}"
    for kind in kinds:
        assert _words(job.out, kind) == _words(other, kind), job.out + job.err
        assert _numbers(job.out, kind) == pytest.approx(_numbers(other, kind), rel=1e-4, abs=1e-5)
    assert "differ" not in job.err


_NUMBER = r"(?<![\w.])-?\d+\.\d+(?:e-?\d+)?"


def _words(out: str, kind: str) -> list[str]:
    return [re.sub(_NUMBER, "#", each) for each in lines_of(out, kind)]


def _numbers(out: str, kind: str) -> list[float]:
    return [float(number) for each in lines_of(out, kind) for number in re.findall(_NUMBER, each)]


def test_an_undisturbed_job_trains_as_the_plain_trainer_does(in_place: Any, undisturbed: str) -> None:
    job = in_place(*OFTEN)
    assert_alike(job, undisturbed)
    assert len(steps_of(job.out)) == 36
    assert len(lines_of(job.out, "evaluated")) == 3


def test_a_killed_rank_changes_no_number(in_place: Any, undisturbed: str) -> None:
    job = in_place(*OFTEN, "--kill=1:5")
    assert_alike(job, undisturbed)
    assert "1 rank goes on from the failed step." in job.err


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["0:5", "1:11", "0:12"])
def test_a_replacement_of_a_rank_joins_on_the_way(in_place: Any, undisturbed: str, tmp_path: Path, kill: str) -> None:
    job = in_place(*OFTEN, f"--kill={kill}", "--wait-at=20", "--bar")
    assert_alike(job, undisturbed)
    assert "joins the others: 2 ranks." in job.err, job.err
    (file,) = (tmp_path / "of-ranks").glob("lightning_logs/*/metrics.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [int(each["step"]) for each in rows if each["loss_step"]] == list(range(36))


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["--kill-evaluating=0:12", "--kill-evaluating=1:12", "--kill-saving=0:24"])
def test_a_rank_lost_between_steps_changes_no_number(
    in_place: Any, undisturbed: str, tmp_path: Path, kill: str
) -> None:
    job = in_place(*OFTEN, kill)
    assert_alike(job, undisturbed, ("best", "end"))  # what rank 0 was to say when it was lost nobody says
    saved = {each.name for each in (tmp_path / "of-ranks" / "saved").iterdir()}
    assert saved == {"epoch=1-step=24.ckpt", "epoch=2-step=36.ckpt"}


@pytest.mark.slow
def test_two_ranks_are_lost_one_after_the_other(in_place: Any, undisturbed: str) -> None:
    job = in_place(*OFTEN, "--kill=1:5", "--kill-evaluating=2:24", options=("--nproc-per-node=3",))
    assert job.process.returncode == 0, job.out + job.err
    assert len(steps_of(job.out)) == 24  # of six batches each
    four = in_place(*OFTEN, "--kill=1:5", "--kill-evaluating=3:12", "--accumulate=1", options=("--nproc-per-node=4",))
    assert_alike(four, undisturbed)


@pytest.mark.slow
def test_all_stop_early_as_the_plain_ones_do(in_place: Any, tmp_path: Path) -> None:
    more = ("--evaluate=1.0", "--save=5", "--schedule=epoch", "--stop-early", "--epochs=6", "--precision=bf16-mixed")
    job = in_place(*more)
    other = plain(tmp_path / "plain", *more)
    assert_alike(job, other)
    assert 0 < len(steps_of(job.out)) < 72


@pytest.mark.slow
def test_ranks_go_on_from_what_one_process_saved(in_place: Any, tmp_path: Path) -> None:
    other = plain(tmp_path / "plain", "--save=5")
    job = in_place("--resume", str(tmp_path / "plain" / "saved" / "step=15.ckpt"), "--kill=1:18", "--workers=1")
    assert job.process.returncode == 0, job.out + job.err
    ours, theirs = steps_of(job.out), steps_of(other)
    assert list(ours) == list(range(16, 25))
    for step, values in ours.items():
        assert values == pytest.approx(theirs[step], rel=1e-4, abs=1e-5), f"step {step}"


@pytest.mark.slow
@pytest.mark.parametrize(("every", "kept"), [(4, 12), (5, 10)])  # at the end of an epoch, and in its middle
def test_all_begin_from_memory_if_all_are_lost(in_place: Any, undisturbed: str, every: int, kept: int) -> None:
    chaos = ("--unicron-chaos=kill:rank=1,step=15",)
    job = in_place(*OFTEN, f"--snapshot-every={every}", "--kill=0:14", options=chaos)
    assert job.process.returncode == 0, job.out + job.err
    assert f"All ranks go on from step {kept}, from the memory of their hosts." in job.err
    epochs = len(lines_of(undisturbed, "evaluated"))
    assert lines_of(job.out, "batches") == [
        f"batches {23 * epochs} {23 * epochs}"
    ]  # of 46 batches two ranks have 23 each
    theirs = steps_of(undisturbed)
    for step, line in re.findall(r"^step (\d+) (\{.*\})$", job.out, re.MULTILINE):
        assert ast.literal_eval(line) == pytest.approx(theirs[int(step)], rel=1e-4, abs=1e-5), f"step {step}"
    assert lines_of(job.out, "evaluated")[-1:] != []


@pytest.mark.slow
def test_each_sample_of_an_epoch_is_read_for_one_batch(in_place: Any, tmp_path: Path) -> None:
    (tmp_path / "of-ranks").mkdir(parents=True, exist_ok=True)
    job = in_place("--write-samples", "--epochs=3")
    assert job.process.returncode == 0, job.out + job.err
    files = list((tmp_path / "of-ranks").glob("samples-*"))
    assert len(files) == 2
    read = Counter(number for each in files for number in each.read_text().split())
    assert set(read) == {str(number) for number in range(91)}
    assert set(read.values()) == {3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "words"),
    [("--other-order=1", "has the samples of epoch 0 in another order"), ("--iterable", "can only be iterated")],
)
def test_what_would_train_in_another_way_is_refused(in_place: Any, wrong: str, words: str) -> None:
    job = in_place(wrong, "--steps=5", options=("--max-restarts=0",))
    assert job.process.returncode == 1, job.out
    assert words in job.err
    assert steps_of(job.out) == {}


@pytest.mark.slow
def test_the_script_runs_under_torchrun(in_place: Any, undisturbed: str) -> None:
    assert_alike(in_place(*OFTEN, tool="torchrun"), undisturbed)
