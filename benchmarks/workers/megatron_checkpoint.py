"""Megatron-Core's own checkpoints (``megatron.core.dist_checkpointing``), as Megatron-LM makes and loads them.

With torch's Adam three things are needed that Apex's and Transformer Engine's do not need (megatron-core 0.16.1); they
are told beside the lines.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}  # the quickest: nothing is gathered
NEWEST = "newest"


def save(folder: Path, model: list[Any], optimizer: Any, step: int) -> None:
    """Save the state after ``step``, with all ranks, and let it be the newest; the one before is removed."""
    place = folder / f"checkpoint-{step}"
    if dist.get_rank() == 0:
        place.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(_sharded(model, optimizer, step, is_loading=False), str(place))
    if dist.get_rank() == 0:
        before = (folder / NEWEST).read_text() if (folder / NEWEST).exists() else None
        (folder / "writing").write_text(place.name)
        (folder / "writing").rename(folder / NEWEST)
        if before not in (None, place.name):
            shutil.rmtree(folder / before, ignore_errors=True)


def load(folder: Path, model: list[Any], optimizer: Any) -> int:
    """Load the newest state if there is one; return how many steps it has behind it."""
    if not (folder / NEWEST).exists():
        return 0
    place = folder / (folder / NEWEST).read_text()
    inner = [each.optimizer for each in optimizer.chained_optimizers]
    for each in optimizer.chained_optimizers:
        if hasattr(each, "_init_optimizer_states_with_dummy_values"):
            each._init_optimizer_states_with_dummy_values()  # it asserts that there is one number of steps
    with torch.no_grad():  # it copies into views of parameters
        loaded = dist_checkpointing.load(_sharded(model, optimizer, 0, is_loading=True), str(place))
        for number, chunk in enumerate(model):
            chunk.module.load_state_dict(loaded[f"model{number}"])
        optimizer.load_state_dict(loaded["optimizer"])
    step = int(loaded["step"])
    for each in inner:
        for state in each.state.values():
            state["step"] = torch.tensor(float(step))  # else all parameters share one tensor, which each advances
    return step


def _sharded(model: list[Any], optimizer: Any, step: int, *, is_loading: bool) -> dict[str, Any]:
    chunks = {f"model{number}": chunk.module.sharded_state_dict() for number, chunk in enumerate(model)}
    found = {**chunks, "step": step}
    found["optimizer"] = optimizer.sharded_state_dict(
        {key: value for each in chunks.values() for key, value in each.items()}, is_loading, metadata=METADATA
    )
    return found
