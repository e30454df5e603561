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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, param_group_identifier_keys
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

from unicron_elastic.megatron.groups import takes_place
from unicron_elastic.megatron.members import device_of
from unicron_elastic.megatron.state import begin_state, load_into
from unicron_elastic.state.storage import manifest
from unicron_elastic.state.storage.folder import cause_of, why_not_written
from unicron_elastic.worker.phases import phase
from unicron_elastic.worker.pulse import made_before

# What of a Megatron-Core model and its optimizer stands in a sharded checkpoint, in terms that no layout changes.
#
# Megatron describes each parameter as a piece of a tensor of the whole model (``sharded_state_dict``). What the
# optimizer has of it, its fp32 main parameter and Adam's moments, is described as the same piece of further tensors,
# under the names that Megatron's ``fully_reshardable`` format has for them; the same for the distributed optimizer
# and for others, so that each can read what the other wrote. Megatron's own descriptions of the optimizer are not
# used (0.16.1): plain ones name main parameters otherwise, and what is loaded shares one count of steps between all
# parameters, which torch's Adam then advances once for each.


Wait = Callable[[Any], None]  # for a collective that is under way
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Held:
    """What this rank's optimizer has of a parameter: ``main``, flat or not, is elements [begin, end) of it."""

    begin: int
    end: int
    main: Tensor
    inner: Any

    def rows(self, kinds: Sequence[str]) -> list[Tensor]:
        """Flat, and in place."""
        state = begin_state(self.inner, self.main)
        return [(self.main if kind == "param" else state[kind]).detach().view(-1) for kind in kinds]


def given(chunks: list[Any], optimizer: Any, wait: Wait) -> dict[str, Any]:
    """What this rank writes; together with all others. Raises what a collective raises.

    Every replica writes its share of the parameters: whole ones, put together from the parts of the distributed
    optimizer.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    is_parted = any(isinstance(each, DistributedOptimizer) for each in _optimizers(optimizer)) and group.size() > 1
    held = _held(optimizer)
    state: dict[str, Any] = {"rows": {}}
    elements = [0] * group.size()  # that each replica writes
    for name, pieces in _pieces(chunks):
        state[name] = {}
        for key, piece in pieces.items():
            if not isinstance(piece.data, torch.nn.Parameter):
                state[name][key] = piece
                continue
            if any(piece.replica_id[:-1]):  # another seat has the same, and writes it
                continue
            owner = elements.index(min(elements))
            elements[owner] += piece.data.numel()
            is_mine = group.rank() == owner
            if is_mine:
                state[name][key] = replace(piece, replica_id=_MAIN, data=piece.data.detach())
            if not piece.data.requires_grad:
                continue
            kinds = _kinds(piece.data)
            rows = _rows(piece.data, held.get(piece.data), kinds)
            if is_parted:
                wait(dist.reduce(rows, group_dst=owner, group=group, async_op=True))
            if is_mine:
                state["rows"] |= {
                    f"{name}.{key}.{kind}": _row(piece, kind, row.cpu(), _MAIN)
                    for kind, row in zip(kinds, rows, strict=True)
                }
    steps = torch.tensor([_steps(held)], dtype=torch.float64, device=device_of(chunks))
    wait(dist.all_reduce(steps, op=dist.ReduceOp.MAX, async_op=True))
    return state | {"optimizer": {"steps": float(steps), "groups": [_settings(each) for each in _groups(optimizer)]}}


def asked(chunks: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    """What this rank reads: into new tensors, so that one that cannot be read changes nothing."""
    held = _held(optimizer)
    state: dict[str, Any] = {"rows": {}}
    for name, pieces in _pieces(chunks):
        state[name] = {
            key: replace(piece, data=torch.empty_like(piece.data, device="cpu", requires_grad=False))
            if isinstance(piece, ShardedTensor | ShardedTensorFactory)
            else piece
            for key, piece in pieces.items()
        }
        state["rows"] |= {
            f"{name}.{key}.{kind}": _row(piece, kind, torch.empty(piece.data.numel()), piece.replica_id)
            for key, piece in pieces.items()
            if piece.data is not None and piece.data in held
            for kind in _kinds(piece.data)
        }
    return state


def take(chunks: Sequence[Any], optimizer: Any, state: Mapping[str, Any]) -> None:
    """Takes over what was ``asked``."""
    held = _held(optimizer)
    steps, settings = state["optimizer"]["steps"], {_identity(each): each for each in state["optimizer"]["groups"]}
    for name, pieces in _pieces(chunks):
        for key, piece in pieces.items():
            if piece.data is None or piece.data not in held:
                continue
            own, kinds = held[piece.data], _kinds(piece.data)
            for kind, row in zip(kinds, own.rows(kinds), strict=True):
                row.copy_(state["rows"][f"{name}.{key}.{kind}"].view(-1)[own.begin : own.end])
            # One for each: torch's Adam counts in place.
            own.inner.state[own.main]["step"] = torch.tensor(steps, dtype=torch.float32)
    with torch.no_grad():
        for chunk, name in zip(chunks, _names(chunks), strict=True):
            chunk.module.load_state_dict(state[name])
    for group in _groups(optimizer):
        group.update(settings.get(_identity(group), {}))


_MAIN = (0, 0, 0)


def _names(chunks: Sequence[Any]) -> list[str]:
    """Name tensors as Megatron-LM does."""
    return ["model"] if len(chunks) == 1 else [f"model{number}" for number in range(len(chunks))]


def _pieces(chunks: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each chunk's name, and what Megatron says of its tensors."""
    for name, chunk in zip(_names(chunks), chunks, strict=True):
        yield name, chunk.module.sharded_state_dict()


