"""torch's flight recorders, which count and date collectives: one for gloo, and one for NCCL where torch has CUDA.

Each numbers the process groups that *this process* is a member of, as they are made: a number means other groups on
other ranks, and is another after a group was destroyed and made anew. The groups' names, which are the same everywhere,
are told only together with the recorded collectives, which takes milliseconds. So which number is whose is learned
seldom. A group with two back ends is in both recorders, and its collectives are the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unicron_elastic.compat.loaded import (
    recorded,
    recorded_status,
    recorders,
)
from unicron_elastic.worker.collectives.broken import groups_made


class _Numbers:
    """Of the groups, by recorder and name, and how many groups had been made when they were learned."""

    def __init__(self) -> None:
        self.of: dict[tuple[str, str], str] = {}
        self.learned_at: int | None = None


_numbers = _Numbers()


def counts(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Collectives begun and ended in each of the groups, as far as that is known. Raises what torch raises.

    Takes 30 microseconds.
    """
    status = {recorder: recorded_status(recorder) for recorder in recorders()}
    used = [(recorder, number) for recorder, groups in status.items() for number in groups]
    if len(names) == 1 and len(used) == 1:  # needs no learning
        recorder, number = used[0]
        return {names[0]: _begun_and_ended(status[recorder][number])}
    if needs_to_learn():
        return {}
    found: dict[str, tuple[int, int]] = {}
    for (recorder, name), number in _numbers.of.items():
        if name in names and number in status.get(recorder, {}):
            begun, ended = _begun_and_ended(status[recorder][number])
            before = found.get(name, (0, 0))
            found[name] = before[0] + begun, before[1] + ended
    return found


def needs_to_learn() -> bool:
    """Whether groups were made since their numbers were learned."""
    return _numbers.learned_at != groups_made()


def learn() -> None:
    """Learns the numbers of all groups in which a collective is on record. Raises what torch raises."""
    made = groups_made()
    for recorder in recorders():
        for entry in recorded(recorder):  # the latest of a name counts
            _numbers.of[recorder, str(entry["process_group"][0])] = str(entry["pg_id"])
    _numbers.learned_at = made


def collectives() -> list[Sequence[dict[str, Any]]]:
    """What each recorder has of each collective, the oldest first. Takes 5 ms for 2,000. Raises what torch raises."""
    return [recorded(recorder) for recorder in recorders()]


def _begun_and_ended(status: dict[str, Any]) -> tuple[int, int]:
    """The recorder says -1 of what it has not seen."""
    return max(int(status["last_enqueued_collective"]), 0), max(int(status["last_completed_collective"]), 0)
