"""States in storage, as torch.distributed.checkpoint writes them, with a manifest that says which are whole.

A state that all ranks share is written by rank 0 alone; of one with sharded tensors every rank writes its shards, and
what else it has that others have not, and a job with another number of ranks can read it. Any other state is written by
each rank for itself.
torch's own files are read as torch reads them: whoever can write to the folder can have the job run code.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter

from unicron_elastic.state.digest import digest_of
from unicron_elastic.state.layout import Layout, empty_tensors, flatten, rebuild
from unicron_elastic.state.packing import host_bytes
from unicron_elastic.state.snapshot.gather import Gather, gather_through
from unicron_elastic.state.snapshot.shards import Shards, has_shards
from unicron_elastic.state.storage import manifest

# torch warns of what is meant: that one process writes for itself.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", module=r"torch\.distributed\.checkpoint")

_FULL_SHARE = 1.05  # of a state's bytes that must be free for it


@dataclass(frozen=True)
class Stored:
    """One state in storage, whole by its manifest, as ``rank`` of ``world_size`` ranks reads it."""

    path: Path
    rank: int
    world_size: int = 1

    def load(self, shards: Shards) -> Any:
        """The state. Raises ValueError if it is not what was written, or is not for this rank.

        Checksums come first: what torch reads is a pickle, and wrong bytes in one can do anything.
        """
        manifest.check(self.path, share=(self.rank, self.world_size))
        try:
            return self._load(shards)
        except (CheckpointException, Exception) as error:  # torch's is no Exception
            raise ValueError(f"{self.path} cannot be read: {cause_of(error)}") from None

    def _load(self, shards: Shards) -> Any:
        reader = FileSystemReader(self.path)
        sizes = {name: each.size for name, each in reader.read_metadata().state_dict_metadata.items()}
        named = partial(_place, sizes, self.rank)
        if (layout_at := named("layout")) not in sizes:
            raise ValueError(f"{self.path} has no state of rank {self.rank}, and the states of other ranks differ")
        text = torch.empty(sizes[layout_at], dtype=torch.uint8)
        _read(reader, {layout_at: text})
        layout = Layout.parse(host_bytes(text).decode())
        tensors = empty_tensors(layout)
        random = _random_of(sizes, self.rank)
        of_first = random if self.rank == 0 else _random_of(sizes, 0)
        _read(reader, {named(f"tensor/{number}"): tensor for number, tensor in enumerate(tensors)} | random | of_first)
        parts: list[Any] = []
        state = shards.spread(rebuild(layout, tensors), parts)
        _read(reader, {named(f"shard/{number}"): part for number, part in enumerate(parts)})
        return {**state, "random": _by_name(random), manifest.RANDOM_OF_FIRST: _by_name(of_first)}


def _random_of(sizes: Mapping[str, Any], rank: int) -> dict[str, Tensor]:
    """Return room for where the generators of a rank were, by the names in storage; nothing if that is not there."""
    return {
        name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items() if name.startswith(f"random/{rank}/")
    }


def _by_name(random: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.rpartition("/")[2]: each for name, each in random.items()}


def _bytes(name: str, numbers: Tensor) -> Tensor:
    """Return a copy of what is read back as bytes. Raises TypeError for all else, which would be cut off by that."""
    if numbers.dtype != torch.uint8:
        raise TypeError(f"where {name} draws its random numbers is kept as bytes, and not as {numbers.dtype}")
    return numbers.clone()


class Storage:
    """Writes states behind the training's back. What goes wrong is said once of each kind, and ends nothing."""

    def __init__(self) -> None:
        self._writing: threading.Thread | None = None
        self._group: Any = None
        self._told: set[str] = set()

    def find(self, folder: str | os.PathLike[str], rank: int, world_size: int = 1) -> dict[int, Stored]:
        """The states in a folder, by step."""
        base = Path(folder)
        return {step: Stored(manifest.folder_of(base, step), rank, world_size) for step in manifest.steps_in(base)}

    def save(
        self, folder: str | os.PathLike[str], state: dict[str, Any], *, keep: int, is_replicated: bool, rank: int
    ) -> None:
        """Begins to write the state of a run, after the one before is written; all ranks must call it.

        The newest ``keep`` states stay. Raises ValueError for a ``keep`` below 1, and TypeError for a state that
        cannot be written.
        """
        if keep < 1:
            raise ValueError(f"keep must be 1 or more, got {keep}: the newest state always stays")
        self.wait()
        size = dist.get_world_size() if dist.is_initialized() else 1
        is_alone = size == 1 or (is_replicated and not has_shards(state))
        if is_alone and rank != 0:
            return
        prefix = "" if is_alone or has_shards(state) else f"rank{rank}/"
        if not is_alone and self._group is None:
            self._group = dist.new_group(backend="gloo")
        path = manifest.folder_of(Path(folder), int(state["steps"]))
        named = _named(state, prefix)
        if not is_alone and not prefix:
            try:
                named = _own_apart(named, rank, partial(gather_through, group=self._group))
            except RuntimeError as error:  # a rank is lost, and nothing is begun: what is there of this step stays
                self._tell(path, error, 0, rank)
                return
        tensors = {**named, **{f"random/{rank}/{k}": _bytes(k, v) for k, v in state["random"].items()}}
        plan = _Plan(path, keep, rank, None if is_alone else self._group)
        if plan.group is not None:
            # Copies the state before it returns, shards of GPUs included.
            try:
                plan.future = dcp.async_save(tensors, storage_writer=_writer(path), process_group=plan.group)
            except (CheckpointException, OSError, RuntimeError) as error:
                self._failed(path, error, 0, rank)
                return
        writing = threading.Thread(target=self._write, args=(plan, tensors), name="unicron-storage")
        try:
            writing.start()
        except RuntimeError:  # the script has ended, and this Python starts no threads then
            self._write(plan, tensors)
        else:
            self._writing = writing

    def wait(self) -> None:
        """Waits until what was begun is written, or could not be."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(self, plan: _Plan, tensors: dict[str, Any]) -> None:
        count = sum(each.nbytes for each in tensors.values())
        try:
            if plan.rank == 0:
                (plan.path / manifest.MANIFEST).unlink(missing_ok=True)  # the same step once more
            if plan.future is not None:
                plan.future.result()
            else:
                plan.path.mkdir(parents=True, exist_ok=True)
                dcp.save(tensors, storage_writer=_writer(plan.path), no_dist=True)
            if plan.rank == 0:
                manifest.finish(plan.path)
                manifest.tidy(plan.path, plan.keep, manifest.steps_in(plan.path.parent, finished=False))
        except (CheckpointException, Exception) as error:
            self._failed(plan.path, error, count, plan.rank)

    def _failed(self, path: Path, error: BaseException, count: int, rank: int) -> None:
        self._tell(path, error, count, rank)
        if rank == 0:
            manifest.remove(path)

    def _tell(self, path: Path, error: BaseException, count: int, rank: int) -> None:
        why = why_not_written(path, error, count)
        if why not in self._told and rank == 0:
            self._told.add(why)
            sys.stderr.write(f"unicron: the state was not saved in {path}: {why}. The training goes on.\n")


@dataclass
class _Plan:
    path: Path
    keep: int
    rank: int
    group: Any
    future: Any = None


def _named(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The tensors of a state by the names under which they are written, copied unless they are sharded."""
    parts: list[Any] = []
    shards = Shards(state["state"]["model"])
    shared = {key: value for key, value in state.items() if key != "random"}
    layout, tensors = flatten(shards.gathered(shared, parts))
    text = torch.frombuffer(bytearray(layout.to_json().encode()), dtype=torch.uint8)
    named: dict[str, Any] = {f"{prefix}layout": text}
    named |= {f"{prefix}tensor/{number}": _copied(tensor) for number, tensor in enumerate(tensors)}
    named |= {f"{prefix}shard/{number}": part for number, part in enumerate(parts)}
    return named


