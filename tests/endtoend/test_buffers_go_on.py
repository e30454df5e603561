"""A replacement goes on with exactly what the others have: fp32 state of bf16 parameters, and all buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from finals import final

pytestmark = pytest.mark.trains

SCRIPT = str(Path(__file__).with_name("train_buffers.py"))
END_S = 60.0


@pytest.fixture(scope="module")
def undisturbed(alone: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process comes to by itself."""
    folder = tmp_path_factory.mktemp("undisturbed")
    alone(folder, SCRIPT)
    return final(folder, 0)


def _train(launcher: Any, *flags: str, ranks: int = 2) -> Any:
    run = launcher.start("--standalone", f"--nproc-per-node={ranks}", "--max-restarts=5", SCRIPT, *flags, fast=False)
    assert run.wait(END_S) == 0, run.err
    return run


KILL = ("--strike=1:2:accumulate:kill", "--wait-for-worlds=3")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_buffers_do_not_depend_on_who_computes(launcher: Any, undisturbed: Any, ranks: int) -> None:
    _train(launcher, ranks=ranks)
    for rank in range(ranks):
        assert final(launcher.folder, rank) == undisturbed, f"rank {rank}"


@pytest.mark.parametrize("way", [(), pytest.param(("--in-group",), marks=pytest.mark.slow)])
def test_the_replacement_has_the_bits_of_the_others(launcher: Any, undisturbed: Any, way: tuple[str, ...]) -> None:
    _train(launcher, *KILL, *way)
    for rank in (0, 1):
        assert final(launcher.folder, rank) == undisturbed, f"rank {rank}"


@pytest.mark.parametrize("strike", ["0:2:share:kill", pytest.param("0:2:shared:kill", marks=pytest.mark.slow)])
def test_who_has_made_the_buffers_may_be_lost_before_it_gives_them(
    launcher: Any, undisturbed: Any, strike: str
) -> None:
    _train(launcher, f"--strike={strike}", "--wait-for-worlds=3", ranks=3)
    for rank in range(3):
        assert final(launcher.folder, rank) == undisturbed, f"rank {rank}"


def test_a_replacement_that_cannot_take_the_state_as_it_is_says_so_and_does_not_train(
    launcher: Any, undisturbed: Any
) -> None:
    run = _train(launcher, *KILL, "--in-group", "--rounds")
    assert "optimizer.state[0].master was received with other values than it has after load_state_dict" in run.err
    assert final(launcher.folder, 0) == undisturbed
    assert not (launcher.folder / "final-1.json").exists()


@pytest.mark.parametrize("what", ["moment", pytest.param("parameter", marks=pytest.mark.slow), "buffer"])
def test_a_rank_whose_state_is_wrong_is_named_and_replaced_before_it_counts(
    launcher: Any, undisturbed: Any, what: str
) -> None:
    name = {
        "moment": "optimizer.state[0].moment",
        "parameter": "model.first.weight",
        "buffer": "model.book.codes",
    }[what]
    run = _train(launcher, f"--spoil=1:2:{what}", "--compare-every=2", "--wait-for-worlds=3", ranks=3)
    assert f"after 2 steps rank 1 differs from the others in {name}: this process must not train on" in run.err
    for rank in range(3):
        assert final(launcher.folder, rank) == undisturbed, f"rank {rank}"


def test_without_a_majority_all_begin_again(launcher: Any, undisturbed: Any) -> None:
    run = _train(launcher, "--spoil=1:2:parameter", "--compare-every=2")
    assert "after 2 steps the ranks differ in model.first.weight, and no majority says who is right" in run.err
    for rank in range(2):
        assert final(launcher.folder, rank) == undisturbed, f"rank {rank}"


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), ("--plain",)])
def test_nobody_is_accused_who_has_done_nothing(launcher: Any, mode: tuple[str, ...]) -> None:
    run = _train(
        launcher,
        *mode,
        "--steps=20",
        "--compare-every=1",
        "--strike=1:5:accumulate:kill",
        "--strike=2:9:share:kill",
        "--wait-for-worlds=5",
        ranks=4,
    )
    assert "differ" not in run.err
    for rank in range(1, 4):
        assert final(launcher.folder, rank) == final(launcher.folder, 0), f"rank {rank}"
