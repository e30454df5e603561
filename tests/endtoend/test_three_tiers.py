"""The loops that everybody has, at three tiers: ranks are killed in an epoch and at its edge, and no number changes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.trains

EXAMPLES = Path(__file__).parents[2] / "examples"
STRUCK = str(Path(__file__).with_name("struck_example.py"))
ARGUMENTS = {
    # Half precision, so that the scaler has something to do; an evaluation before each fourth step.
    "gpt": (
        *("--layers=1", "--width=16", "--precision=float16", "--batch-size=2", "--micro-batches=2"),
        *("--steps=16", "--evaluate-every=4", "--log-every=1", "--warm-up=4"),
    ),
    # Six steps in an epoch, each epoch with another learning rate.
    "resnet": ("--pictures=40", "--batch-size=24", "--epochs=3", "--decay-epochs=1", "--log-every=1"),
}


class Trained(NamedTuple):
    """What a job printed, and for each process the learning rate and a digest of all weights after each step."""

    out: str
    err: str
    steps: dict[str, list[Any]]

    @property
    def losses(self) -> set[tuple[str, str]]:
        """(step, loss) as printed, each once."""
        return set(re.findall(r"step (\d+)  loss (\d\.\d+)", self.out))

    @property
    def done(self) -> tuple[str, float]:
        """What the script says at its end: how far it has come, and how well it does on what was held out."""
        (found,) = re.findall(r"^done: (\w+ \d+|\d+ \w+)  [a-z ]+([\d.]+)", self.out, re.MULTILINE)
        return found[0], float(found[1])


def steps_of(folder: Path) -> dict[str, list[Any]]:
    """What the processes of a job have noted."""
    return {path.name: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("steps-*")}


@pytest.fixture
def train(launcher: Any, short: dict[str, str]) -> Callable[..., Trained]:
    """Has two ranks train to a good end, whatever strikes."""

    def run(name: str, *arguments: str, strikes: tuple[str, ...] = (), waits: tuple[str, ...] = ()) -> Trained:
        for path in launcher.folder.glob("steps-*"):
            path.unlink()
        flags = [f"--strike={each}" for each in strikes] + [f"--wait={each}" for each in waits]
        options = ("--standalone", "--nproc-per-node=2", "--max-restarts=5")
        job = launcher.run(*options, STRUCK, *flags, str(EXAMPLES / name), *arguments, env=short)
        assert job.process.returncode == 0, job.out + job.err
        assert {path.name for path in launcher.folder.glob("struck-*")} == {f"struck-{each}" for each in strikes}
        return Trained(job.out, job.err, steps_of(launcher.folder))

    return run


@pytest.fixture
def undisturbed(alone: Any, short: dict[str, str], tmp_path: Path) -> Callable[..., Trained]:
    """Has one process train by itself."""

    def run(name: str, *arguments: str) -> Trained:
        folder = tmp_path / "whole"
        folder.mkdir()
        alone(folder, STRUCK, str(EXAMPLES / name), *arguments, **short)
        return Trained((folder / "said").read_text(), "", steps_of(folder))

    return run


def assert_same(struck: Trained, whole: Trained) -> None:
    """Each process has made steps of the undisturbed training one after another, and all of them together all."""
    (right, *others) = whole.steps.values()
    assert all(each == right for each in others)
    for name, made in struck.steps.items():
        first = right.index(made[0])
        assert made == right[first : first + len(made)], name
    assert {tuple(step) for made in struck.steps.values() for step in made} == {tuple(step) for step in right}
    assert len(whole.losses) in (15, 16, 18)
    assert struck.losses <= whole.losses  # a lost rank 0 has printed none of the step that the others finish
    assert struck.done[0] == whole.done[0]
    assert struck.done[1] == pytest.approx(whole.done[1], abs=2e-4)  # a mean of ranks' means has another rounding


@pytest.mark.parametrize(
    ("kind", "strikes", "restored"),
    [
        ("gpt", ("1:step:14:0", "0:evaluate:1:1"), [10, 10]),
        ("resnet", ("1:step:16:0", "0:evaluate:1:1", "1:schedule:2:2"), [10, 10, 10]),
    ],
)
def test_restart_from_memory_changes_no_number(
    train: Any, kind: str, strikes: tuple[str, ...], restored: list[int]
) -> None:
    """Nor does the registration itself: the plain script makes the same steps."""
    plain = train(f"train_{kind}.py", *ARGUMENTS[kind])
    struck = train(f"train_{kind}_restored.py", *ARGUMENTS[kind], strikes=strikes)
    assert [int(step) for step in re.findall(r"All ranks go on from step (\d+), from the mem", struck.err)] == restored
    assert_same(struck, plain)


@pytest.mark.parametrize(
    ("kind", "strikes", "waits"),
    [
        ("gpt", ("1:step:7:0", "0:evaluate:2:0"), ("7:3", "15:5")),
        ("resnet", ("1:schedule:2:0", "1:evaluate:1:1", "0:step:16:0"), ("8:3", "13:5", "17:7")),
    ],
)
def test_going_on_in_place_changes_no_number(
    train: Any, undisturbed: Any, kind: str, strikes: tuple[str, ...], waits: tuple[str, ...]
) -> None:
    """One process alone comes to the same bits, and so do replacements, who come to the others in a later epoch."""
    whole = undisturbed(f"train_{kind}_in_place.py", *ARGUMENTS[kind])
    struck = train(f"train_{kind}_in_place.py", *ARGUMENTS[kind], strikes=strikes, waits=waits)
    assert "All ranks go on" not in struck.err
    if kind == "resnet":  # a replacement evaluates no epoch that the others have behind them
        assert "after 12 steps. 1 rank goes on with what it does between steps." in struck.err
    assert_same(struck, whole)


def test_a_snapshot_of_the_end_of_an_epoch_has_what_is_done_there(train: Any, undisturbed: Any) -> None:
    """It is asked for by the epoch's last step, before the evaluation and the scheduler's step."""
    arguments = (
        "--pictures=40",
        "--batch-size=32",
        "--epochs=3",
        "--decay-epochs=1",
        "--log-every=1",
    )  # five steps each
    whole = undisturbed("train_resnet_in_place.py", *arguments)
    struck = train("train_resnet_in_place.py", *arguments, strikes=("0:step:13:0", "1:step:13:0"))
    assert "All ranks go on from step 10, from the memory of their hosts." in struck.err
    assert_same(struck, whole)
