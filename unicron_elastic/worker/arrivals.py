"""When this worker began its latest collectives, from torch's flight recorder, for the agent that asks.

To read the recorder takes the interpreter for some milliseconds (5 of 2,000 entries), so it is asked for only when the
job has become slow and nothing cheaper tells by whom.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from unicron_elastic.worker import recorder
from unicron_elastic.worker.channel import Message

__all__ = ["arrivals"]

LATEST = 2000  # collectives that are told of: as many as torch records


def arrivals() -> Message | None:
    """The number of the first collective told of, in the group of the whole job, and the times of it and the next ones.

    Times are microseconds of CLOCK_REALTIME, which all workers of a host share; the first is absolute, the others count
    from it. None if nothing is recorded. Raises what torch raises.
    """
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    group = None if distributed is None else distributed._world.default_pg
    if group is None:
        return None
    runs = [_latest_run(_begun(entries, str(group.group_name))) for entries in recorder.collectives()]
    found = max(runs, key=len, default=[])  # of the back end that does the work
    if not found:
        return None
    first, times = found[0][0], [at for _, at in found]
    return {"first": first, "at_us": [times[0], *(at - times[0] for at in times[1:])]}


def _begun(entries: Sequence[Mapping[str, Any]], group: str) -> list[tuple[int, int]]:
    """(number, microseconds) of each collective of ``group``; of one with several operations, the first.

    Of groups with the same name, one of which was destroyed before the next was made, the latest is meant.
    """
    of_group = [entry for entry in entries if entry["process_group"][0] == group and not entry["is_p2p"]]
    found: dict[int, int] = {}
    for entry in of_group:
        if entry["pg_id"] == of_group[-1]["pg_id"]:
            found.setdefault(int(entry["collective_seq_id"]), int(entry["time_created_ns"]) // 1000)
    return sorted(found.items())


def _latest_run(begun: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The latest of them without a gap in their numbers."""
    start = len(begun)
    while (
        start > 0
        and len(begun) - start < LATEST
        and (start == len(begun) or begun[start - 1][0] + 1 == begun[start][0])
    ):
        start -= 1
    return begun[start:]
