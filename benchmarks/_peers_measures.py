"""From a job's log of events to what the comparison of peers says of one fault: pure.

A place is where a process works, its node and local rank; who comes after it has the same one. A step belongs to a new
epoch if its process, its generation or its world differs from those before the fault.
"""

from __future__ import annotations

from collections.abc import Sequence

from _recovery_events import Event, Kill, repeated_micro_batches


def measures(events: Sequence[Event], kill: Kill, ranks: int) -> dict[str, float]:
    """All that can be said so far of a fault; what has not come about has no entry.

    ``resumed_ms``: every place but the struck one's has finished a step in a new epoch. ``caught_up_ms``: it has
    finished a step there that nobody had finished in the old one. ``whole_ms``: a step in a world of ``ranks`` again.
    ``repeated_micro_batches``: how many were begun that had been begun before. ``steps_lost``: how many steps that
    all of them had finished were gone through again.
    """
    steps = [event for event in events if event.kind == "step"]
    before, after = ([each for each in steps if (each.at_ns < kill.at_ns) is is_before] for is_before in (True, False))
    others = {event.slot for event in before} - {kill.slot}
    old = {(event.slot, event.epoch) for event in before}
    new = [event for event in after if (event.slot, event.epoch) not in old]
    # A step of the old world may still end after the fault, if the struck process had given its part before.
    newest = max((event.step for event in steps if (event.slot, event.epoch) in old), default=0)
    moments = {
        "resumed_ms": _all_have(new, others),
        "caught_up_ms": _all_have([event for event in new if event.step > newest], others),
        "whole_ms": _all_have([event for event in new if event.epoch.world >= ranks], others),
    }
    found = {name: (at - kill.at_ns) / 1e6 for name, at in moments.items() if at is not None}
    found["repeated_micro_batches"] = repeated_micro_batches(events)
    if "resumed_ms" in found:
        made = [{event.step for event in before if event.slot == slot} for slot in others]
        found["steps_lost"] = len(set.intersection(*made) & {event.step for event in after if event.slot in others})
    return found


def _all_have(events: Sequence[Event], slots: set[int]) -> int | None:
    """When the last of ``slots`` had its first of these events; None if one of them has none."""
    first: dict[int, int] = {}
    for event in events:
        first.setdefault(event.slot, event.at_ns)
    return max(first[slot] for slot in slots) if slots and slots <= first.keys() else None
