"""Sharded checkpoints in a folder that all ranks see, in the format of ``megatron.core.dist_checkpointing``.

They are the last tier: what is lost with two neighbouring replicas, or with the whole job, is read from here, with
whatever data, tensor and pipeline parallelism the job has then. A checkpoint is whole or not there: it is written to
``step-N.unfinished``, gets a manifest with the checksum of every file, and is renamed.

Megatron's own ``save`` is not used: its collectives wait for a lost rank without looking up, and its files are written
by processes that are forked off, which outlive a killed rank. Here each rank writes by itself what Megatron's planner
plans for it, and what ranks do together are waits that a newer world ends (``Ranks``). It is read by Megatron's own
``load``.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

from unicron_elastic.megatron.checkpoint_pieces import asked, given, take
from unicron_elastic.megatron.groups import takes_place
from unicron_elastic.megatron.members import device_of
from unicron_elastic.megatron.state import load_into
from unicron_elastic.state.storage import manifest
from unicron_elastic.state.storage.folder import cause_of, why_not_written
from unicron_elastic.training.registered import with_state
from unicron_elastic.worker.phases import phase
from unicron_elastic.worker.step_count import made_before

UNFINISHED = ".unfinished"
_PLAN = "__{rank}.plan"  # what a rank has written, for the one that writes the metadata
_OURS = "unicron"


@dataclass(frozen=True)
class Ranks:
    """What all who train do together: ``sum`` a tensor in place, and ``wait`` for a collective that is under way."""

    sum: Callable[[Tensor], Any] = dist.all_reduce
    wait: Callable[[Any], Any] = lambda work: work.wait()

    def first_failed(self, error: str, device: torch.device) -> int | None:
        """Which rank is the first that says an ``error``; None if all say ""."""
        failed = torch.zeros(dist.get_world_size(), device=device)
        failed[dist.get_rank()] = float(error != "")
        self.sum(failed)
        return int(failed.nonzero()[0]) if failed.any() else None


ALL = Ranks()


@phase("checkpoint")
def save(
    directory: str | os.PathLike[str],
    step: int,
    model: Any,
    optimizer: Any,
    *,
    keep: int = 2,
    ranks: Ranks = ALL,
    **state: Any,
) -> bool:
    """Writes a checkpoint of ``step``, with all ranks that train; the newest ``keep`` stay.

    ``state``: what else there is to save, by name, with ``state_dict``; rank 0's is taken, and it must be plain data
    and tensors. False if it could not be written, which one rank says in a sentence. Raises ValueError for a ``keep``
    below 1, and what a collective raises.
    """
    if keep < 1:
        raise ValueError(f"keep must be 1 or more, got {keep}: the newest checkpoint always stays")
    chunks = _listed(model)
    own = _Save(manifest.folder_of(Path(directory), step), keep, device_of(chunks), ranks)
    if not own.together(own.prepare):
        return False
    parts = given(chunks, optimizer, ranks.wait)
    common = {"step": step, "state": {name: with_state(name, each).state_dict() for name, each in state.items()}}
    return own.together(lambda: own.write({**parts, _OURS: common})) and own.together(own.finish)


@phase("restore")
def load(directory: str | os.PathLike[str], model: Any, optimizer: Any, **state: Any) -> int:
    """Takes over the newest checkpoint that can be read; returns its step, 0 if there is none.

    All ranks call it, before ``attach``. ``state`` as in ``save``, with ``load_state_dict``. Those that cannot be read
    are named, in a sentence each. A process that takes the place of a lost one reads nothing: it gets the state from
    the others.
    """
    if takes_place():
        return 0
    chunks = _listed(model)
    steps = [manifest.steps_in(Path(directory))]
    dist.broadcast_object_list(steps, src=0, device=device_of(chunks))
    for step in reversed(steps[0]):
        path = manifest.folder_of(Path(directory), step)
        error = _why_not(path)
        failed = ALL.first_failed(error, device_of(chunks))
        found: dict[str, Any] = {}
        if failed is None:
            error = _read(path, asked(chunks, optimizer), found)
            failed = ALL.first_failed(error, device_of(chunks))
        if failed is None:
            take(chunks, optimizer, found)
            for name, each in state.items():
                if name in found[_OURS]["state"]:
                    load_into(with_state(name, each), found[_OURS]["state"][name])
            made_before(step)
            return step
        if failed == dist.get_rank():
            _say(f"{path} is not read: {error}.")
    if steps[0] and dist.get_rank() == 0:
        _say(f"no checkpoint in {directory} can be read: the training begins at its first step.")
    return 0


class _Save:
    """One that is under way."""

    def __init__(self, path: Path, keep: int, device: torch.device, ranks: Ranks) -> None:
        self._path = path
        self._keep = keep
        self._unfinished = path.with_name(path.name + UNFINISHED)
        self._device = device
        self._ranks = ranks
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._common: dict[str, Any] = {}
        self._planner: Any = None

    def together(self, part: Callable[[], None]) -> bool:
        """Does a part, and waits until all have; false if one could not, which the first of them says."""
        error = ""
        try:
            part()
        except Exception as failure:
            error = why_not_written(self._path, failure, 0)
        failed = self._ranks.first_failed(error, self._device)
        if failed == self._rank:
            _say(f"the checkpoint {self._path} was not written: {error}. The training goes on.")
        return failed is None

    def prepare(self) -> None:
        """Rank 0 makes the folder, and removes what was begun before and not finished."""
        if self._rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            for each in self._path.parent.glob(f"step-*{UNFINISHED}"):
                if each != self._unfinished:
                    _say(f"the checkpoint {each.with_suffix('')} was not finished: it is removed.")
                shutil.rmtree(each)
            self._unfinished.mkdir()

    def write(self, state: dict[str, Any]) -> None:
        """Writes what is this rank's: tensors to a file of its own, and what was planned to another."""
        pieces, self._common = save_preprocess(state, validate_access_integrity=False)
        named, _, _ = _replace_state_dict_keys_with_sharded_keys(pieces, keep_only_main_replica=True)
        self._planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._planner.set_up_planner(mcore_to_pyt_state_dict(named, False), is_coordinator=self._rank == 0)
        writer = FileSystemWriter(self._unfinished)
        writer.set_up_storage_writer(False, rank=self._rank, use_collectives=False)
        plan = self._planner.finish_plan(writer.prepare_local_plan(self._planner.create_local_plan()))
        results = writer.write_data(plan, self._planner).wait()
        files = {each.storage_data.relative_path for each in results}
        checks = {name: manifest.described(self._unfinished / name) for name in files}
        with (self._unfinished / _PLAN.format(rank=self._rank)).open("wb") as file:
            pickle.dump((plan, results, checks), file)

    def finish(self) -> None:
        """Rank 0 writes what is about all of it, renames it, and removes older ones."""
        if self._rank != 0:
            return
        plans, results = [], []
        checks: dict[str, Any] = {}
        for rank in range(self._size):
            path = self._unfinished / _PLAN.format(rank=rank)
            plan, result, described = pickle.loads(path.read_bytes())
            path.unlink()
            plans.append(plan)
            results.append(result)
            checks |= described
        _, metadata = self._planner.create_global_plan(plans)
        writer = FileSystemWriter(self._unfinished)
        writer.set_up_storage_writer(True)
        writer.finish(metadata, results)
        torch.save(self._common, self._unfinished / COMMON_STATE_FNAME)
        save_config(CheckpointingConfig("torch_dist", 1), str(self._unfinished))
        for name in (COMMON_STATE_FNAME, CONFIG_FNAME):  # torch's writer has done that for the others
            manifest.sync(self._unfinished / name)
        manifest.finish(self._unfinished, checks)
        manifest.remove(self._path)  # of the same step
        self._unfinished.rename(self._path)
        manifest.sync(self._path.parent)
        manifest.tidy(self._path, self._keep)


def _why_not(path: Path) -> str:
    """Why this rank cannot read it, "" if nothing speaks against it; it looks at its share of the files."""
    try:
        manifest.check(path, share=(dist.get_rank(), dist.get_world_size()))
        if not dist_checkpointing.check_is_distributed_checkpoint(str(path)):
            return "it is no checkpoint of Megatron-Core"
        if _OURS not in dist_checkpointing.load_common_state_dict(str(path)):
            return "it was not written by unicron_elastic.megatron"
    except Exception as error:
        return _told(error)
    return ""


def _read(path: Path, state: dict[str, Any], found: dict[str, Any]) -> str:
    """Reads it into ``found``; says why it could not."""
    try:
        found |= dist_checkpointing.load(state, str(path), validate_access_integrity=False)
    except (CheckpointException, Exception) as error:
        return _told(cause_of(error))
    return ""


def _told(error: BaseException) -> str:
    text = str(error).partition("\n")[0].removesuffix(".")[:300]
    return text if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {text}"


def _say(sentence: str) -> None:
    sys.stderr.write(f"unicron: {sentence}\n")


def _listed(model: Any) -> list[Any]:
    return list(model) if isinstance(model, list | tuple) else [model]
