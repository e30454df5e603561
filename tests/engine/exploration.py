"""Breadth-first over all interleavings: each state once, the shortest path to what is wrong, whether all can end."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import interleavings
from interleavings import Broken, Decide, is_end

from unicron_elastic.engine.protocol.handle import handle


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


def explore(
    bounds: Any, decide: Decide = handle, most_states: int = 10_000_000, model: ModuleType = interleavings
) -> Found:
    """Explore all of a ``model``, or until something is wrong."""
    found, since = Found(), time.process_time()
    first = model.begin(bounds)
    key_of = model.key_of
    numbers = {key_of(first): 0}
    came_from: list[tuple[int, str]] = [(-1, "")]
    sources, targets = array("l"), array("l")  # of the steps that are no faults
    good: list[int] = []
    level: list[tuple[int, Any]] = [(0, first)]

    def is_wrong(number: int, last: str, why: str) -> Found:
        labels = [last] if last else []
        while number > 0:
            number, label = came_from[number]
            labels.append(label)
        found.wrong, found.path = why, scenario(bounds, labels[::-1], decide, model)
        found.states, found.seconds = len(numbers), time.process_time() - since
        return found

    while level:
        found.depth += 1
        following: list[tuple[int, Any]] = []
        for number, job in level:
            if is_end(job):
                if why := model.why_wrong_at_end(bounds, job):
                    return is_wrong(number, "", why)
                good.append(number)
                continue
            try:
                choices = list(model.steps(bounds, job))
            except Broken as error:
                return is_wrong(number, "", str(error))
            for label, is_fault, do in choices:
                move = model.Move(bounds, job, decide)
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


def scenario(bounds: Any, labels: list[str], decide: Decide = handle, model: ModuleType = interleavings) -> list[str]:
    """Write a path so that it can be read: each step, and what replicas are told and do."""
    lines: list[str] = []
    job = model.begin(bounds)
    for number, label in enumerate(labels, 1):
        lines.append(f"{number}. {label}")
        do = next(do for each, _, do in model.steps(bounds, job) if each == label)
        move = model.Move(bounds, job, decide, lines)
        try:
            do(move)
        except (Broken, RuntimeError) as error:
            lines.append(f"    {error}")
            break
        job = move.done()
    return lines
