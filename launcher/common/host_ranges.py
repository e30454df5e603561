"""Many names in a few words, as Slurm writes them: gpu-[001-128,130]."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from unicron_elastic.launcher.common.tables import natural, shown_name

_NUMBERED = re.compile(r"^(.*?)([0-9]{1,9})([^0-9]*)$", re.DOTALL)


def host_ranges(hosts: Iterable[str]) -> str:
    """All of them in natural order; one that is there several times is counted."""
    counts = Counter(shown_name(host) for host in hosts)
    series: dict[tuple[str, str, int], list[int]] = {}
    others = []
    for host in sorted(counts, key=natural):
        numbered = _NUMBERED.match(host)
        if numbered is None or counts[host] > 1:
            others.append(f"{host} ({counts[host]})" if counts[host] > 1 else host)
            continue
        before, digits, after = numbered.groups()
        width = len(digits) if digits.startswith("0") or _is_padded(before, after, len(digits), series) else 0
        series.setdefault((before, after, width), []).append(int(digits))
    return ", ".join([*(_named(*kind, numbers) for kind, numbers in series.items()), *others])


def _is_padded(before: str, after: str, width: int, series: dict[tuple[str, str, int], list[int]]) -> bool:
    """Whether names with zeros before them, such as gpu-09, go on with this one."""
    return (before, after, width) in series


def _named(before: str, after: str, width: int, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{before}{numbers[0]:0{width}d}{after}"
    return f"{before}[{','.join(_runs(numbers, width))}]{after}"


def _runs(numbers: list[int], width: int) -> Iterator[str]:
    """Find the runs of numbers in their order."""
    first = last = numbers[0]
    for number in [*numbers[1:], None]:
        if number == last + 1:
            last = number
            continue
        yield f"{first:0{width}d}" if first == last else f"{first:0{width}d}-{last:0{width}d}"
        if number is not None:
            first = last = number
