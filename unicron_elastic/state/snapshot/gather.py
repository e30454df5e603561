"""What all ranks of a job say to each other before they train: through their process group, or the job's store."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store

TIMEOUT_S = 600.0  # ranks start at different times, and one may copy for a long while
_stores: list[Store] = []  # a store that a rank hosts lives as long as this
_part_of_job: list[bool] = []  # whether the default process group is made of some of the job's ranks alone

Gather = Callable[[str], list[str]]


def leave_group_aside() -> None:
    """Take it that the default process group is made of some of the job's ranks alone."""
    _part_of_job[:] = [True]


def _is_of_all() -> bool:
    return dist.is_initialized() and not _part_of_job


def own_rank() -> tuple[int, int]:
    """This process's rank and the world size: of the process group, else of the environment, else alone."""
    if _is_of_all():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def gathering() -> Gather:
    """A function that all ranks call equally often: it takes this rank's text and returns those of all, by rank.

    Both raise what torch raises if the store is not there or a rank does not come.
    """
    rank, size = own_rank()
    if size == 1:
        return lambda text: [text]
    if _is_of_all():
        return gather_through
    if not _stores:
        _stores.append(next(dist.rendezvous("env://"))[0])
    store, count = _stores[0], [0]
    start = f"unicron/restore/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def gather(text: str) -> list[str]:
        count[0] += 1
        keys = [f"{start}/{count[0]}/{each}" for each in range(size)]
        store.set(keys[rank], text)
        store.wait(keys, timedelta(seconds=TIMEOUT_S))
        return [bytes(each).decode() for each in store.multi_get(keys)]

    return gather


def gather_through(text: str, group: Any = None) -> list[str]:
    """Return what all members of a process group give, the default one or another, by rank."""
    is_nccl = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = _all_gather(torch.tensor([own.numel()], device=device), group)
    longest = max(int(each) for each in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: own.numel()] = own
    texts = _all_gather(padded.to(device), group)
    return [bytes(each[: int(size)].cpu().tolist()).decode() for each, size in zip(texts, sizes, strict=True)]


def _all_gather(tensor: Any, group: Any) -> list[Any]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group=group)
    return found
