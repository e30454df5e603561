"""Which of several faults came first in *cause*, not merely in time.

When one rank dies, its neighbours report it within milliseconds, often before the agent has collected the dead one: so
the earliest report is not the root. Faults that speak of another rank lose against faults that do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unicron_elastic.base.fault import Fault, Status
from unicron_elastic.base.text import shorten

_LONGEST_RANKS = 60  # characters of a list of ranks, for jobs of thousands of them


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """The fault to show first and to act on; `consequences` are all the others, in order of time and rank."""

    fault: Fault
    consequences: tuple[Fault, ...]
    reason: str


def root_cause(faults: Sequence[Fault]) -> RootCause:
    """The earliest fault that is not a consequence; if all are, the earliest. Ties go to the lower rank.

    Only the first fault of each rank can be the root: a rank that reports a closed connection and then exits with
    code 1 has not failed by itself. Give the faults of one incident, in any order. Raises ValueError if there are none.
    """
    if not faults:
        raise ValueError("a root cause needs at least one fault")
    ordered = sorted(faults, key=lambda fault: (fault.failure.at, fault.failure.rank))
    own = [fault for fault in _first_of_each_rank(ordered) if not fault.is_consequence]
    root = own[0] if own else ordered[0]
    others = tuple(fault for fault in ordered if fault is not root)
    return RootCause(fault=root, consequences=others, reason=_reason(root, others))


def _first_of_each_rank(ordered: Sequence[Fault]) -> list[Fault]:
    first: dict[int, Fault] = {}
    for fault in ordered:
        first.setdefault(fault.failure.rank, fault)
    return list(first.values())


def _reason(root: Fault, others: Sequence[Fault]) -> str:
    rank = root.failure.rank
    what = root.reason.removeprefix(f"rank {rank} ").rstrip(".")
    if root.is_consequence:
        head = f"no rank here failed by itself; rank {rank} reported first: it {what}"
    else:
        head = f"rank {rank} failed first: it {what}"
    followers = [fault for fault in _first_of_each_rank(others) if fault.failure.rank != rank]
    if not followers:
        return f"{head}." if root.is_consequence else root.reason
    noun = "other rank" if len(followers) == 1 else "other ranks"
    return f"{head}; {len(followers)} {noun} followed: {_by_status(followers)}."


def _by_status(followers: Iterable[Fault]) -> str:
    """Such as "2x connection refused or reset (ranks 0, 2), 1x task hang (rank 3)": most frequent first."""
    groups: dict[Status, list[int]] = {}
    for fault in followers:
        groups.setdefault(fault.status, []).append(fault.failure.rank)
    largest_first = sorted(groups.items(), key=lambda item: (-len(item[1]), min(item[1])))
    return ", ".join(f"{len(ranks)}x {status} ({_ranks(ranks)})" for status, ranks in largest_first)


def _ranks(ranks: Iterable[int]) -> str:
    """Such as "rank 3" or "ranks 0-7, 9": runs of three and more are joined."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    noun = "rank" if len(runs) == 1 and len(runs[0]) == 1 else "ranks"
    return f"{noun} {shorten(', '.join(parts), _LONGEST_RANKS)}"