def _kinds(parameter: Tensor) -> tuple[str, ...]:
    """What the optimizer has of it besides its weights: in fp32 they are the main parameters themselves."""
    return _MOMENTS if parameter.dtype == torch.float32 else ("param", *_MOMENTS)


def _row(piece: Any, kind: str, row: Tensor, replica_id: Any) -> Any:
    data = row.view(piece.data.shape)
    changes: dict[str, Any] = {"key": f"optimizer.state.{kind}.{piece.key}", "data": data, "replica_id": replica_id}
    return replace(piece, **changes, **({"dtype": data.dtype} if isinstance(piece, ShardedTensor) else {}))


def _rows(parameter: Tensor, held: _Held | None, kinds: Sequence[str]) -> Tensor:
    """Return the state, of shape (kinds, elements of the parameter); zero where this rank's optimizer has nothing."""
    rows = torch.zeros(len(kinds), parameter.numel(), device=parameter.device)
    if held is not None:
        for row, own in zip(rows, held.rows(kinds), strict=True):
            row[held.begin : held.end] = own
    return rows


def _optimizers(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _held(optimizer: Any) -> dict[Tensor, _Held]:
    """Return what is held, by parameter of the model."""
    found: dict[Tensor, _Held] = {}
    for each in _optimizers(optimizer):
        inner = each.optimizer
        if isinstance(each, DistributedOptimizer):
            for parameter, (group, order) in each.model_param_group_index_map.items():
                own = each._get_model_param_range_map(parameter)["param"]
                found[parameter] = _Held(own.start, own.end, inner.param_groups[group]["params"][order], inner)
            continue
        mains = {}
        if isinstance(each, Float16OptimizerWithFloat16Params):
            groups = zip(each.float16_groups, each.fp32_from_float16_groups, strict=True)
            mains = {main: p for models, own in groups for p, main in zip(models, own, strict=True)}
        for group in inner.param_groups:
            for main in group["params"]:
                found[mains.get(main, main)] = _Held(0, main.numel(), main, inner)
    return found


def _steps(held: Mapping[Tensor, _Held]) -> float:
    return max((float(each.inner.state[each.main].get("step", 0)) for each in held.values()), default=0.0)


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [group for each in _optimizers(optimizer) for group in each.optimizer.param_groups]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return that by which Megatron-Core knows a group again."""
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)


warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", module=r"megatron\.core")

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
    common = {"step": step, "state": {name: each.state_dict() for name, each in state.items()}}
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
                    load_into(each, found[_OURS]["state"][name])
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
