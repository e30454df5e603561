"""Tables as text: even columns, texts below rows, and names, which read the same in 60 columns and in a pipe."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from unicron_elastic.base.text import one_line, shorten

_GAP = "  "
_INDENT = "     "
_NARROWEST = 40  # columns; below it nothing is wrapped further
_NARROWEST_NAME = 8
_HOSTS_MOST = 16  # that are named on a terminal


def shown_name(text: str) -> str:
    """On one line; - for none."""
    return one_line(text) or "-"


def listed(hosts: Sequence[str], width: int | None) -> str:
    """Hosts by name, not more than a terminal has room for."""
    counted = [
        f"{shown_name(host)} ({count})" if count > 1 else shown_name(host) for host, count in Counter(hosts).items()
    ]
    shown = counted if width is None else counted[:_HOSTS_MOST]
    more = f" and {len(counted) - len(shown)} more" if len(shown) < len(counted) else ""
    return ", ".join(shown) + more


def aligned(rows: Sequence[Sequence[str]], width: int | None, flexible: Sequence[int]) -> list[str]:
    """Rows in even columns, of which the ``flexible`` ones give way."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    while width is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        widest = max(flexible, key=lambda column: widths[column])
        if widths[widest] <= _NARROWEST_NAME:
            break
        widths[widest] -= 1
    lines = [
        _GAP.join(shorten(cell, limit).ljust(limit) for cell, limit in zip(row, widths, strict=True)) for row in rows
    ]
    return [(line if width is None else shorten(line, width)).rstrip() for line in lines]


def wrapped(text: str, width: int | None, indent: str = _INDENT) -> list[str]:
    """Lines below a row; none for no text."""
    if not text:
        return []
    if width is None:
        return [indent + text]
    return textwrap.wrap(text, max(width, _NARROWEST), initial_indent=indent, subsequent_indent=indent)


def natural(name: str) -> list[tuple[int, str]]:
    """So that gpu-10 comes after gpu-9."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() and part.isascii() else (-1, part) for part in parts]


# Many names in a few words, as Slurm writes them: gpu-[001-128,130]. Pure.


_NUMBERED = re.compile(r"^(.*?)([0-9]{1,9})([^0-9]*)$", re.DOTALL)


def ranges(hosts: Iterable[str]) -> str:
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
