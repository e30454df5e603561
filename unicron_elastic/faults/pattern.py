"""One row of the classification tables, and how a row is matched."""

from __future__ import annotations

import re
from dataclasses import dataclass

from unicron_elastic.base.fault import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """If the exception's type and text match, the failure has this status.

    `source` names the library (and function, where known) that writes the text, so that a reader can check it.
    `type_pattern` is matched against the end of the qualified type name; None accepts every type, also no type at all.
    """

    source: str
    text_pattern: re.Pattern[str]
    status: Status
    is_consequence: bool
    type_pattern: re.Pattern[str] | None

    def match(self, exception_type: str, text: str) -> re.Match[str] | None:
        """The place in `text` that this row recognises, or None."""
        if self.type_pattern is not None and self.type_pattern.search(exception_type) is None:
            return None
        return self.text_pattern.search(text)


def row(source: str, text: str, status: Status, *, type_name: str = "", is_consequence: bool = False) -> Row:
    """Builds a row from regular expressions; case is ignored, for libraries change it between versions.

    Only plain alternatives and bounded repeats are used in the tables: a message may be megabytes of C++ frames, and
    matching must stay linear.
    """
    return Row(
        source=source,
        text_pattern=re.compile(text, re.IGNORECASE),
        status=status,
        is_consequence=is_consequence,
        type_pattern=re.compile(rf"(?:^|\.)(?:{type_name})$") if type_name else None,
    )


def peer_row(source: str, text: str, status: Status, *, type_name: str = "") -> Row:
    """A row for a text that a healthy process writes when another one has gone away."""
    return row(source, text, status, type_name=type_name, is_consequence=True)
