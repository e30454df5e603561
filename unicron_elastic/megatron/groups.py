"""Megatron-Core's process groups, made anew in each world, and whatever holds one of them given its successor.

``parallel_state`` knows all groups by name (megatron-core 0.16.1: module variables, set by
``initialize_model_parallel``). Modules, gradient buffers and optimizers keep groups as attributes when they are built.

Process groups without peers, of torch's ``fake`` back end: they have sizes and ranks, and their collectives return.

A process that takes the place of a lost one makes process groups and its part of the model before it can join the
others, who train meanwhile.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import Store

from unicron_elastic.compat.groups import fake_store
from unicron_elastic.engine.protocol.replica_layout import ReplicaShape
from unicron_elastic.engine.transport.connect import connect_group
from unicron_elastic.engine.transport.superseded import given_up_when
from unicron_elastic.engine.transport.waiter import keep_for_ever
from unicron_elastic.training.group.meeting import Meeting

_TAKES_PLACE = "UNICRON_TAKES_PLACE"  # set by the agent
_init_process_group, _new_group = dist.init_process_group, dist.new_group


def takes_place() -> bool:
    """Whether this process takes the place of one that was lost while the others went on in place."""
    return os.environ.get(_TAKES_PLACE, "0") != "0"


def begin_alone() -> None:
    """Leave the script's process groups without peers, until ``join``."""
    dist.init_process_group, dist.new_group = _init_alone, _new_alone


def join() -> None:
    """The process groups that are made from now on are what they are asked to be."""
    dist.init_process_group, dist.new_group = _init_process_group, _new_group


def _init_alone(*_args: Any, rank: int = -1, world_size: int = -1, **_kwargs: Any) -> None:
    rank = int(os.environ["RANK"]) if rank < 0 else rank
    world_size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
    _init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)


def _new_alone(ranks: Any = None, *_args: Any, **kwargs: Any) -> Any:
    kept = {key: value for key, value in kwargs.items() if key in ("use_local_synchronization", "group_desc")}
    return _new_group(ranks, backend="fake", **kept)


_WORLD = "WORLD"


class Unsupported(ValueError):
    """A way of parallelism that cannot go on from a failed step."""


class Groups:
    """Those that the script has made. ``holders``: models, optimizers and what else keeps groups.

    Raises Unsupported for more than data, tensor and pipeline parallelism.
    """

    def __init__(self, holders: Sequence[Any], backend: str, timeout_s: float) -> None:
        _check_supported()
        self._holders = holders
        self.backend = backend
        self.timeout_s = timeout_s
        self.shape = ReplicaShape(
            tensor=parallel_state.get_tensor_model_parallel_world_size(),
            pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        )
        self._virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        # Interleaved schedules take as many micro-batches at a time as there are stages.
        self.unit = self.shape.pipeline if self._virtual else 1
        self._has_gloo = getattr(parallel_state, "_DATA_PARALLEL_GROUP_GLOO", None) is not None
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._check_order()
        self._named = _named()
        self._former: list[Any] = []
        self._store: Store | None = None

    def leave(self) -> None:
        """Forgets the groups; they stay in memory until ``drop_former``."""
        if dist.is_initialized():
            self._former += self._named.values()
            self._former.append(dist.group.WORLD)
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    def enter(self, meeting: Meeting, rank: int, size: int) -> None:
        """Makes the groups of a world in which ``size`` members train, this one as ``rank``.

        Raises Superseded, or what torch raises if a member is lost meanwhile.
        """
        join()
        self._store = connect_group(
            self.backend,
            meeting.store,
            rank=rank,
            size=size,
            timeout_s=self.timeout_s,
            is_left=meeting.is_superseded,
        )
        with given_up_when(meeting.is_superseded, number=None):
            self._make()

    def _make(self) -> None:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.shape.tensor,
            pipeline_model_parallel_size=self.shape.pipeline,
            virtual_pipeline_model_parallel_size=self._virtual,
            create_gloo_process_groups=self._has_gloo,
            distributed_timeout_minutes=max(1, math.ceil(self.timeout_s / 60)),
        )
        named = _named()
        successors = {id(group): named[name] for name, group in self._named.items() if name in named}
        rebind(self._holders, successors)
        self._named = named

    def keep(self) -> None:
        """Have the groups never be destroyed: a collective in one of them does not end."""
        for group in self._named.values():
            keep_for_ever(group)

    def _check_order(self) -> None:
        tensor, pipeline = self.shape.tensor, parallel_state.get_pipeline_model_parallel_rank()
        here = (
            parallel_state.get_tensor_model_parallel_rank() + tensor * pipeline,
            parallel_state.get_data_parallel_rank(),
        )
        if self.shape.seat_of(self._rank, self._size) != here:
            raise Unsupported('ranks must be in the order "tp-cp-ep-dp-pp", which Megatron-Core has by default')

    def drop_former(self) -> None:
        """Lets go of groups of earlier worlds, at a time when no collective of theirs is under way.

        In a thread: the end of each waits some 20 ms for gloo's threads (torch 2.13), and nobody has to wait for that.
        It is no daemon, for the interpreter must not end while a group does.
        """
        former, self._former = self._former, []
        if former:
            threading.Thread(target=former.clear, name="unicron-drop").start()


