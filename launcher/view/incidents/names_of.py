"""What the incidents of a run are called, so that each can be asked for: nodes count their own, and runs come again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from unicron_elastic.base.incident import Incident


def names_of(incidents: Sequence[Incident]) -> list[str]:
    """Return the names of one run's incidents, which are given from the oldest on: "3", "3@b", "3#2" or "3@b#2".

    The host is named where several have that number, and which of them it is where there are more on one host: of
    two agents there, or of two jobs with this run ID.
    """
    hosts_of = defaultdict[int, set[str]](set)
    for each in incidents:
        hosts_of[each.number].add(each.host)
    many = Counter((each.number, each.host) for each in incidents)
    seen = Counter[tuple[int, str]]()
    names = []
    for each in incidents:
        key = (each.number, each.host)
        seen[key] += 1
        host = f"@{each.host}" if len(hosts_of[each.number]) > 1 else ""
        names.append(f"{each.number}{host}{f'#{seen[key]}' if many[key] > 1 else ''}")
    return names
