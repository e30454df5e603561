"""Sharded tensors come back as they were sharded, also across tensor parallelism."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from unicron_elastic.compat.tensors import strided_shard
from unicron_elastic.state.snapshot.shards import Shards


@pytest.fixture
def mesh() -> DeviceMesh:
    """Return one of four ranks, of which this process is the first, without a process group."""
    return DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), _init_backend=False, _rank=0)


@pytest.mark.parametrize(
    "placements",
    [
        [Replicate(), Replicate()],
        [Shard(0), Replicate()],
        [Shard(1), Shard(0)],
        [strided_shard(0, 2), Shard(0)],  # as fully_shard() does with what tensor parallelism has sharded by rows
    ],
    ids=str,
)
def test_a_sharded_tensor_comes_back_as_it_was_placed(mesh: DeviceMesh, placements: list[object]) -> None:
    local = torch.randn(2, 3)
    tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size([8, 3]), stride=(3, 1))
    shards = Shards({"weight": tensor})
    back = shards.whole(shards.local({"moment": tensor}))["moment"]
    assert list(back.placements) == placements
    assert back.shape == tensor.shape
    assert torch.equal(back.to_local(), local)


def test_a_placement_that_nobody_knows_is_named(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(torch.randn(2, 3), mesh, [Replicate(), Replicate()], run_check=False)
    shards = Shards({"weight": tensor})
    kept = shards.local({"weight": tensor})
    kept["weight"]["placements"] = ["replicate", "ragged 0"]
    with pytest.raises(ValueError, match="placed as ragged 0"):
        shards.whole(kept)
