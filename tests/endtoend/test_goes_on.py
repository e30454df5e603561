"""Workers that use ``unicron_elastic.Run`` lose one another at every point, and train to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from finals import final
from train_in_place_job import END_S, SCRIPT, incidents, trained

pytestmark = pytest.mark.trains
STEPS = 6


@pytest.fixture(scope="module")
def undisturbed(alone: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process comes to by itself."""
    folder = tmp_path_factory.mktemp("undisturbed")
    alone(folder, SCRIPT)
    return final(folder, 0)


@pytest.fixture(scope="module")
def undisturbed_freezing(alone: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same, where layers are frozen and unfrozen on the way."""
    folder = tmp_path_factory.mktemp("freezing")
    alone(folder, SCRIPT, "--freezing")
    return final(folder, 0)


def _assert_same(folder: Path, undisturbed: dict[str, Any], ranks: list[int]) -> None:
    for rank in ranks:
        found = final(folder, rank)
        assert found["parameters"] == undisturbed["parameters"], f"rank {rank}"
        assert found["losses"].items() <= undisturbed["losses"].items()  # a newcomer has seen the later ones


@pytest.mark.parametrize(
    "strike",
    [
        "0:2:accumulate:kill",
        pytest.param("1:2:reduce:exit", marks=pytest.mark.slow),
        "2:2:reduced:kill",
        pytest.param("1:2:optimizer:kill", marks=pytest.mark.slow),
        pytest.param("1:2:between:raise", marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on_and_the_replacement_joins(launcher: Any, undisturbed: Any, strike: str) -> None:
    folder = trained(launcher, 3, strike, worlds=3)
    _assert_same(folder, undisturbed, [0, 1, 2])
    (incident,) = incidents(folder)
    assert (incident["action"], incident["restarts_used"]) == ("go on", 1)


@pytest.mark.parametrize(
    "strike",
    [
        "1:2:accumulate:kill",
        "0:2:reduced:kill",
        pytest.param("1:2:reduce:kill", marks=pytest.mark.slow),
        pytest.param("1:1:between:kill", marks=pytest.mark.slow),
        pytest.param("2:2:begin:kill", marks=pytest.mark.slow),
        pytest.param("1:3:reduced:kill", marks=pytest.mark.slow),
        pytest.param("0:4:accumulate:kill", marks=pytest.mark.slow),
    ],
)
def test_what_was_unfrozen_on_the_way_is_trained_by_replacements_too(
    launcher: Any, undisturbed_freezing: Any, strike: str
) -> None:
    folder = trained(launcher, 3, strike, worlds=3, more=("--freezing",))
    _assert_same(folder, undisturbed_freezing, [0, 1, 2])


@pytest.mark.parametrize("strike", ["1:2:reduce:kill", pytest.param("0:2:reduced:kill", marks=pytest.mark.slow)])
def test_rare_types_and_sparse_gradients_go_the_same_way(
    launcher: Any, alone: Any, tmp_path_factory: pytest.TempPathFactory, strike: str
) -> None:
    folder = tmp_path_factory.mktemp("rare")
    alone(folder, SCRIPT, "--rare")
    undisturbed = final(folder, 0)
    folder = trained(launcher, 3, strike, worlds=3, more=("--rare",))
    _assert_same(folder, undisturbed, [0, 1, 2])


def test_only_the_lost_micro_batches_are_computed_again(launcher: Any, undisturbed: Any) -> None:
    folder = trained(launcher, 3, "1:2:exchanged:kill", worlds=3)
    _assert_same(folder, undisturbed, [0, 1, 2])
    (incident,) = incidents(folder)
    assert (incident["micro_batches_reused"], incident["micro_batches_recomputed"]) == (5, 3)


@pytest.mark.slow
def test_one_is_enough(launcher: Any, undisturbed: Any) -> None:
    folder = trained(launcher, 3, "0:2:accumulate:kill", "2:2:accumulate:kill", worlds=5)
    _assert_same(folder, undisturbed, [0, 1, 2])
    assert [incident["restarts_used"] for incident in incidents(folder)] == [1, 2]


@pytest.mark.parametrize("point", ["fetch", pytest.param("fetched", marks=pytest.mark.slow)])
def test_a_newcomer_may_be_lost_too(launcher: Any, undisturbed: Any, point: str) -> None:
    folder = trained(launcher, 2, "1:2:accumulate:kill", f"1:-1:{point}:kill", worlds=4)
    _assert_same(folder, undisturbed, [0, 1])
    assert [incident["action"] for incident in incidents(folder)] == ["go on", "go on"]


@pytest.mark.slow
@pytest.mark.parametrize("point", ["fetch", "fetched"])
def test_a_newcomer_that_is_stopped_is_replaced(launcher: Any, undisturbed: Any, point: str) -> None:
    folder = trained(launcher, 2, "1:2:accumulate:kill", f"1:-1:{point}:stop", worlds=4, end_s=60.0)
    _assert_same(folder, undisturbed, [0, 1])
    lost, stopped = incidents(folder)
    assert (lost["rank"], stopped["rank"], stopped["method"], stopped["action"]) == (1, 1, "online statistics", "go on")
    assert stopped["reason"].startswith("rank 1, on its way to join the others, has been stopped by a signal for 1")


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("meet", marks=pytest.mark.slow),
        pytest.param("connect", marks=pytest.mark.slow),
        "published",
        pytest.param("connected", marks=pytest.mark.slow),
    ],
)
def test_another_may_be_lost_while_the_members_meet(launcher: Any, undisturbed: Any, point: str) -> None:
    folder = trained(launcher, 3, "2:2:accumulate:kill", f"1:2:{point}:kill", worlds=5)
    _assert_same(folder, undisturbed, [0, 1, 2])


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.slow), STEPS - 1])
def test_it_may_be_the_first_step_or_the_last(launcher: Any, undisturbed: Any, step: int) -> None:
    folder = trained(launcher, 2, f"1:{step}:accumulate:kill")
    _assert_same(folder, undisturbed, [0])


def test_the_same_members_connect_anew_when_a_collective_fails(launcher: Any, undisturbed: Any) -> None:
    folder = trained(launcher, 3, "1:2:reduce:fail", worlds=2)
    _assert_same(folder, undisturbed, [0, 1, 2])
    (incident,) = incidents(folder)
    assert (incident["action"], incident["restarts_used"]) == ("reattempt", 0)


def test_the_others_go_on_without_one_that_ends_early(launcher: Any, undisturbed: Any) -> None:
    folder = trained(launcher, 3, "1:2:between:leave")
    _assert_same(folder, undisturbed, [0, 2])
    assert not (folder / "final-1.json").exists()


@pytest.mark.slow
def test_a_failure_at_the_very_end_leaves_nobody_waiting(launcher: Any, undisturbed: Any) -> None:
    folder = trained(launcher, 3, f"1:{STEPS - 1}:even:fail")
    _assert_same(folder, undisturbed, [0, 1, 2])


def test_a_newcomer_that_takes_long_begins_with_the_step_that_the_others_are_in(launcher: Any) -> None:
    more = ("--steps=20", "--step-s=0.02", "--slow-load-s=1", "--join-patience-s=0.2")
    folder = trained(launcher, 2, "1:2:accumulate:kill", worlds=3, more=more)
    assert final(folder, 0)["parameters"] == final(folder, 1)["parameters"]


def test_a_gradient_scaler_is_ready_in_a_newcomer(launcher: Any) -> None:
    folder = trained(launcher, 2, "1:3:reduce:kill", worlds=3, more=("--scaler",))
    assert final(folder, 0)["parameters"] == final(folder, 1)["parameters"]
    assert len(incidents(folder)) == 1


def test_a_node_whose_only_worker_is_lost_gets_another(
    launcher: Any, node_options: list[str], undisturbed: Any
) -> None:
    *options, _script = node_options
    runs = [
        launcher.start(
            "--nnodes=2",
            *options,
            f"--unicron-ledger=ledger-{node}",
            SCRIPT,
            "--wait-for-worlds=3",
            "--strike=1:2:reduce:kill",
            fast=False,
        )
        for node in range(2)
    ]
    assert [run.wait(END_S) for run in runs] == [0, 0], runs[0].err + runs[1].err
    _assert_same(launcher.folder, undisturbed, [0, 1])
    assert sum("rank 1 restarts." in run.err for run in runs) == 1


def test_what_a_signal_handler_raises_while_others_are_waited_for_is_the_scripts(
    launcher: Any, undisturbed: Any
) -> None:
    folder = trained(launcher, 2, "0:2:forward:pause", "1:2:accumulate:alarm", worlds=3)
    _assert_same(folder, undisturbed, [0, 1])
    (incident,) = incidents(folder)
    assert (incident["rank"], incident["action"], incident["message"]) == (1, "go on", "time is up")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])  # a newcomer waits for the one that hangs; and a survivor of the world before
def test_who_hangs_while_another_is_lost_is_ended_for_it_is_missing_from_the_new_world(
    launcher: Any, ranks: int
) -> None:
    strikes = ("1:12:forward:sleep", "0:12:accumulate:kill")
    flags = ("--unicron-hang-patience=0.5",)
    folder = trained(launcher, ranks, *strikes, worlds=5, flags=flags, more=("--steps=20",), end_s=150.0)
    finals = [final(folder, rank) for rank in range(ranks)]
    assert len({final["parameters"] for final in finals}) == 1
    lost, hung = incidents(folder)
    assert lost["rank"] == 0
    assert (hung["rank"], hung["method"], hung["action"]) == (1, "online statistics", "go on")
    assert hung["reason"].endswith("; missing from the new world, in which the others wait, it is not at work.")
