"""The CPU stand-in of Megatron-Core: its checks run in processes of their own, see stand_in_checks.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from megatron_processes import needs_megatron, run

pytestmark = needs_megatron

CHECKS = Path(__file__).with_name("stand_in_checks.py")


def failures(out: str) -> list[tuple[str, str | None]]:
    """What went wrong in each check, by name."""
    return [tuple(json.loads(line)) for line in out.splitlines() if line.startswith("[")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What went wrong in the checks of one process."""
    return dict(failures(run(CHECKS, tmp_path_factory.mktemp("checkpoints"))))


@pytest.mark.parametrize(
    "check",
    [
        "nothing_is_replaced_where_cuda_is_available",
        "nothing_is_replaced_if_a_place_is_missing",
        "standing_in_again_changes_nothing",
        "the_gpu_is_the_cpu",
        "named_random_states_are_independent",
        "a_micro_batch_draws_the_same_whoever_computes_it",
        "recomputing_draws_the_same_dropout",
        "optimizers_agree",
        "a_checkpoint_is_loaded",
    ],
)
def test_in_one_process(alone: dict[str, str | None], check: str) -> None:
    assert alone[check] is None, alone[check]


@pytest.mark.slow
def test_ranks_compute_the_same_in_every_split(tmp_path: Path) -> None:
    found = failures(run(CHECKS, tmp_path, ranks=2))
    assert [name for name, _ in found] == ["ranks_compute_the_same_in_every_split"] * 2
    assert [failure for _, failure in found if failure] == []
