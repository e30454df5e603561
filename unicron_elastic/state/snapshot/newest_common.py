"""Which snapshot all ranks go on from: the newest that everyone has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from unicron_elastic.state.snapshot.header import Header

Key = tuple[int, ...]  # the step first; then not 0 for a state in memory


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


def that_count(said: Sequence[Collection[Key]], borrowed: Sequence[Collection[Key]]) -> Sequence[Collection[Key]]:
    """Return by rank the keys from which the newest common one is taken, of those that each rank ``said``.

    A ``borrowed`` state lacks what is of this rank itself: with it a rank draws other random numbers than in a job that
    nobody struck. So it does not count, also if it is newer, where memory has one that nobody has to borrow, nor where
    it is of step 0: who begins anew has lost nothing, and draws as before.
    """
    own = [set(keys).difference(others) for keys, others in zip(said, borrowed, strict=True)]
    newest, newest_of_all = newest_common(own), newest_common(said)
    is_enough = newest is not None and bool(newest[1])
    is_first = newest_of_all is not None and newest_of_all[0] == 0
    return own if is_enough or is_first else said


def why_back(said: Sequence[Collection[Key]], chosen: Key | None, begun: int = 0) -> str:
    """One sentence if some ranks have a newer state than the one from which all go on; else empty.

    ``begun``: the step of what the script has loaded itself, from which all go on if none is chosen.
    """
    newest = max((max(keys)[0] for keys in said if keys), default=None)
    step = begun if chosen is None else chosen[0]
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


def why_behind(
    said: Sequence[Collection[Key]],
    chosen: Key | None,
    reached: Sequence[int],
    *,
    is_restart: bool,
    unfit: Sequence[tuple[int, int]] = (),
    begun: int = 0,
) -> str:
    """One sentence if the job had come further than any state that is left of it; else empty.

    ``unfit``: the step and the number of ranks of the newest snapshot of another number of ranks that each found.
    ``begun``: the step of what the script has loaded itself; no older one is in what is ``said``.
    """
    newest = max((max(keys)[0] for keys in said if keys), default=begun if chosen is None else chosen[0])
    step, ranks = max(unfit, default=(0, 0))
    if step > newest:
        of = f"{ranks} ranks, each with a state of its own, and not of {len(said)}"
        why = f"the snapshots of step {step} are of {of}"
    elif max(reached, default=0) > newest:
        why = f"the job had come to step {max(reached)}, of which no snapshot was made"
    elif is_restart and chosen is None and newest == begun:
        why = f"no {'newer ' if begun else ''}state of the job was kept"
    else:
        return ""
    begins = chosen is None and newest == begun
    return f"All ranks begin at step {begun}: {why}." if begins else f"{why[0].upper()}{why[1:]}."


def newest_unfit(found: Iterable[Found], world_size: int) -> tuple[int, int]:
    """Return the step and the number of ranks of the newest that is of another world than one of this size."""
    others = [each.header for each in found if each.header.world_size != world_size and not each.header.is_replicated]
    return max(((header.step, header.world_size) for header in others), default=(0, 0))


def fits(header: Header, rank: int, world_size: int) -> bool:
    """Whether a rank of a world of this size can go on from a snapshot."""
    return header.is_replicated or (header.rank == rank and header.world_size == world_size)


def is_borrowed(header: Header, rank: int, world_size: int) -> bool:
    """Whether a snapshot that fits lacks what is of the rank itself in a job that goes on as it was."""
    return header.has_own_parts and (header.rank, header.world_size) != (rank, world_size)


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


def victim(held: Sequence[Header | None], stepped_from: int | None = None) -> int:
    """Which file is written next: one without a snapshot, else the one with the oldest that may go.

    The newest one that an optimizer has ``stepped_from`` stays: ranks that run ahead of others between two steps, as
    while they accumulate gradients, have that one in common. The newest stays as well, unless each other one is to, and
    so does the newest of those that a neighbour copies, if there are more than two files.
    """
    known = [header for header in held if header is not None]
    if len(known) < len(held):
        return held.index(None)
    by_age = sorted(range(len(held)), key=lambda number: known[number].key)
    spared = by_age[-1:]
    if len(held) > 2:
        spared = [number for number in by_age if known[number].is_for_peer][-1:] + spared
    spared = [number for number in by_age if known[number].step == stepped_from][-1:] + spared
    while len(set(spared)) == len(held):
        spared.pop()
    return next(number for number in by_age if number not in spared)


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
