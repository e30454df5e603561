"""How torch makes process groups, how the making can be taken over, and what is reduced in them. Imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import ProcessGroup

from unicron_elastic.compat.expectations import Feature, lacks

__all__ = ["BuiltFor", "fake_store", "gloo_made_by", "hook_states", "reduce_in_python", "reduced_by", "set_ranks"]


@contextlib.contextmanager
def gloo_made_by(make: Callable[[Callable[[], Any]], Any], *, number: int | None) -> Iterator[None]:
    """While this lasts, torch has gloo's part of a process group made by ``make``, which is given what would make it.

    torch makes it by calling ``distributed_c10d.ProcessGroupGloo``, and asks then whether that is its type.
    ``number``: from which the groups are counted; None: as torch counts. Where torch makes it otherwise, this does
    nothing: no world changes there.
    """
    if lacks(Feature.IN_PLACE):
        yield
        return
    original: Any = c10d.ProcessGroupGloo

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(lambda: original(*args, **kwargs))

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    # By this number torch names the group, and so the keys in the store. It starts again when groups are destroyed, but
    # not after one that was given up: who has given up would wait for keys other than those of a newcomer.
    if number is not None:
        c10d._world.group_count = number
    c10d.ProcessGroupGloo = Meta("ProcessGroupGloo", (), {})
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = original


def fake_store() -> Any:
    """Return a store for torch's ``fake`` back end, whose groups have no peers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def reduce_in_python(module: Any) -> None:
    """Have a DistributedDataParallel reduce by torch's hook, in Python. Raises RuntimeError if it has one already."""
    from torch.distributed import _register_comm_hook
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    _register_comm_hook(module.reducer, module.process_group, allreduce_hook)


class BuiltFor(NamedTuple):
    """`BuiltFor` is what a DistributedDataParallel was built for; it stays that, whatever is frozen later."""

    parameters: list[Tensor]  # that it does not ignore
    reduced: list[Tensor]  # those of them that were trained when it was built
    may_lack: bool  # whether a backward pass may come to some of these alone
    is_alone: bool  # whether its group has this rank alone


def reduced_by(module: Any) -> BuiltFor | None:
    """Return what a DistributedDataParallel reduces; None if this torch does not tell.

    torch makes room for its gradients once more meanwhile.
    """
    if lacks(Feature.REDUCED):
        return None
    reduced = [each for bucket in module.reducer._get_zeros_like_grad_buckets() for each in bucket.parameters()]
    may_lack = bool(module.find_unused_parameters or module.static_graph)
    return BuiltFor(list(module._module_parameters), reduced, may_lack, module.process_group.size() == 1)


def hook_states(module: Any) -> list[Any]:
    """Return the states of the communication hooks of a DistributedDataParallel; none if torch does not keep them."""
    return [state for _, state in getattr(module, "_comm_hooks", ())]


def set_ranks(group: ProcessGroup, ranks: list[int]) -> None:
    """Tell torch which ranks of the whole job a group consists of from now on, in their order in it."""
    known: dict[Any, dict[int, int]] = c10d._world.pg_group_ranks
    if group in known:
        known[group] = {rank: index for index, rank in enumerate(ranks)}
