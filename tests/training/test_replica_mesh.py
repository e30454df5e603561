"""What cannot be a replica of several processes is said before anything is made."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
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
    for each in mates._present:
        each._replicas = 1  # torch keeps what looks at all optimizers
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


class Loop:
    """A `Loop` is over steps of a replica of one process, among others."""

    def __init__(self) -> None:
        mesh = unicron_elastic.replica_mesh(shard=1)
        self.model: Any = fully_shard(nn.Linear(2, 1), mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        present = mates.present_mates()
        assert present is not None
        present._replicas = 2
        self.run = unicron_elastic.Run(model=self.model, optimizer=self.optimizer)

    def train(self, until: int, within: Callable[[], object] = int, before: Callable[[], object] = int) -> None:
        for step in self.run.steps(until, 3):
            before()
            for _ in step:
                step.backward(self.model(torch.ones(1, 2)).sum())
                within()
            self.optimizer.step()


def test_an_optimizer_steps_within_steps_and_not_between_its_calls() -> None:
    loop = Loop()
    loop.train(2)
    with pytest.raises(unicron_elastic.WrongUseError, match="the optimizer steps by the gradients of one replica"):
        loop.optimizer.step()
    loop.train(4)
    with pytest.raises(unicron_elastic.WrongUseError, match="the optimizer steps by the gradients of one replica"):
        loop.train(6, before=loop.optimizer.step)


def test_gradients_that_fsdp_has_not_reduced_are_not_summed_up() -> None:
    loop = Loop()
    loop.train(1)
    loop.model.set_requires_gradient_sync(False)
    with pytest.raises(unicron_elastic.WrongUseError, match=r"leave set_requires_gradient_sync\(False\) out"):
        loop.train(2)


def test_a_whole_parameter_that_is_trained_later_is_refused_then() -> None:
    loop = Loop()
    loop.model.late = nn.Parameter(torch.ones(1), requires_grad=False)
    loop.train(2)
    with pytest.raises(TypeError, match="late is whole on each process of a replica"):
        loop.train(3, before=lambda: loop.model.late.requires_grad_(True))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: next(model.parameters()).grad.mul_(2.0),
        lambda model: next(model.parameters()).grad.to_local().mul_(2.0),
    ],
)
def test_gradients_of_shards_that_are_changed_within_a_step_are_noticed(change: Callable[[nn.Module], object]) -> None:
    loop = Loop()
    with pytest.raises(unicron_elastic.WrongUseError, match="the gradients were changed while micro-batches"):
        loop.train(1, within=lambda: change(loop.model))


def test_a_part_whose_weights_are_0_counts_for_nothing_beside_another() -> None:
    loop = Loop()
    present = mates.present_mates()
    assert present is not None
    present.mean = lambda tensor: tensor + torch.tensor([0.0, 0.0, 5.0, 0.0])  # type: ignore[method-assign]
    for step in loop.run.steps(1, 2):
        for _ in step:
            step.backward(loop.model(torch.ones(1, 2)).sum(), weight=0)
        assert step.weight == 5.0


def test_what_has_failed_in_a_replica_that_is_whole_is_told() -> None:
    mates.await_end([mates.life_of(str(pid)) for pid in (os.getpid(), os.getppid())], whole_s=0.1)


def test_who_has_lost_a_mate_waits_for_its_own_end(capsys: pytest.CaptureFixture[str]) -> None:
    gone = subprocess.Popen(["sleep", "60"])
    of_all = [mates.life_of(str(pid)) for pid in (os.getpid(), gone.pid)]
    gone.kill()
    gone.wait()
    mates.await_end(of_all, end_s=0.5, whole_s=0.1)
    assert "the agent has not ended it within 0.5 s" in capsys.readouterr().err
