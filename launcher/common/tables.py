"""Tables as text: even columns, texts below rows, and names, which read the same in 60 columns and in a pipe."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence

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


def aligned(
    rows: Sequence[Sequence[str]], width: int | None, flexible: Sequence[int], numbers: Sequence[int] = ()
) -> list[str]:
    """Return rows in even columns: the ``flexible`` ones give way, and the ``numbers`` stand on the right.

    A ``width`` of None cuts nothing, for grep.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    while width is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        widest = max(flexible, key=lambda column: widths[column])
        if widths[widest] <= _NARROWEST_NAME:
            break
        widths[widest] -= 1
    adjust = [str.rjust if column in numbers else str.ljust for column in range(len(widths))]
    lines = [
        _GAP.join(fit(shorten(cell, limit), limit) for fit, cell, limit in zip(adjust, row, widths, strict=True))
        for row in rows
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
