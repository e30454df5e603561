"""Sections of text that share the rows of a terminal: what does not fit is counted. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, and items of one or more lines each, the most important first.

    For counting what is hidden: ``of``, what an item is, and ``counts``, of how many it is; none: each is of one.
    """

    heading: tuple[Text, ...] = ()
    items: tuple[tuple[Text, ...], ...] = ()
    of: str = ""
    counts: tuple[int, ...] = ()

    def lines(self, shown: Shown) -> list[Text]:
        """Return the section with so many of its items, and the rest counted."""
        whole, brief = self.items[: shown.whole], self.items[shown.whole : shown.items]
        found = [*self.heading, *(line for item in whole for line in item), *(item[0] for item in brief)]
        if shown.items < len(self.items):
            hidden = sum(self.counts[shown.items :]) if self.counts else len(self.items) - shown.items
            found.append(Text(f"  and {hidden:,} more {self.of}{'s' if hidden != 1 else ''}", "dim"))
        return found


@dataclass(frozen=True, slots=True)
class Shown:
    """How much of a section: so many items as a ``whole``, and one more by its first line, if it ``is_cut``."""

    whole: int = 0
    is_cut: bool = False

    @property
    def items(self) -> int:
        """Return the items of which anything is shown."""
        return self.whole + self.is_cut


def fitted(sections: Sequence[Section], rows: int | None) -> list[Text]:
    """The sections below each other, with an empty line between two; None: there is room for all of it.

    Where there is not, there are no empty lines; every section has its heading and its count, and then they get items
    by turns, the first section first. Of one that is too long, the first line.
    """
    sections = [section for section in sections if section.items or section.heading]
    whole = _joined(sections, [Shown(len(section.items)) for section in sections], gap=True)
    if rows is None or len(whole) <= rows:
        return whole
    return _joined(sections, _grown(sections, rows), gap=False)[: max(0, rows)]


def _grown(sections: Sequence[Section], rows: int) -> list[Shown]:
    """How many items of each section fit into ``rows``."""
    shown = [Shown() for _ in sections]
    left = rows - len(_joined(sections, shown, gap=False))
    growing = [place for place, section in enumerate(sections) if section.items]
    while growing:
        for place in list(growing):
            section, count = sections[place], shown[place].whole
            is_last = count + 1 == len(section.items)  # then nothing is left to be counted
            needs = len(section.items[count]) - is_last
            if needs <= left:
                shown[place] = Shown(count + 1)
                left -= needs
            elif 1 - is_last <= left:
                shown[place] = Shown(count, is_cut=True)
                left -= 1 - is_last
            if is_last or shown[place].whole == count:
                growing.remove(place)
    return shown


def _joined(sections: Sequence[Section], shown: Sequence[Shown], *, gap: bool) -> list[Text]:
    lines = list[Text]()
    for place, (section, part) in enumerate(zip(sections, shown, strict=True)):
        lines += [Text()] * (gap and place > 0) + section.lines(part)
    return lines
