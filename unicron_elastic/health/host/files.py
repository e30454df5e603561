"""Small files of /proc, /sys and cgroups: read whole or not at all."""

from __future__ import annotations

import os

_CHUNK = 65536
_MOST = 1 << 20


def read(path: str) -> str | None:
    """The text of a file, or None if it is not there, cannot be read, or says nothing now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        parts = []
        size = 0
        while size < _MOST:  # the kernel hands some files out page by page
            part = os.read(descriptor, _CHUNK)
            if not part:
                break
            parts.append(part)
            size += len(part)
        return b"".join(parts).decode("utf-8", "replace")
    except OSError:  # such as EOPNOTSUPP of a kernel without pressure information, EINVAL of an interface that is off
        return None
    finally:
        os.close(descriptor)


def read_number(path: str) -> int | None:
    """The number that is all of a file; None if it holds no number ("max") or cannot be read."""
    return _number(read(path) or "")


def number(text: str | None, key: str) -> int | None:
    """The number in the line of `text` that begins with the word `key`, as /proc/meminfo and memory.events have it."""
    for line in (text or "").splitlines():
        if line.startswith(key) and line[len(key) : len(key) + 1] in (" ", ":", "\t"):
            words = line[len(key) + 1 :].split(None, 1)
            return _number(words[0]) if words else None
    return None


def in_gib(size: int) -> str:
    """A number of bytes for people, such as "1.5 GiB"."""
    return f"{size / (1 << 30):.1f} GiB"


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None
