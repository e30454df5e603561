"""Accelerate in one process of several: it is told that there are no others, and which rank this one is.

Of accelerate's own it uses what is not for others: ``missing_parts`` looks whether it is there. Written against
accelerate 1.15.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState

from unicron_elastic.training.of_launcher import of_launcher, rank_before_meeting, shown_local_rank

_SHOWN = ("process_index", "local_process_index")
_RANKS = "num_processes"
# By these accelerate would make a process group of its own, in which a replacement would wait for ever.
_OF_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def missing_parts() -> str:
    """Name what this version of accelerate has not; "" if all is there."""
    is_known = {*_SHOWN, _RANKS} <= set(getattr(PartialState, "_known_attrs", ()))
    return "" if is_known and hasattr(PartialState, "_shared_state") else "accelerate's PartialState._shared_state"


def has_begun() -> bool:
    """Return whether accelerate has looked for other processes already."""
    return bool(PartialState._shared_state)


@contextmanager
def alone() -> Iterator[None]:
    """Hide what the launcher says of ranks."""
    variables = os.environ
    kept = {name: variables.pop(name) for name in _OF_RANK if name in variables}
    try:
        yield
    finally:
        variables.update(kept)


def own_device(device: torch.device) -> torch.device:
    """Return the device of this rank, where accelerate takes the first for that of the only process."""
    if device.type != "cuda":
        return device
    own = torch.device("cuda", of_launcher("LOCAL_RANK", 0) % torch.cuda.device_count())
    torch.cuda.set_device(own)
    PartialState._shared_state["device"] = own
    return own


def show_rank(rank: int) -> None:
    """Have accelerate, and whoever asks it, take this for the rank of this process."""
    is_one_node = of_launcher("LOCAL_WORLD_SIZE", 1) == of_launcher("WORLD_SIZE", 1)
    local = shown_local_rank(rank, of_launcher("LOCAL_RANK", 0), is_one_node=is_one_node)
    for shared in _shared_states():
        shared.update(dict(zip(_SHOWN, (rank, local), strict=True)))


def hide_rank() -> None:
    """Have a process that takes a lost one's place not be the first before it has come to the others."""
    show_rank(rank_before_meeting())


@contextmanager
def shown_ranks(number: int) -> Iterator[None]:
    """Have accelerate take this for the number of processes."""
    before = PartialState._shared_state[_RANKS]
    for shared in _shared_states():
        shared[_RANKS] = number
    try:
        yield
    finally:
        for shared in _shared_states():
            shared[_RANKS] = before


def _shared_states() -> list[dict[str, Any]]:
    """Return where accelerate keeps ranks: it copies what it knows of processes into what it knows of training."""
    return [each._shared_state for each in (PartialState, AcceleratorState) if each._shared_state]
