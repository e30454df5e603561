"""A rank that ends with 0 where the others train once more: they make all their steps, without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.trains

EPOCHS = str(Path(__file__).with_name("train_in_epochs.py"))
BEFORE_THE_OTHERS_ASK = ("0:3:evaluate:leave", "1:3:evaluate:outlive")
AFTER_THE_OTHERS_ASKED = ("1:3:parted:await=struck-0-4-accumulate", "1:3:evaluate:leave", "0:4:accumulate:pass")


@pytest.mark.parametrize(
    ("ranks", "strikes"),
    [(2, BEFORE_THE_OTHERS_ASK), (2, AFTER_THE_OTHERS_ASKED), (3, AFTER_THE_OTHERS_ASKED)],
    ids=["before", "after", "after, of three"],
)
def test_the_others_make_all_steps_without_it(launcher: Any, ranks: int, strikes: tuple[str, ...]) -> None:
    left = int(strikes[0][0])
    run = launcher.start(
        f"--nproc-per-node={ranks}",
        "--max-restarts=3",
        EPOCHS,
        "--say-steps",
        *(f"--strike={each}" for each in strikes),
    )
    assert run.wait() == 0, run.err
    finals = {path.name: json.loads(path.read_text()) for path in launcher.folder.glob("final-*.json")}
    assert sorted(finals) == [f"final-{rank}.json" for rank in range(ranks) if rank != left]
    assert all(list(final["losses"]) == [str(step) for step in range(12)] for final in finals.values())
    assert len({final["parameters"] for final in finals.values()}) == 1
    assert f"rank {left} has ended by itself after the last step: the others go on without it." in run.err
    assert "GENERATION 1" not in run.out
    whole = launcher.start(f"--nproc-per-node={ranks}", EPOCHS, "--say-steps")
    assert whole.wait() == 0, whole.err
    there = json.loads((launcher.folder / "final-0.json").read_text())
    assert there["parameters"] in {final["parameters"] for final in finals.values()}
