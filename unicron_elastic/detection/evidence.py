"""Who of those that stand still is at work, and who holds the others up."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unicron_elastic.base.text import one_line
from unicron_elastic.detection.policy import PacePolicy
from unicron_elastic.detection.sample import MEET, SPARE, GroupPosition, RankSample
from unicron_elastic.faults import HangKind

_NAME_CHARACTERS = 64  # of a process group, in a sentence


@dataclass(frozen=True, slots=True)
class Suspects:
    """The ranks that may hold the job up. None: all who stand do nothing but wait for somebody else."""

    ranks: tuple[int, ...]
    clause: str  # how they are known; "" if nothing tells them from the others


def suspects(ranks: tuple[RankSample, ...], standing: frozenset[int]) -> Suspects:
    """Singles out those whom the others wait for; all who stand, if nothing tells.

    A rank that waits in a collective may spin or sleep, and neither says anything: only the ranks that the others
    wait for can be at work or not. These may be ranks that do not stand yet.
    """
    near = _near(ranks, standing)
    stopped = tuple(rank.rank for rank in near if rank.stopped)
    if stopped:
        return Suspects(stopped, "stopped by a signal")
    meeting = [rank for rank in near if rank.phase == MEET]
    near = [rank for rank in near if meeting or rank.phase != SPARE]  # for a spare only a new world waits
    silent = tuple(rank.rank for rank in near if rank.silent)
    if silent and len(silent) < len(near):
        return Suspects(silent, "without an answer while others answer")
    others = [rank for rank in near if rank.phase != MEET]
    if meeting and others:
        return _missing_from_world(near, others)
    if meeting or not near:
        return Suspects(tuple(rank.rank for rank in near) or tuple(sorted(standing)), "")
    return _late(near)


def _missing_from_world(near: list[RankSample], others: list[RankSample]) -> Suspects:
    """Tell of ranks of which some wait in a new world for the ``others``."""
    # That a rank waits, though it is outside, is what torch's recorder says if it missed the end of a collective.
    if all(any(group.waits and group.op for group in rank.groups) for rank in others):  # perhaps they have gone on
        return Suspects(tuple(rank.rank for rank in near), "")
    found = _late(others)
    if found.ranks and found.clause:
        return found
    return Suspects(tuple(rank.rank for rank in others), "missing from the new world, in which the others wait")


def _late(near: list[RankSample]) -> Suspects:
    """Tell who is late by steps and collectives."""
    absent = _absent_from_group(near)
    if absent is not None:
        return absent
    places = _places(near)
    last, first = min(places.values()), max(places.values())
    if first != last:
        late = [rank for rank in near if places[rank.rank] == last]
        if all(rank.waiting for rank in late):
            ahead = tuple(rank.rank for rank in near if places[rank.rank] != last)
            return Suspects(ahead, "gone past the collective in which the others wait")
        return Suspects(tuple(rank.rank for rank in late), _behind_clause(last, first))
    if any(rank.waiting for rank in near) and all(rank.waiting is not None for rank in near):
        outside = tuple(rank.rank for rank in near if not rank.waiting)
        return Suspects(outside, "outside the collective in which the others wait" if outside else "")
    return Suspects(tuple(rank.rank for rank in near), "")


def _absent_from_group(near: list[RankSample]) -> Suspects | None:
    """Tell who has not begun what others wait for in some process group; None if no group tells.

    A rank that has not come to one group because it waits itself, in another, for somebody who has not come there, is
    held up like the rest. If that goes round in a circle, all in the circle are named.
    """
    if not all(rank.groups for rank in near) or len({rank.step or 0 for rank in near}) != 1:
        return None
    late: dict[int, tuple[GroupPosition, GroupPosition]] = {}  # by rank: where it is, and where others are
    held_up: set[int] = set()
    groups: dict[str, dict[int, GroupPosition]] = {}
    for rank in near:
        for group in rank.groups:
            groups.setdefault(group.name, {})[rank.rank] = group
    for members in groups.values():
        first = max(members.values(), key=lambda group: (group.begun, bool(group.op)))
        behind = {rank: group for rank, group in members.items() if group.begun < first.begun}
        ahead = {rank: group for rank, group in members.items() if group.begun == first.begun}
        if not behind or all(group.waits is False for group in ahead.values()):
            continue  # nobody waits there for anybody
        if all(group.waits for group in behind.values()):
            return Suspects(tuple(ahead), f"gone past the collective{_of_group(first)} in which the others wait")
        late.update({rank: (group, first) for rank, group in behind.items() if rank not in late})
        held_up.update(rank for rank, group in ahead.items() if group.waits is not False)
    if not late:
        return None
    found = tuple(rank for rank in late if rank not in held_up) or tuple(late)
    here, there = late[found[0]]
    return Suspects(
        found, f"at collective {here.begun} while others are at {there.begun}{_of_group(there)}{_op(there)}"
    )


def _of_group(group: GroupPosition) -> str:
    return f" of process group {one_line(group.name, _NAME_CHARACTERS)}"


def _op(group: GroupPosition) -> str:
    return f" ({one_line(group.op)})" if group.op else ""


def _near(ranks: tuple[RankSample, ...], standing: frozenset[int]) -> list[RankSample]:
    """Those who stand, and those no more than a step from them: further apart, nobody waits for anybody.

    But who meets waits for all. A newcomer's steps count from its own start, and say nothing: until its first it is
    taken to be where the others are, if it has come to the group of them all.
    """
    steps = [rank.step or 0 for rank in ranks if rank.rank in standing]
    if any(rank.phase == MEET for rank in ranks if rank.rank in standing):
        return list(ranks)
    latest = max(steps, default=0)
    new = [rank for rank in ranks if latest > 1 and not rank.step and rank.collective is not None]
    ranks = tuple(replace(rank, step=latest) if rank in new else rank for rank in ranks)
    return [rank for rank in ranks if rank.phase == MEET or any(abs((rank.step or 0) - step) <= 1 for step in steps)]


def _places(ranks: list[RankSample]) -> dict[int, tuple[int, int]]:
    """How far each rank is: its step, then its collective if all tell theirs."""
    are_counted = all(rank.collective is not None for rank in ranks)
    return {rank.rank: (rank.step or 0, (rank.collective or 0) if are_counted else 0) for rank in ranks}


def _behind_clause(last: tuple[int, int], first: tuple[int, int]) -> str:
    if first[0] != last[0]:
        return f"still at step {last[0]} while others are at {first[0]}"
    return f"at collective {last[1]} while others are at {first[1]}"


def work(before: RankSample, now: RankSample, elapsed_s: float, policy: PacePolicy, *, least_cpu_s: float = 0.0) -> str:
    """What a rank was doing between two looks, as words that follow "it"; "" if it did nothing that can be seen.

    CPU time of up to ``least_cpu_s`` is nothing.
    """
    if now.person:
        return f"has a person at its {now.person}"
    if now.stopped or elapsed_s <= 0:
        return ""
    if now.cpu_time_s is not None and before.cpu_time_s is not None:
        used_s = now.cpu_time_s - before.cpu_time_s
        share = used_s / elapsed_s
        if share >= policy.busy_cpu_share and used_s > least_cpu_s:
            return f"used {share:.0%} of a core"
    if now.in_io:
        return "waits for a disk or a driver"
    if now.runnable:
        return "waits for a CPU"
    if now.gpu_utilisation is not None and now.gpu_utilisation >= policy.busy_gpu_share:
        return f"used {now.gpu_utilisation:.0%} of its GPU"
    return ""


def hang_kind(ranks: tuple[RankSample, ...], hung: tuple[int, ...], whole_job: bool) -> HangKind:
    """How sure it is that ``hung`` will not go on."""
    if all(rank.stopped for rank in ranks if rank.rank in hung):
        return HangKind.STOPPED
    # A rank outside may be seen as one that waits, because torch's recorder may miss the end of its last collective.
    are_together = len({rank.collective for rank in ranks}) == 1 and len(ranks) > 1
    if whole_job and are_together and all(rank.waiting and not rank.uses_gpu and rank.phase != MEET for rank in ranks):
        return HangKind.DEADLOCKED
    is_meeting = any(rank.phase == MEET for rank in ranks if rank.rank not in hung)
    if is_meeting or any(rank.waiting for rank in ranks):
        return HangKind.AWAITED
    return HangKind.UNCLEAR


def moved_on(before: tuple[RankSample, ...], now: tuple[RankSample, ...], standing: frozenset[int]) -> bool:
    """Whether any of those who stand is known to have begun another collective: that is no step, but it is progress."""
    was = {rank.rank: rank.collective for rank in before}
    return any(
        rank.rank in standing and rank.collective != was.get(rank.rank)
        for rank in now
        if rank.collective is not None and was.get(rank.rank) is not None
    )


def is_blind(ranks: tuple[RankSample, ...]) -> bool:
    """Whether the sample cannot tell who is at work."""
    return any(not rank.stopped and (rank.cpu_time_s is None or rank.runnable is None) for rank in ranks)
