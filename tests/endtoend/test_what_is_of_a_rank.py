"""What is of a rank alone, as its random numbers, comes back to it: a restart changes no number, whoever was killed."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trains

SCRIPT = str(Path(__file__).with_name("train_of_its_own.py"))
EVERY = 4
POINTS = ("top", "forward", "backward", "optimizer", "behind", "copy")
OFTEN = {"top": 0, "forward": 1, "backward": 1, "optimizer": 0, "behind": 1, "copy": 0}


def strike(number: int, point: str, rank: int) -> str:
    """Has a rank die there in another step each; where the other can make its next snapshot, right before that."""
    step = EVERY * (number + 1) + (EVERY - 1 if point in ("optimizer", "behind") else 0)
    return f"{rank}:{point}:{step}"


def trained(
    launcher: Any, strikes: list[str], replicated: str = "default"
) -> tuple[dict[tuple[int, int], set[str]], Any]:
    """Return what each rank has computed in each step, each result once, and the whole job."""
    steps = str(EVERY * (len(POINTS) + 2))
    options = ("--standalone", "--nproc-per-node=2", f"--max-restarts={len(POINTS)}")
    job = launcher.run(*options, SCRIPT, replicated, steps, str(EVERY), *strikes)
    assert job.process.returncode == 0, job.err
    assert not strikes or f"Restart {len(strikes)} of {len(POINTS)}." in job.err
    made = defaultdict(set)
    for step, rank, text in re.findall(r"^STEP (\d+) rank (\d) made (.+)$", job.out, re.MULTILINE):
        made[int(step), int(rank)].add(text)
    return made, job


@pytest.mark.parametrize("other", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_goes_on_with_what_is_its_own_wherever_one_was_killed(launcher: Any, other: int) -> None:
    whole, _ = trained(launcher, [])
    strikes = [strike(number, point, OFTEN[point] ^ other) for number, point in enumerate(POINTS)]
    struck, _ = trained(launcher, strikes)
    assert struck == whole


def test_a_rank_says_what_it_lacks_that_goes_on_with_the_state_of_another(launcher: Any) -> None:
    """As it does where a node is lost, and here by the script's word that any rank's state will do."""
    _, job = trained(launcher, [f"1:top:{EVERY}"], "yes")
    said = (
        f"Rank 1: no state of its own is left of step {EVERY}, and it takes that of rank 0: its own random numbers "
        "begin again as the script has seeded them, and it may draw what it has drawn before; BatchNorm's running "
        f"statistics are those of rank 0. All ranks go on from step {EVERY}, from the memory of their hosts."
    )
    assert said in job.err
