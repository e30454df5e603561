"""Process groups without peers, of torch's ``fake`` back end: they have sizes and ranks, and their collectives return.

A process that takes the place of a lost one makes process groups and its part of the model before it can join the
others, who train meanwhile. And a spare that was not needed to the end goes on with its script alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from unicron_elastic.compat.groups import fake_store

_TAKES_PLACE = "UNICRON_TAKES_PLACE"  # set by the agent
_init_process_group, _new_group = dist.init_process_group, dist.new_group


def takes_place() -> bool:
    """Whether this process takes the place of one that was lost while the others went on in place."""
    return os.environ.get(_TAKES_PLACE, "0") != "0"


def begin_alone() -> None:
    """From now on the script's process groups have no peers, until ``join``."""
    dist.init_process_group, dist.new_group = _init_alone, _new_alone


def join() -> None:
    """The process groups that are made from now on are what they are asked to be."""
    dist.init_process_group, dist.new_group = _init_process_group, _new_group


@contextmanager
def alone(rank: int, size: int) -> Iterator[None]:
    """Makes a default group without peers; while this lasts, other groups are made so, too."""
    _init_alone(rank=rank, world_size=size)
    dist.new_group = _new_alone
    try:
        yield
    finally:
        join()


def _init_alone(*_args: Any, rank: int = -1, world_size: int = -1, **_kwargs: Any) -> None:
    rank = int(os.environ["RANK"]) if rank < 0 else rank
    world_size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
    _init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)


def _new_alone(ranks: Any = None, *_args: Any, **kwargs: Any) -> Any:
    kept = {key: value for key, value in kwargs.items() if key in ("use_local_synchronization", "group_desc")}
    return _new_group(ranks, backend="fake", **kept)
