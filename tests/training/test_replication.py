"""Whether all ranks have the same state, where the script has its model in DistributedDataParallel and does not say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.nn.parallel import DistributedDataParallel

from unicron_elastic import Run
from unicron_elastic.training.registered import Registered
from unicron_elastic.training.snapshot.replication import BufferSync, Replication, reducers_of

_kept: list[Any] = []  # what scripts of tests have


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    _kept.clear()
    dist.destroy_process_group()


def _replication(said: bool | None = None, **objects: Any) -> Replication:
    _kept.append(objects)
    given = {"model": objects["model"].module, **{name: each for name, each in objects.items() if name != "model"}}
    registered = Registered(given)
    return Replication(given, reducers_of(objects.values()), said=said, digests=registered.digests)


def _beside(other: Replication) -> Callable[[str], list[str]]:
    """A gather with another rank, which has what ``other`` has."""
    return lambda text: [text, json.dumps(other._digests())]


def _table(first: float) -> nn.Embedding:
    return nn.Embedding(1, 2, _weight=torch.tensor([[first, 2.0]]))


def _model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


def test_what_is_in_ddp_is_the_same_on_all_ranks() -> None:
    one, other = _replication(model=_model(), table=_table(1.0)), _replication(model=_model(), table=_table(1.0))
    assert one.compare(_beside(other)) == ""
    assert one.holds


def test_a_module_beside_it_that_differs_is_named() -> None:
    one, other = _replication(model=_model(), table=_table(1.0)), _replication(model=_model(), table=_table(3.0))
    assert one.compare(_beside(other)) == (
        "not the same on all ranks, beside what is in DistributedDataParallel: table. So each rank goes on from "
        "snapshots of its own alone, and saves its own; Run(replicated=True) says that any rank's state will do"
    )
    assert not one.holds


def test_a_parameter_that_ddp_ignores_is_beside_it() -> None:
    def make(first: float) -> Replication:
        inside = nn.Sequential(nn.Linear(2, 2), _table(first))
        inside._ddp_params_and_buffers_to_ignore = ["1.weight"]  # type: ignore[assignment]
        return _replication(model=DistributedDataParallel(inside))

    one = make(1.0)
    assert "beside what is in DistributedDataParallel: model.1.weight." in one.compare(_beside(make(3.0)))


def test_another_module_in_ddp_and_a_dict_may_differ() -> None:
    made = [_replication(model=_model(), critic=DistributedDataParallel(_table(n)), seen={"n": n}) for n in (1.0, 2.0)]
    assert made[0].compare(_beside(made[1])) == ""


@pytest.mark.parametrize("said", [False, True])
def test_a_script_that_says_it_is_not_asked(said: bool) -> None:
    one = _replication(said, model=_model(), table=_table(1.0))
    assert one.compare(lambda _: pytest.fail("it must not ask")) == ""
    assert one.holds is said


def test_a_state_of_memory_knows() -> None:
    one = _replication(model=_model())
    one.take(is_replicated=True)
    assert one.holds
    one.take(is_replicated=False)
    assert not one.holds


def test_with_local_sgd_ranks_train_apart() -> None:
    model = _model()
    one = _replication(model=model)
    state = post_localSGD_hook.PostLocalSGDState(None, None, 5)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    assert not one.holds


def test_with_other_hooks_they_do_not() -> None:
    model = _model()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    assert _replication(model=model).holds


def test_a_model_made_anew_gives_its_buffers_when_the_one_before_would_have() -> None:
    before, after = _model(), _model()
    x = torch.ones(3, 2)
    with before.no_sync():
        before(x).sum().backward()
    BufferSync([after]).load_state_dict(BufferSync([before]).state_dict())
    assert not after.will_sync_module_buffers()
    before(x)
    BufferSync([after]).load_state_dict(BufferSync([before]).state_dict())
    assert after.will_sync_module_buffers()


def test_a_run_keeps_it_with_its_state() -> None:
    before, after = _model(), _model()
    with before.no_sync():
        before(torch.ones(3, 2)).sum().backward()
    Run(model=after).load_state_dict(Run(model=before).state_dict())
    assert not after.will_sync_module_buffers()
