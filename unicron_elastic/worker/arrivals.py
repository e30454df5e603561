"""When this worker began its latest collectives, from torch's flight recorder, for the agent that asks.

To read the recorder takes the interpreter for some milliseconds (5 of 2,000 entries), so it is asked for only when
there is a reason: steps take longer and nothing cheaper tells why, or a rank is a step ahead of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from unicron_elastic.compat.loaded import (
    default_group,
)
from unicron_elastic.worker.collectives.recorder import collectives
from unicron_elastic.worker.notices import LatestCollectives

LATEST = 2000  # collectives that are told of: as many as torch records


def arrivals() -> LatestCollectives:
    """Return when this worker began its latest collectives in the group of the whole job. Raises what torch raises."""
    group = default_group()
    if group is None:
        return LatestCollectives()
    runs = [_latest_run(_begun(entries, str(group.group_name))) for entries in collectives()]
    found = max(runs, key=len, default=[])  # of the back end that does the work
    if not found:
        return LatestCollectives()
    times, names = [at for _, at, _ in found], [name for _, _, name in found]
    ops = sorted(set(names))
    return LatestCollectives(
        first=found[0][0],
        at_us=(times[0], *(at - times[0] for at in times[1:])),
        ops=tuple(ops),
        op=() if len(ops) == 1 else tuple(ops.index(name) for name in names),
    )


def _begun(entries: Sequence[Mapping[str, Any]], group: str) -> list[tuple[int, int, str]]:
    """(number, microseconds, operation) of each collective of ``group``; of one with several operations, the first.

    Of groups with the same name, one of which was destroyed before the next was made, the latest is meant.
    """
    of_group = [entry for entry in entries if entry["process_group"][0] == group and not entry["is_p2p"]]
    found: dict[int, tuple[int, str]] = {}
    for entry in of_group:
        if entry["pg_id"] == of_group[-1]["pg_id"]:
            name = str(entry.get("profiling_name", "")).rpartition(":")[2]  # "gloo:all_reduce"
            found.setdefault(int(entry["collective_seq_id"]), (int(entry["time_created_ns"]) // 1000, name))
    return sorted((number, at_us, name) for number, (at_us, name) in found.items())


def _latest_run(begun: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """The latest of them without a gap in their numbers."""
    start = len(begun)
    while (
        start > 0
        and len(begun) - start < LATEST
        and (start == len(begun) or begun[start - 1][0] + 1 == begun[start][0])
    ):
        start -= 1
    return begun[start:]