def _check_supported() -> None:
    for name, size in (
        ("context parallelism", parallel_state.get_context_parallel_world_size()),
        ("expert parallelism", parallel_state.get_expert_model_parallel_world_size()),
    ):
        if size > 1:
            raise Unsupported(f"{name} (of size {size}) cannot go on from a failed step: data, tensor and pipeline can")


def _named() -> dict[str, Any]:
    """Each group of this process by the name of the variable that holds it."""
    found = {_WORLD: dist.group.WORLD}
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            found[name] = value
        elif isinstance(value, list):
            found |= {f"{name}/{n}": each for n, each in enumerate(value) if isinstance(each, dist.ProcessGroup)}
    return {name: group for name, group in found.items() if not name.startswith("_global_")}


def rebind(holders: Iterable[Any], successors: dict[int, Any]) -> None:
    """Gives everything that can be reached from ``holders`` the successors of groups, by ``id`` of the group before.

    What is looked into: Megatron-Core's own objects, modules, and containers. Sizes that are kept beside a group
    (``data_parallel_world_size`` of a gradient buffer) follow it.
    """
    seen: set[int] = set()
    left = list(holders)
    while left:
        thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, dict):
            for key, value in thing.items():
                thing[key] = _after(value, successors, left)
        elif isinstance(thing, list):
            thing[:] = [_after(value, successors, left) for value in thing]
        elif _is_looked_into(thing):
            attributes = vars(thing)
            for key, value in list(attributes.items()):
                after = _after(value, successors, left)
                if after is not value:
                    attributes[key] = after
            if "data_parallel_world_size" in attributes and "data_parallel_group" in attributes:
                attributes["data_parallel_world_size"] = attributes["data_parallel_group"].size()


def _after(value: Any, successors: dict[int, Any], left: list[Any]) -> Any:
    """What takes the place of an attribute or element; what may hold groups itself is put on ``left``."""
    if isinstance(value, dist.ProcessGroup):
        return successors.get(id(value), value)
    if isinstance(value, tuple):
        after = [_after(each, successors, left) for each in value]
        return value if all(a is b for a, b in zip(after, value, strict=True)) else type(value)(after)
    if isinstance(value, dict | list) or _is_looked_into(value):
        left.append(value)
    return value


def _is_looked_into(thing: Any) -> bool:
    if isinstance(thing, torch.Tensor | type):
        return False
    return isinstance(thing, torch.nn.Module) or (
        type(thing).__module__.startswith("megatron.") and hasattr(thing, "__dict__")
    )
