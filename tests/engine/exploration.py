"""Breadth-first over all interleavings: each state once, the shortest path to what is wrong, whether all can end."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Any

from interleavings import Bounds, Broken, Decide, Job, Move, Process, begin, steps

from unicron_elastic.base.world import World
from unicron_elastic.engine.protocol.handle import handle
from unicron_elastic.engine.protocol.replica_phase import Handing, InMeeting, Moving


@dataclass
class Found:
    """`Found` is what an exploration saw. ``wrong``: what does not hold, behind the ``path``; "": nothing."""

    states: int = 0
    steps: int = 0
    ends: int = 0
    depth: int = 0
    seconds: float = 0.0
    is_whole: bool = True
    wrong: str = ""
    path: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        whole = "all" if self.is_whole else "the first"
        seen = f"{whole} {self.states} states, {self.steps} steps, {self.ends} ends, {self.depth} deep"
        return f"{seen}, {self.seconds:.1f} s" + (
            f"\nwrong: {self.wrong}\n" + "\n".join(self.path) if self.wrong else ""
        )


def explore(bounds: Bounds, decide: Decide = handle, most_states: int = 10_000_000) -> Found:
    """Explore all, or until something is wrong."""
    found, since = Found(), time.process_time()
    first = begin(bounds)
    numbers = {key_of(first): 0}
    came_from: list[tuple[int, str]] = [(-1, "")]
    sources, targets = array("l"), array("l")  # of the steps that are no faults
    good: list[int] = []
    level: list[tuple[int, Job]] = [(0, first)]

    def is_wrong(number: int, last: str, why: str) -> Found:
        labels = [last] if last else []
        while number > 0:
            number, label = came_from[number]
            labels.append(label)
        found.wrong, found.path = why, scenario(bounds, labels[::-1], decide)
        found.states, found.seconds = len(numbers), time.process_time() - since
        return found

    while level:
        found.depth += 1
        following: list[tuple[int, Job]] = []
        for number, job in level:
            if is_end(job):
                if why := why_wrong_at_end(bounds, job):
                    return is_wrong(number, "", why)
                good.append(number)
                continue
            try:
                choices = list(steps(bounds, job))
            except Broken as error:
                return is_wrong(number, "", str(error))
            for label, is_fault, do in choices:
                move = Move(bounds, job, decide)
                try:
                    do(move)
                except (Broken, RuntimeError) as error:
                    return is_wrong(number, label, str(error))
                after = move.done()
                key = key_of(after)
                there = numbers.get(key)
                if there is None:
                    there = numbers[key] = len(numbers)
                    came_from.append((number, label))
                    following.append((there, after))
                found.steps += 1
                if not is_fault:
                    sources.append(number)
                    targets.append(there)
            if len(numbers) > most_states:
                found.is_whole = False
                break
        level = following if found.is_whole else []
    found.states, found.ends = len(numbers), len(good)
    if found.is_whole and (stuck := _who_never_ends(len(numbers), sources, targets, good)) is not None:
        return is_wrong(stuck, "", "from here on no job comes to its end without one more fault")
    found.seconds = time.process_time() - since
    return found


def _who_never_ends(count: int, sources: Any, targets: Any, good: list[int]) -> int | None:
    """Return the first state from which no end is reached without faults."""
    before: list[list[int]] = [[] for _ in range(count)]
    for source, target in zip(sources, targets, strict=True):
        before[target].append(source)
    ends = bytearray(count)
    todo = list(good)
    for number in todo:
        ends[number] = 1
    while todo:
        for number in before[todo.pop()]:
            if not ends[number]:
                ends[number] = 1
                todo.append(number)
    return next((number for number in range(count) if not ends[number]), None)


def is_end(job: Job) -> bool:
    """Whether all scripts have ended."""
    return all(each.has_exited for each in job.processes)


def why_wrong_at_end(bounds: Bounds, job: Job) -> str:
    """All have made all steps."""
    if not job.processes:
        return ""  # the last who had the state has missed a step of one that was lost then: all begin again
    total = bounds.totals[-1]
    wrong = [each.name for each in job.processes if each.params != total or each.replica.step != total]
    return f"{', '.join(wrong)} ended with other than {total} steps" if wrong else ""


def scenario(bounds: Bounds, labels: list[str], decide: Decide = handle) -> list[str]:
    """Write a path so that it can be read: each step, and what replicas are told and do."""
    job, lines = begin(bounds), []
    for number, label in enumerate(labels, 1):
        lines.append(f"{number}. {label}")
        do = next(do for each, _, do in steps(bounds, job) if each == label)
        move = Move(bounds, job, decide, lines)
        try:
            do(move)
        except (Broken, RuntimeError) as error:
            lines.append(f"    {error}")
            break
        job = move.done()
    return lines


def key_of(job: Job) -> int:
    """Return a number that is the same for states which differ in nothing that matters."""
    used = {job.newest.number, job.newest.anew, job.newest.parted.world}
    for each in job.processes:
        replica = each.replica
        for world in (replica.heard, replica.met):
            if world is not None:
                used |= {world.number, world.anew, world.parted.world}
        used |= {each.parted_in.world, _parts_in(replica.record), each.round[0]}
    for there in job.worlds:
        used |= {there.world.number, there.world.anew, there.world.parted.world}
    order = sorted(used)
    names = {each.name: at for at, each in enumerate(job.processes)}

    known: dict[int, Any] = {id(None): None}  # of worlds: most are known to several processes

    def world_key(world: World | None) -> Any:
        if id(world) not in known:
            assert world is not None
            known[id(world)] = key_of_world(world)
        return known[id(world)]

    def key_of_world(world: World) -> Any:
        members = tuple(names.get(each.name, -1) for each in world.members)
        marks = (world.number, world.anew, world.parted.world)
        return (*(bisect_left(order, each) for each in marks), world.parted.total, world.over > 0, members)

    def process_key(process: Process) -> Any:
        replica = process.replica
        copy = process.copy
        return (
            _record_key(replica.record, order),
            (replica.until, replica.step, replica.work, replica.heard_rank, replica.rank, replica.is_connected),
            (replica.holders, world_key(replica.heard), world_key(replica.met)),
            (process.local, process.sums, process.params, process.calls, process.counts, process.is_over),
            None if process.pending is None else _pending_key(process.pending, order),
            (bisect_left(order, process.round[0]), process.round[1]),
            (bisect_left(order, process.parted_in.world), process.parted_in.total),
            None if copy is None else (names.get(copy[0], -1), *copy[1:]),
            (process.has_exited, process.asked, process.mean, process.means, process.is_offered),
            (process.is_wrong, process.refuses, process.trains_other, process.early, process.must_repeat),
        )

    worlds = tuple((world_key(each.world), each.rounds, each.slots, each.is_broken) for each in job.worlds)
    rest = (job.losses, job.breaks, job.newcomers, job.flips, job.refusals, job.additions, job.has_ended)
    return hash((tuple(map(process_key, job.processes)), worlds, world_key(job.newest), rest))


def _parts_in(record: Any) -> int:
    return int(getattr(getattr(record, "meeting", record), "parts_in", 0))


def _record_key(record: Any, order: list[int]) -> Any:
    if isinstance(record, Handing | Moving):
        return type(record), replace(record, meeting=_relative(record.meeting, order))
    return type(record), _relative(record, order) if isinstance(record, InMeeting) else record


def _relative(meeting: InMeeting, order: list[int]) -> InMeeting:
    return replace(meeting, parts_in=bisect_left(order, meeting.parts_in)) if meeting.parts_in else meeting


def _pending_key(pending: Any, order: list[int]) -> Any:
    if not pending.keys:
        return pending.kind
    return pending.kind, bisect_left(order, pending.keys[0]), pending.keys[1:], pending.seats
