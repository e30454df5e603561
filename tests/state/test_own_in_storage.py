"""Of a sharded state each rank has what it has alone, beside the shards and what all have alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import HashStore
from torch.distributed.fsdp import fully_shard

from unicron_elastic.state.snapshot.shards import Shards
from unicron_elastic.state.storage import folder as storage
from unicron_elastic.state.storage import manifest


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _state(hidden: float, position: int) -> dict[str, Any]:
    model: Any = fully_shard(nn.Linear(2, 2))
    alike = {"teacher": torch.ones(3), "epoch": 4}
    own = {"hidden": torch.full((2,), hidden), "position": position}
    return {"state": {"model": model.state_dict(), "alike": alike, "own": own}, "steps": 7}


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """What two ranks have written, and its states."""
    states = [_state(1.0, 10), _state(2.0, 20)]
    named = [storage._named(each, "") for each in states]
    digests = [{name: storage.digest_of(each) for name, each in one.items() if "shard" not in name} for one in named]
    together = {}
    for rank, one in enumerate(named):
        together |= storage._own_apart(one, rank, lambda _: [json.dumps(each) for each in digests])
    path = manifest.folder_of(tmp_path, 7)
    dcp.save(together, storage_writer=storage._writer(path), no_dist=True)
    manifest.finish(path)
    names = sorted(name for name in together if name.startswith("rank"))
    assert len(names) == 4, names  # of each rank: where it is, which is in the layout, and one tensor
    return path, states


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_each_rank_reads_its_own_and_one_that_is_new_that_of_rank_0(
    written: tuple[Path, list[dict[str, Any]]], rank: int
) -> None:
    path, states = written
    right = states[rank if rank < 2 else 0]["state"]
    found = storage.Stored(path, rank, 3).load(Shards(right["model"]))["state"]
    assert found["own"]["position"] == right["own"]["position"]
    assert torch.equal(found["own"]["hidden"], right["own"]["hidden"])
    assert torch.equal(found["alike"]["teacher"], torch.ones(3))


def test_a_rank_that_is_lost_while_they_compare_costs_that_state_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    state = {**_state(1.0, 10), "random": {}}
    before = manifest.folder_of(tmp_path, 7)
    dcp.save(storage._named(state, ""), storage_writer=storage._writer(before), no_dist=True)
    manifest.finish(before)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(dist, "all_gather", broken)
    storage.Storage().save(tmp_path, state, keep=1, is_replicated=False, rank=0)
    said = capsys.readouterr().err
    assert "the state was not saved in" in said
    assert "Connection closed by peer. The training goes on." in said
    manifest.check(before)
