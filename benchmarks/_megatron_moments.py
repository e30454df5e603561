"""From the log of events of a Megatron-Core job to what one fault cost: pure, no clock and no file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from _megatron_jobs import Split
from _recovery_events import Event, step_ms, steps_of

STEPS_BEFORE = 8  # whose median is the step before the fault

# The parts of a recovery in place, in their order: each ends when the last survivor has come to it.
PARTS = {
    "heard": "fault -> survivors know",
    "met": "passes under way end, all meet",
    "connected": "process groups",
    "agreed": "state and buckets even",
    "computed": "lost micro-batches",
    "reduced": "reduction, commit",
    "step": "optimizer step",
}
RESTART_PARTS = {"start": "fault -> scripts begin", "loaded": "imports, model, load", "step": "first step"}


@dataclass(frozen=True)
class Fault:
    """One strike: who died, in which step (the first is 1), and when, in nanoseconds of CLOCK_MONOTONIC."""

    slot: int
    step: int
    at_ns: int


def faults(events: Iterable[Event]) -> list[Fault]:
    """All strikes of a job."""
    return [Fault(event.slot, event.step, event.at_ns) for event in events if event.kind == "strike"]


def made_again(events: Sequence[Event], fault: Fault, split: Split) -> dict[int, Event] | None:
    """Of each surviving place its first step after the fault; None until all have one.

    Of a process that lives on it is the step that the fault interrupted; of one that was begun anew, any.
    """
    old = _pids_before(events, fault)
    found: dict[int, Event] = {}
    for slot in split.survivors_of(fault.slot):
        for event in _steps_after(events, fault, slot):
            if event.step >= fault.step or event.epoch.pid not in old:
                found[slot] = event
                break
        else:
            return None
    return found


def caught_up_ns(events: Sequence[Event], fault: Fault, split: Split) -> int | None:
    """When all surviving places have made the step that the fault interrupted."""
    found = []
    for slot in split.survivors_of(fault.slot):
        moments = [event.at_ns for event in _steps_after(events, fault, slot) if event.step >= fault.step]
        if not moments:
            return None
        found.append(moments[0])
    return max(found)


def replaced_ns(events: Sequence[Event], fault: Fault, split: Split) -> int | None:
    """When the place of the lost process has made a step again, in a world of all."""
    old = _pids_before(events, fault)
    for event in _steps_after(events, fault, fault.slot):
        if event.epoch.pid not in old and event.epoch.world == split.ranks:
            return event.at_ns
    return None


def is_whole(events: Sequence[Event], fault: Fault | None, split: Split, steps: int) -> bool:
    """Whether all places have made so many steps in a world of all, since the fault's replacement if there was one."""
    since = 0
    if fault is not None:
        replaced, caught_up = replaced_ns(events, fault, split), caught_up_ns(events, fault, split)
        if replaced is None or caught_up is None:
            return False
        since = max(replaced, caught_up)
    return all(
        sum(each.at_ns > since and each.epoch.world == split.ranks for each in steps_of(events, slot)) >= steps
        for slot in range(split.ranks)
    )


def measures(events: Sequence[Event], fault: Fault, split: Split) -> dict[str, float]:
    """What one fault cost, by name; what did not come about has no entry."""
    found: dict[str, float] = {}
    made = made_again(events, fault, split)
    moments = {
        "resumed_ms": None if made is None else max(event.at_ns for event in made.values()),
        "caught_up_ms": caught_up_ns(events, fault, split),
        "replaced_ms": replaced_ns(events, fault, split),
    }
    found |= {name: (moment - fault.at_ns) / 1e6 for name, moment in moments.items() if moment is not None}
    survivor = split.survivors_of(fault.slot)[0]
    before = [event for event in steps_of(events, survivor) if event.at_ns < fault.at_ns]
    usual = step_ms(before, STEPS_BEFORE)
    if usual is not None:
        found["step_ms"] = usual
    if moments["caught_up_ms"] is not None:
        found["again"] = begun_again(events, fault, split, moments["caught_up_ms"])
    if made is not None:
        found |= _parts(events, fault, made)
    return found


def begun_again(events: Sequence[Event], fault: Fault, split: Split, until_ns: int) -> int:
    """How many micro-batches were begun that had been begun before, from the fault until the survivors caught up."""
    begun = [event for event in events if event.kind == "micro" and split.counts(event.slot)]
    times = Counter((event.step, event.index) for event in begun if event.at_ns < fault.at_ns)
    later = [(event.step, event.index) for event in begun if fault.at_ns <= event.at_ns <= until_ns]
    again = 0
    for each in later:
        again += times[each] > 0
        times[each] += 1
    return again


def _parts(events: Sequence[Event], fault: Fault, made: dict[int, Event]) -> dict[str, float]:
    """How long each part took; between the moments at which the last survivor had come to its end."""
    lives_on = all(event.epoch.pid in _pids_before(events, fault) for event in made.values())
    ends = {"": fault.at_ns}
    for kind in PARTS if lives_on else RESTART_PARTS:
        moments = []
        for slot, step in made.items():
            own = [e.at_ns for e in events if e.slot == slot and e.kind == kind and fault.at_ns < e.at_ns <= step.at_ns]
            if own:
                moments.append(own[0] if kind in ("heard", "met", "start") else own[-1])
        ends[kind] = max(moments, default=max(ends.values()))
    return {f"part_{kind}_ms": max(0.0, (end - begin) / 1e6) for (_, begin), (kind, end) in pairwise(ends.items())}


def median_ms(events: Sequence[Event], slot: int, begin_ns: int, end_ns: int) -> tuple[float, int] | None:
    """The median step of a place between two moments, and of how many; None if there are too few."""
    moments = [event.at_ns for event in steps_of(events, slot) if begin_ns <= event.at_ns <= end_ns]
    if len(moments) < 3:
        return None
    return median(end - start for start, end in pairwise(moments)) / 1e6, len(moments) - 1


def _steps_after(events: Iterable[Event], fault: Fault, slot: int) -> list[Event]:
    return [event for event in steps_of(events, slot) if event.at_ns > fault.at_ns]


def _pids_before(events: Iterable[Event], fault: Fault) -> set[int]:
    return {event.epoch.pid for event in events if event.at_ns <= fault.at_ns}
