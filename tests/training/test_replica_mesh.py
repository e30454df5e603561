"""What cannot be a replica of several processes is said before anything is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import unicron_elastic
from unicron_elastic.state.snapshot import gather
from unicron_elastic.training.replica_mesh import check_divides
from unicron_elastic.training.shard import mates

pytestmark = pytest.mark.usefixtures("no_launcher", "alone_again")


@pytest.fixture
def alone_again(no_launcher: None) -> Iterator[None]:
    """No replica is left behind."""
    _ = no_launcher
    yield
    mates._present.clear()
    gather._part_of_job.clear()


def test_a_world_is_made_of_whole_replicas() -> None:
    with pytest.raises(ValueError, match="a world of 6 ranks cannot be divided into replicas of 4"):
        check_divides(4, 1, 6, 6)
    with pytest.raises(ValueError, match="a world of 6 ranks cannot be divided into replicas of 4: shard times tensor"):
        check_divides(2, 2, 6, 6)
    with pytest.raises(ValueError, match="shard must be 1 or more, got 0"):
        check_divides(0, 1, 6, 6)
    with pytest.raises(ValueError, match="tensor must be 1 or more, got 0"):
        check_divides(2, 0, 6, 6)
    with pytest.raises(ValueError, match="a world of 1 rank cannot be divided into replicas of 2"):
        unicron_elastic.replica_mesh(shard=2)


def test_it_is_the_first_process_group_and_the_only_one() -> None:
    unicron_elastic.replica_mesh(shard=1)
    with pytest.raises(unicron_elastic.WrongUseError, match="take init_process_group and init_device_mesh out"):
        unicron_elastic.replica_mesh(shard=1)


def _steps(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = unicron_elastic.Run(model=model, optimizer=optimizer)
    return run.steps(2, 2)


def test_a_replica_of_one_process_trains_as_any_other() -> None:
    mesh = unicron_elastic.replica_mesh(shard=1)
    model = fully_shard(nn.Linear(2, 1), mesh=mesh)
    for step in _steps(model):
        for _ in step:
            step.backward(model(torch.ones(1, 2)).sum())
        assert [parameter.grad is not None for parameter in model.parameters()] == [True, True]


@pytest.mark.parametrize("has_replica", [True, False])
def test_a_model_over_another_mesh_is_refused(*, has_replica: bool) -> None:
    if has_replica:
        unicron_elastic.replica_mesh(shard=1)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = fully_shard(nn.Linear(2, 1), mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("other",)))
    wanted = "give fully_shard.. the mesh that" if has_replica else "replica_mesh"
    with pytest.raises(TypeError, match=wanted):
        next(iter(_steps(model)))


def _stepped(replicas: int, lr: float = 0.1) -> None:
    mesh = unicron_elastic.replica_mesh(shard=1)
    model = fully_shard(nn.Linear(2, 1), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer.register_step_pre_hook(mates.Mates(mesh, dist.group.WORLD, "gloo", replicas).check_summed)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_loop_of_its_own_would_have_replicas_train_apart() -> None:
    with pytest.raises(unicron_elastic.WrongUseError, match=r"nobody but run.steps\(\) sums up"):
        _stepped(2)


@pytest.mark.parametrize(("replicas", "lr"), [(1, 0.1), (2, 0.0)])
def test_a_replica_alone_may_and_so_may_who_only_makes_an_optimizers_state(replicas: int, lr: float) -> None:
    _stepped(replicas, lr)


def test_a_parameter_that_is_whole_on_each_process_is_refused() -> None:
    mesh = unicron_elastic.replica_mesh(shard=1)
    model = nn.Sequential(fully_shard(nn.Linear(2, 1), mesh=mesh), nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"1.weight is whole on each process of a replica"):
        next(iter(_steps(model)))
