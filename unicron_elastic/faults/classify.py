"""From what is known of one worker's end to what it means: a walk through ordered tables.

The exception is asked before the exit code, since a worker that raised exits with 1 whatever the cause. Of the
exception, its own text is asked first; if no row knows it, the exceptions it was chained to (oldest first), so that
`raise TrainingFailed() from cuda_error` is still a CUDA error.
"""

from __future__ import annotations

import re

from unicron_elastic.base.fault import SEVERITY_OF, Failure, Fault, Status
from unicron_elastic.base.text import LONGEST_TEXT, chained_exceptions, one_line, shorten
from unicron_elastic.faults.exit_status import describe_exit, exit_status
from unicron_elastic.faults.pattern import Row
from unicron_elastic.faults.patterns_gpu import GPU_ROWS
from unicron_elastic.faults.patterns_host import HOST_ROWS, HOST_SOCKET_ROWS
from unicron_elastic.faults.patterns_network import NETWORK_ROWS

# First match wins.
ROWS: tuple[Row, ...] = (*GPU_ROWS, *HOST_ROWS, *NETWORK_ROWS, *HOST_SOCKET_ROWS)

# The parts are cut so that the whole is not: what stands last (place and step) is worth more than a long message.
_LONGEST_REASON = 400
_LONGEST_TYPE, _LONGEST_EXCERPT, _LONGEST_PLACE = 70, 170, 80

# "[/src/gloo/transport/tcp/pair.cc:553] ", glog's "[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] " and such.
_CPP_PREFIX = re.compile(
    r"^(?:what\(\): |\[rank\d+\]:)?\[[^\]]{0,200}\.(?:cc|cpp|hpp|h|cu):\d+\]\s*",
    re.IGNORECASE,
)
# A line that ends with a colon announces the next one.
_SENTENCE_START = re.compile(r"[.?!]\s|[\r\n]")
_SENTENCE_END = re.compile(r"\.\s|(?<![:\s])[\r\n]")
_NCCL_LAST_ERROR = re.compile(r"\bLast error: ?\n? ?(\S[^\n]{0,200})")


def classify(failure: Failure) -> Fault:
    """What `failure` means. Never raises; `reason` is one line of at most 400 characters that ends with a period."""
    row, excerpt = _find(failure)
    if row is not None:
        status, is_consequence = row.status, row.is_consequence
    else:
        status, is_consequence = _without_row(failure)
    return Fault(
        failure=failure,
        status=status,
        severity=SEVERITY_OF[status],
        is_consequence=is_consequence,
        reason=_reason(failure, excerpt),
    )


def _find(failure: Failure) -> tuple[Row | None, str]:
    """The first row that knows the failure, and the words worth showing from where it matched."""
    text = (failure.message or "")[:LONGEST_TEXT]
    found = _first_match(failure.exception_type or "", text)
    if found is not None:
        return found[0], _excerpt(text, found[1])
    for chained_type, chained_text in chained_exceptions(failure.stack or ""):
        found = _first_match(chained_type, chained_text)
        if found is not None:
            own = _excerpt(text, None)
            cause = f"{chained_type}: {_excerpt(chained_text, found[1])}"
            return found[0], f"{shorten(own, _LONGEST_EXCERPT // 2)}, from {cause}" if own else f"from {cause}"
    # Of a process that only wrote, the last line says most: what comes before is usage, banners and warnings.
    return None, _excerpt(text if failure.exception_type else text.rstrip().rpartition("\n")[2], None)


def _first_match(exception_type: str, text: str) -> tuple[Row, re.Match[str]] | None:
    if not exception_type and not text:
        return None  # rows that only look at the type have an empty text pattern
    for row in ROWS:
        if match := row.match(exception_type, text):
            return row, match
    return None


def _without_row(failure: Failure) -> tuple[Status, bool]:
    if failure.exception_type:
        return Status.OTHER_SOFTWARE_ERROR, False
    if failure.why_killed.startswith("out of memory"):
        return Status.OUT_OF_HOST_MEMORY, False
    if failure.exit_code is not None:
        return exit_status(failure.exit_code)
    if failure.message:
        return Status.OTHER_SOFTWARE_ERROR, False
    return Status.TASK_HANG, False  # alive and silent: reported only because it makes no progress


def _excerpt(text: str, match: re.Match[str] | None) -> str:
    """The sentence in which the row matched; if it matched no text, the first. NCCL's "Last error" wins over both."""
    start, end = match.span() if match and match[0] else (len(text) - len(text.lstrip()),) * 2
    if match and (last_words := _NCCL_LAST_ERROR.search(text, end)):
        start, end = last_words.span(1)
    begin = max((found.end() for found in _SENTENCE_START.finditer(text, 0, start)), default=0)
    if start - begin > _LONGEST_EXCERPT // 2:
        begin = start  # else the cut below could lose the very words that matched
    finish = _SENTENCE_END.search(text, end)
    sentence = one_line(text[begin : finish.start() if finish else len(text)])
    return _CPP_PREFIX.sub("", sentence).rstrip(".:")


def _reason(failure: Failure, excerpt: str) -> str:
    head = f"rank {failure.rank} {_what_happened(failure, excerpt)}"
    place = one_line(failure.location or "", _LONGEST_PLACE)
    return shorten(f"{head}{f' ({place})' if place else ''}{_progress(failure.step)}", _LONGEST_REASON - 1) + "."


def left_early(failure: Failure) -> Fault:
    """What it means that a worker ended well while others still trained with it, and failed for that."""
    status = Status.EXITED_ABNORMALLY
    reason = f"rank {failure.rank} left with exit code 0{_progress(failure.step)}, while others still trained."
    return Fault(failure=failure, status=status, severity=SEVERITY_OF[status], is_consequence=False, reason=reason)


def _progress(step: int | None) -> str:
    if step is None:
        return ""
    return {0: " before its first step", 1: " after 1 step"}.get(step, f" after {step} steps")


def _what_happened(failure: Failure, excerpt: str) -> str:
    short = shorten(excerpt, _LONGEST_EXCERPT)
    name = one_line(failure.exception_type or "", _LONGEST_TYPE)
    if name:
        return f"raised {name}: {short}" if short else f"raised {name}"
    if failure.exit_code is not None:
        why = f": {failure.why_killed}" if failure.why_killed else ""
        return describe_exit(failure.exit_code) + why + (f" after writing: {short}" if short else "")
    return f"reported: {short}" if short else "has neither raised nor exited and is taken to hang"
