"""Small text tools of this package: one line out of many, and the exceptions inside a formatted traceback."""

from __future__ import annotations

import re

# Characters of a message or traceback that are looked at, from its start. C++ stacks run to megabytes and say nothing.
LONGEST_TEXT = 20_000

# The two sentences by which Python's traceback module joins the exceptions of a chain, oldest first.
_CHAIN = re.compile(
    r"^(?:The above exception was the direct cause of the following exception:|"
    r"During handling of the above exception, another exception occurred:)$",
    re.MULTILINE,
)
_TYPE_AND_TEXT = re.compile(r"([A-Za-z_][\w.]*)(?::\s?(.*))?", re.DOTALL)


LONGEST_LINE = 2000  # characters of what somebody else wrote, wherever it is shown
_LINES_MOST = 400


def one_line(text: str | bytes, limit: int = LONGEST_LINE) -> str:
    """`text` on one line of at most `limit` printable characters, as all that others wrote is shown.

    Breaks, tabs, escapes, marks that turn the direction of writing, and lone surrogates become single spaces.
    """
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    seen = text[: 8 * limit + 8]  # what is longer is not worth a look
    return shorten(" ".join("".join(c if c.isprintable() else " " for c in seen).split()), limit)


def set_apart(text: str) -> str:
    """`text` for a log or terminal behind a mark of ours: its further lines are indented, so none begins as ours do.

    No control characters, and bounded.
    """
    lines = [shorten(_printable(line), LONGEST_LINE) for line in text.rstrip().splitlines()[:_LINES_MOST]] or [""]
    return "\n".join([lines[0], *(line if line[:1] in ("", " ") else f"    {line}" for line in lines[1:])])


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else "    " if c == "\t" else " " for c in line)


def shorten(text: str, limit: int) -> str:
    """`text`, cut to at most `limit` characters with an ellipsis where something was lost."""
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def counted(number: int, one: str, several: str) -> str:
    """Return ``number`` and what there are so many of: counted(1, "rank goes", "ranks go") is "1 rank goes"."""
    return f"{number} {one if number == 1 else several}"


def failed_text(job: str, host: str, why: str) -> str:
    """Say that a job has failed, as the node ``host`` tells, and why if it does so: one reason, once."""
    told = one_line(why).rstrip(".")
    return f"{job} has failed, as {host} says{f': {told}' if told else ''}."


def shown(value: object, limit: int = 80) -> str:
    """What somebody else wrote, for a sentence: on one line, at most `limit` characters, texts in quotes.

    Its kind alone where it cannot be written: lists in lists may be nested deeper than that goes.
    """
    try:
        return one_line(repr(value), limit)
    except (RecursionError, ValueError):  # ValueError: a number of thousands of digits
        return type(value).__name__


def chained_exceptions(stack: str) -> list[tuple[str, str]]:
    """(type, text) of each exception in a formatted traceback, oldest first.

    Frames and source lines are indented, so that a line of code which merely mentions an error is never read as one.
    """
    found = []
    for part in _CHAIN.split(stack[-LONGEST_TEXT:]):
        lines = [line for line in part.splitlines() if line and not line[0].isspace()]
        kept = "\n".join(line for line in lines if not line.startswith("Traceback (most recent call last)"))
        if match := _TYPE_AND_TEXT.match(kept):
            found.append((match[1], match[2] or ""))
    return found