def _own_apart(named: dict[str, Any], rank: int, gather: Gather) -> dict[str, Any]:
    """Give what is not sharded, and not the same on all ranks, a name of this rank's."""
    digests = {name: digest_of(each) for name, each in named.items() if not name.startswith("shard/")}
    heard = [json.loads(each) for each in gather(json.dumps(digests))]
    apart = {name for name, digest in digests.items() if any(each.get(name) != digest for each in heard)}
    return {f"rank{rank}/{name}" if name in apart else name: each for name, each in named.items()}


def _place(sizes: Collection[str], rank: int, name: str) -> str:
    """Return the name of what a rank reads: its own if there is one, else that of all.

    Of a sharded state it is else rank 0's, as for a rank that the job did not have when that was written.
    """
    names = [f"rank{rank}/{name}", name]
    if "shard/0" in sizes:
        names.append(f"rank0/{name}")
    return next((each for each in names if each in sizes), name)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _writer(path: Path) -> FileSystemWriter:
    return FileSystemWriter(path, single_file_per_rank=True, overwrite=True)


def _read(reader: FileSystemReader, wanted: dict[str, Any]) -> None:
    if wanted:
        dcp.load(wanted, storage_reader=reader, no_dist=True)


def cause_of(error: BaseException) -> BaseException:
    """What a CheckpointException is about."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        first = next(iter(failures.values()))
        cause = first[0] if isinstance(first, tuple) else first
        return cause if isinstance(cause, BaseException) else error
    return error


def why_not_written(path: Path, error: BaseException, count: int) -> str:
    """Say why in a few words, the same for the same kind."""
    cause = cause_of(error)
    if isinstance(cause, OSError) and cause.errno is not None:
        return os.strerror(cause.errno)
    place = path if path.exists() else path.parent
    # torch's writer complains of a position in its file where the disk is full.
    if place.exists() and shutil.disk_usage(place).free < count * _FULL_SHARE:
        return os.strerror(errno.ENOSPC)
    return f"{type(cause).__name__}: {cause}".partition("\n")[0][:200]
