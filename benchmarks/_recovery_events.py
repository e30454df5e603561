"""From a job's log of events to the numbers of the benchmark of recovery: pure, no clock and no file.

``workers/recovery_common.py`` writes the log and says what a line is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

STEPS_AFTER = 5  # of the whole world, so that a stand-still just after the joining is seen
STEPS_IN_SMALLER_WORLD = 3  # fewer say nothing of its usual step
STEPS_BEFORE = 8  # whose median is the job's undisturbed step


class Epoch(NamedTuple):
    """Which process of a place stepped, and in which world; a fault changes it for every process."""

    pid: int
    generation: int
    world: int


@dataclass(frozen=True)
class Event:
    """One line of the log; ``at_ns`` is of CLOCK_MONOTONIC."""

    at_ns: int
    slot: int
    kind: str
    step: int
    index: int
    epoch: Epoch


@dataclass(frozen=True)
class Kill:
    """What was done to the job: which place lost its process, and when."""

    at_ns: int
    slot: int


def parse(text: str) -> list[Event]:
    """The events of a log, in the order of their time; a last line that is still being written is left out.

    Raises ValueError for a line that is not of the log's form.
    """
    whole, _, _ = text.rpartition("\n")
    return sorted((_event(line) for line in whole.splitlines()), key=lambda event: event.at_ns)


def steps_of(events: Iterable[Event], slot: int) -> list[Event]:
    """The finished steps of the processes in ``slot``, in order."""
    return [event for event in events if event.kind == "step" and event.slot == slot]


def step_ms(steps: Sequence[Event], last: int | None = None) -> float | None:
    """The median time between the ``last`` steps (all of them by default) of one place; None if there are too few."""
    moments = [event.at_ns for event in (steps if last is None else steps[-last - 1 :])]
    return median(end - start for start, end in pairwise(moments)) / 1e6 if len(moments) > 1 else None


def resumed_ns(events: Sequence[Event], kill: Kill, slots: int) -> int | None:
    """When every other place had finished a step of a new epoch; None if it has not.

    A step of the old epoch may end after the kill, if the dead process had given its part before: that is no recovery.
    """
    return _last_first(events, kill, [slot for slot in range(slots) if slot != kill.slot], None)


def whole_ns(events: Sequence[Event], kill: Kill, slots: int) -> int | None:
    """When every place had finished a step of a new epoch in a world of all of them; None if it has not."""
    return _last_first(events, kill, list(range(slots)), slots)


def caught_up_ns(events: Sequence[Event], kill: Kill, slots: int) -> int | None:
    """When every other place had finished the first step that nobody had finished at the kill; None if it has not."""
    target = _newest_before(events, kill) + 1
    found = []
    for slot in range(slots):
        if slot != kill.slot:
            moments = [event.at_ns for event in steps_of(events, slot) if event.step >= target]
            if not moments:
                return None
            found.append(min(moments))
    return max(found)


def is_over(events: Sequence[Event], kill: Kill, slots: int, replaces: bool) -> bool:
    """Whether everything has been seen: the whole world (or, if nobody is replaced, the others) some steps later."""
    since = whole_ns(events, kill, slots) if replaces else resumed_ns(events, kill, slots)
    caught_up = caught_up_ns(events, kill, slots)
    if since is None or caught_up is None:
        return False
    others = [slot for slot in range(slots) if slot != kill.slot]
    later = [sum(event.at_ns > max(since, caught_up) for event in steps_of(events, slot)) for slot in others]
    return min(later) >= STEPS_AFTER


def measures(events: Sequence[Event], kill: Kill, slots: int) -> dict[str, float]:
    """All that can be said of one kill, by name; what did not come about has no entry."""
    moments = {
        "resumed_ms": resumed_ns(events, kill, slots),
        "caught_up_ms": caught_up_ns(events, kill, slots),
        "whole_ms": whole_ns(events, kill, slots),
    }
    found = {name: (moment - kill.at_ns) / 1e6 for name, moment in moments.items() if moment is not None}
    found["repeated_micro_batches"] = repeated_micro_batches(events)
    usual = step_ms([event for event in steps_of(events, kill.slot) if event.at_ns < kill.at_ns], STEPS_BEFORE)
    if usual is not None:
        found["step_ms"] = usual
    if moments["resumed_ms"] is not None:
        found["steps_lost"] = steps_lost(events, kill, slots)
        if moments["whole_ms"] is not None and usual is not None:
            found["join_ms"] = join_ms(events, kill, slots, usual)
    return found


def join_ms(events: Sequence[Event], kill: Kill, slots: int, usual_ms: float) -> float:
    """By how much the longest step of a survivor after it had resumed was longer than a step without a joining.

    That is the median step of the smaller world, for its ranks have more to do each; or, if that world made too few
    steps, ``usual_ms``, the step before the fault.
    """
    resumed_at, whole_at = resumed_ns(events, kill, slots), whole_ns(events, kill, slots)
    assert resumed_at is not None
    assert whole_at is not None
    other = next(slot for slot in range(slots) if slot != kill.slot)
    smaller = [event for event in steps_of(events, other) if resumed_at <= event.at_ns < whole_at]
    without = step_ms(smaller) if len(smaller) > STEPS_IN_SMALLER_WORLD else None
    longest = longest_gap_ns(events, kill, slots, resumed_at) / 1e6
    return max(0.0, longest - (without if without is not None else usual_ms))


def repeated_micro_batches(events: Iterable[Event]) -> int:
    """How many gradients of micro-batches were computed that had been computed before."""
    times = Counter((event.step, event.index) for event in events if event.kind == "micro")
    return sum(times.values()) - len(times)


def steps_lost(events: Sequence[Event], kill: Kill, slots: int) -> int:
    """How many steps that every other place had finished at the kill were gone through again."""
    others = [slot for slot in range(slots) if slot != kill.slot]
    before = [{event.step for event in steps_of(events, slot) if event.at_ns < kill.at_ns} for slot in others]
    again = {event.step for slot in others for event in steps_of(events, slot) if event.at_ns >= kill.at_ns}
    return len(set.intersection(*before) & again)


def longest_gap_ns(events: Sequence[Event], kill: Kill, slots: int, since_ns: int) -> int:
    """The longest time between two steps of one surviving place from ``since_ns`` on; 0 if there were no two."""
    gaps = [0]
    for slot in range(slots):
        if slot != kill.slot:
            moments = [event.at_ns for event in steps_of(events, slot) if event.at_ns >= since_ns]
            gaps += [end - start for start, end in pairwise(moments)]
    return max(gaps)


def _event(line: str) -> Event:
    words = line.split()
    if len(words) != 8:
        raise ValueError(f"a line of the log of events has 8 words, not {len(words)}: {line!r}")
    at_ns, pid, slot = map(int, words[:3])
    step, index, generation, world = map(int, words[4:])
    return Event(at_ns, slot, words[3], step, index, Epoch(pid, generation, world))


def _newest_before(events: Iterable[Event], kill: Kill) -> int:
    return max((event.step for event in events if event.kind == "step" and event.at_ns < kill.at_ns), default=0)


def _last_first(events: Sequence[Event], kill: Kill, slots: Sequence[int], world: int | None) -> int | None:
    """The moment of the last of the places to finish its first step of a new epoch (and of that world size)."""
    old: dict[int, set[Epoch]] = defaultdict(set)
    first: dict[int, int] = {}
    for event in events:
        if event.kind != "step":
            continue
        if event.at_ns < kill.at_ns:
            old[event.slot].add(event.epoch)
        elif event.epoch not in old[event.slot] and world in (None, event.epoch.world):
            first.setdefault(event.slot, event.at_ns)
    return max(first[slot] for slot in slots) if all(slot in first for slot in slots) else None
