"""The snapshots that the agent of this node offers a worker: files that it kept, and where other nodes have more."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

from unicron_elastic.state.layout import Layout
from unicron_elastic.state.pull.client import SourcesLost, pull
from unicron_elastic.state.snapshot.file import Header, SnapshotFile, read_header
from unicron_elastic.worker.channel import close_all

PULL_TIMEOUT_S = 300.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Local:
    """In the memory of this host."""

    header: Header
    file: SnapshotFile
    where: str = "the memory of their hosts"

    def read(self) -> tuple[Layout, list[Tensor]]:
        """The state. Raises ValueError if it is not what was written."""
        _, layout, tensors = self.file.read()
        return layout, tensors


@dataclass(frozen=True)
class Remote:
    """In the memory of another node's agent."""

    header: Header
    address: Mapping[str, Any]
    key: str
    where: str = "the memory of a neighbouring node"

    def read(self) -> tuple[Layout, list[Tensor]]:
        """The state. Raises ValueError or OSError if it cannot be had."""
        file = SnapshotFile.create()
        try:
            pull_into(file, self.header, self.address, self.key)
            _, layout, tensors = file.read()
            return layout, tensors
        finally:
            file.close()


def pull_into(file: SnapshotFile, header: Header, address: Mapping[str, Any], key: str) -> None:
    """Copies the snapshot with this header from a server. Raises ValueError or OSError if it cannot be had."""
    file.clear()
    block = file.block(header.total_bytes)
    try:
        pulled = pull([address], bytes.fromhex(key), step=header.step, timeout_s=PULL_TIMEOUT_S, into=[block])
    except (SourcesLost, TimeoutError) as error:
        raise OSError(f"the snapshot of step {header.step} could not be copied: {error}") from None
    pulled.release()
    if file.header() != header:
        file.clear()
        raise ValueError(f"another snapshot came instead of the one of step {header.step}")


@dataclass
class Offers:
    """``own``: the files of this place on this node, by number. ``found``: all that may be gone on from, near first.

    ``is_restart``: workers of this job had begun on this node before.
    """

    own: dict[int, SnapshotFile]
    found: list[Local | Remote]
    is_replacement: bool = False
    is_restart: bool = False

    def reached(self) -> int:
        """Returns the step that the workers of this place had come to, as far as their files say; else 0."""
        return max((file.reached() for file in self.own.values()), default=0)

    def close_others(self) -> None:
        """Gives back the files that are not of this place."""
        for each in self.found:
            if isinstance(each, Local) and each.file not in self.own.values():
                each.file.close()

    @classmethod
    def nothing(cls) -> Offers:
        """Without an agent."""
        return cls({}, [])

    @classmethod
    def parse(cls, told: Mapping[str, Any], fds: Sequence[int]) -> Offers:
        """What the agent said, with the descriptors that came with it, which belong to the result."""
        offers = cls({}, [], bool(told.get("is_replacement")), bool(told.get("is_restart")))
        slots = told["slots"]
        for fd, slot in zip(fds, slots, strict=False):
            try:
                file = SnapshotFile(fd)
            except ValueError:
                close_all([fd])
                continue
            if slot is not None:
                offers.own[int(slot)] = file
            with suppress(ValueError):
                offers.found.append(Local(read_header(fd), file))
        for each in told["remote"]:
            try:
                header = Header.from_message(each["header"])
                offers.found.append(Remote(header, dict(each["address"]), str(each["key"])))
            except (KeyError, TypeError, ValueError) as error:
                logger.warning("A snapshot that another node offers is left out: %s.", error)
        return offers


# Which snapshot all ranks go on from: the newest that everyone has.


Key = tuple[int, ...]  # it begins with the step


class Found(Protocol):
    """A snapshot that was found somewhere."""

    @property
    def header(self) -> Header:
        """What it is of."""


T = TypeVar("T", bound=Found)


def newest_common(said: Sequence[Collection[Key]]) -> Key | None:
    """The newest of the keys that every rank said; None if there is none."""
    common = set(said[0]).intersection(*said[1:]) if said else set()
    return max(common, default=None)


def why_back(said: Sequence[Collection[Key]], chosen: Key | None) -> str:
    """One sentence if some ranks have a newer state than the one from which all go on; else empty."""
    newest = max((max(keys)[0] for keys in said if keys), default=None)
    step = 0 if chosen is None else chosen[0]
    if newest is None or newest <= step:
        return ""
    behind = [str(rank) for rank, keys in enumerate(said) if not any(key[0] == newest for key in keys)]
    common = newest_common(said)
    if common is not None and common[0] == newest:  # all had it, and not all could use it, which they say
        return f"All ranks go back to step {step}."
    if not behind:
        return f"The states of step {newest} are of different runs: all ranks go back to step {step}."
    who = f"rank {behind[0]} has" if len(behind) == 1 else f"ranks {', '.join(behind)} have"
    where = f"to step {step}" if chosen is None else f"to step {step}, the newest that everyone has"
    return f"All ranks go back {where}: {who} no state of step {newest}."


def why_behind(said: Sequence[Collection[Key]], chosen: Key | None, reached: Sequence[int], *, is_restart: bool) -> str:
    """One sentence if the job had come further than any state that is left of it; else empty."""
    newest = max((max(keys)[0] for keys in said if keys), default=0 if chosen is None else chosen[0])
    if max(reached, default=0) > newest:
        return f"The job had come to step {max(reached)}, of which no snapshot was made."
    if is_restart and chosen is None and not any(said):
        return "All ranks begin at step 0: no state of the job was kept."
    return ""


def fits(header: Header, rank: int, world_size: int) -> bool:
    """Whether a rank of a world of this size can go on from a snapshot."""
    return header.is_replicated or (header.rank == rank and header.world_size == world_size)


def best_for(found: Iterable[T], rank: int, world_size: int) -> dict[tuple[int, int], T]:
    """Return by key the snapshot that a rank takes: its own, or another's of the same; nearer ones come first."""
    chosen: dict[tuple[int, int], T] = {}
    for each in found:
        header = each.header
        if not fits(header, rank, world_size):
            continue
        before = chosen.get(header.key)
        if before is None or (before.header.rank != rank and header.rank == rank):
            chosen[header.key] = each
    return chosen


def victim(held: Sequence[Header | None]) -> int:
    """Which file is written next: one without a snapshot, else the one with the oldest.

    The newest one stays whatever happens, and so does the newest of those that a neighbour copies, if there are more
    than two files.
    """
    for number, header in enumerate(held):
        if header is None:
            return number
    known = [header for header in held if header is not None]
    spared = {max(header.key for header in known)}
    if len(held) > 2 and (for_peer := [header.key for header in known if header.is_for_peer]):
        spared.add(max(for_peer))
    free = [number for number, header in enumerate(known) if header.key not in spared]
    return min(free or range(len(known)), key=lambda number: known[number].key)


def outdated(copies: Mapping[int, Sequence[Header]], ranks: Collection[int]) -> list[Header]:
    """Which copies, by rank, nobody will want on the node whose neighbour has these ``ranks`` now.

    Those of other ranks, which are of neighbours before, once two newer ones of each of ``ranks`` are there: by then
    their own new neighbours have copied theirs. Each is as large as a rank's state, and ranks change with every node
    that comes or goes.
    """
    newest = [sorted((header.key for header in copies.get(rank, ())), reverse=True)[:2] for rank in ranks]
    if not newest or min(map(len, newest)) < 2:
        return []
    bound = min(keys[1] for keys in newest)
    return [header for rank, held in copies.items() if rank not in ranks for header in held if header.key < bound]
