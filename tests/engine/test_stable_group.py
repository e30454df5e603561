"""A group whose inside is exchanged does what gloo's groups do, and goes from world to world under what holds it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.fsdp import FSDPModule

from unicron_elastic.engine.group import GlooInside, StableGroup
from unicron_elastic.engine.group.connect_inside import connect_inside
from unicron_elastic.engine.transport.superseded import Superseded

DEADLINE_S = 120.0
HERE = Path(__file__).parent
WORLDS = str(HERE / "group_worlds.py")
Ranks = Callable[..., list[dict[str, Any]]]


def worlds(ranks: Ranks, what: str, size: int, *kind: str) -> list[dict[str, Any]]:
    """What each rank has found in several worlds."""
    return ranks(size, lambda rank, folder: [WORLDS, what, str(rank), str(size), folder, *kind], " ".join(kind) or what)


def test_each_operation_has_the_bits_that_it_has_over_gloo(collective: Ranks) -> None:
    found = collective("unicron", "operations", 3)
    assert found == collective("gloo", "operations", 3)
    assert not [each for rank in found for each in rank.values() if "error" in each]


@pytest.mark.parametrize("kind", ["ddp", "ddp with a hook", "fsdp2"])
def test_training_has_the_bits_that_it_has_over_gloo(collective: Ranks, kind: str) -> None:
    assert collective("unicron", "train", 2, kind) == collective("gloo", "train", 2, kind)


@pytest.mark.parametrize("kind", ["ddp", "ddp with a hook"])
def test_a_model_trains_on_with_a_rank_less_as_one_made_for_them(ranks: Ranks, kind: str) -> None:
    found = worlds(ranks, "fewer", 3, kind)
    assert found == worlds(ranks, "fewer", 3, kind, "gloo")
    assert [(each["size"], each["ranks"]) for each in found[:2]] == [(2, [0, 1])] * 2


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_models_and_meshes_stay_when_the_inside_is_exchanged(ranks: Ranks, kind: str) -> None:
    assert worlds(ranks, "again", 2, kind) == worlds(ranks, "again", 2, kind, "gloo")


def test_compiled_code_stays_when_the_inside_is_exchanged(ranks: Ranks) -> None:
    found = worlds(ranks, "compiled", 3)
    assert [each["found"] for each in found] == [[6.0, 4.0], [6.0, 4.0], [6.0]]
    assert [each["graphs"] for each in found] == [1] * 3


def test_a_break_of_one_group_leaves_the_other_whole(ranks: Ranks) -> None:
    found = worlds(ranks, "broken", 3)
    assert [each["error"] for each in found] == ["RuntimeError", "RuntimeError", ""]
    assert all(each["is_fast"] for each in found)
    assert [each["total"] for each in found] == [3.0] * 3


@pytest.mark.parametrize("kind", ["ddp", "ddp with a hook", "fsdp2"])
def test_a_newer_world_ends_a_wait_within_a_model_that_trains_on_in_it(
    ranks: Ranks, collective: Ranks, kind: str
) -> None:
    if kind == "fsdp2" and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("this torch has nothing with which FSDP2 forgets a broken pass")
    found = worlds(ranks, "superseded", 2, kind)
    assert "abandoned" in found[0]["error"] or "Connection closed" in found[0]["error"]
    undisturbed = collective("gloo", "train", 2, kind)
    assert [each["digest"] for each in found] == [each["digest"] for each in undisturbed]


def test_a_newer_world_ends_waits_that_have_no_time_out(ranks: Ranks) -> None:
    assert worlds(ranks, "given_up", 2)[0]["abandoned"] == ["isend", "irecv", "reduce_scatter_tensor"]


def test_its_collectives_are_recorded_under_its_name_in_each_world(ranks: Ranks) -> None:
    for each in worlds(ranks, "recorded", 2):
        assert each["found"] == [{"all": 3, "other": 1}, {"all": 6, "other": 2}]


def inside(timeout_s: float = 60.0) -> GlooInside:
    """Make one of a rank alone."""
    return GlooInside(HashStore(), 0, 1, timedelta(seconds=timeout_s))


def test_a_group_has_entered_a_world_or_says_so() -> None:
    group = StableGroup(0, 1)
    with pytest.raises(RuntimeError, match="entered no world yet"):
        group.barrier()


def test_a_group_has_the_rank_and_size_of_its_world() -> None:
    group = StableGroup(0, 1)
    first, second = inside(), inside()
    assert group.enter(first, rank=0, ranks=[0], world=1) is None
    assert (group.rank(), group.size(), group.world, group.inside) == (0, 1, 1, first)
    assert group.enter(second, rank=2, ranks=[4, 5, 6], world=7) is first
    assert (group.rank(), group.size(), group.world, group.inside) == (2, 3, 7, second)


def test_no_two_groups_of_a_process_have_one_time_out() -> None:
    made = [inside() for _ in range(3)] + [inside(60.004)]
    seconds = [round(each.options._timeout.total_seconds(), 3) for each in made]
    assert len(set(seconds)) == len(made)
    assert max(seconds) < 60.5


def test_connecting_with_peers_that_never_come_is_given_up() -> None:
    left = threading.Event()
    threading.Timer(0.1, left.set).start()
    with pytest.raises(Superseded):
        connect_inside(GlooInside, HashStore(), rank=0, size=2, timeout_s=60.0, is_left=left.is_set)
    for each in threading.enumerate():
        if each.name == "unicron-connect":
            each.join(DEADLINE_S)
