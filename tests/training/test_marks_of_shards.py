"""Whatever changes a tensor of which each rank has a part is noticed, and its digest is that of the part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from unicron_elastic.state.digest import digest_of
from unicron_elastic.state.marks_of_shards import MarksOfShards

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.fixture
def shards() -> Iterator[list[DTensor]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    whole = [torch.arange(1.0, 301.0).reshape(3, 100), torch.ones(2, dtype=torch.bfloat16), torch.ones(0)]
    yield [distribute_tensor(each, mesh, [Shard(0)]) for each in whole]
    dist.destroy_process_group()


def _of_part(change: Callable[[Any], object]) -> Callable[[DTensor], object]:
    return lambda shard: change(shard.to_local())


CHANGES: dict[str, Callable[[DTensor], object]] = {
    "whole": lambda shard: shard.mul_(0.5),
    "detached": lambda shard: shard.detach().mul_(0.5),
    "part": _of_part(lambda part: part.mul_(0.5)),
    "part of what is detached": lambda shard: shard.detach().to_local().mul_(0.5),
    "view": _of_part(lambda part: part.view(-1)[:].mul_(0.5)),
    "many": lambda shard: torch._foreach_mul_([shard], 0.5),
    "many parts": _of_part(lambda part: torch._foreach_mul_([part], 0.5)),
    "past torch": _of_part(lambda part: part.numpy().fill(0.5)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(shards: list[DTensor], name: str) -> None:
    marks = MarksOfShards(shards)
    assert not marks.have_changed()
    with torch.no_grad():
        CHANGES[name](shards[0])
    assert marks.have_changed()


def test_nothing_is_said_of_what_stays_or_is_forgotten(shards: list[DTensor]) -> None:
    shards[1].to_local().fill_(float("nan"))
    marks = MarksOfShards(shards)
    shards[0].sum().full_tensor()
    assert not marks.have_changed()
    marks.forget()
    shards[0].to_local().zero_()
    assert not marks.have_changed()


def test_a_state_with_shards_has_the_digest_of_the_parts(shards: list[DTensor]) -> None:
    def state() -> dict[str, Any]:
        return {"average": dict(enumerate(shards)), "rate": 0.5}

    parts = {"average": {place: each.to_local() for place, each in enumerate(shards)}, "rate": 0.5}
    before = digest_of(state())
    assert before == digest_of(parts)
    shards[0].to_local()[2, 7] += 1
    assert digest_of(state()) != before
