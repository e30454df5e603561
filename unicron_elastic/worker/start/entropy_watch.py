"""Which module draws from the system's entropy while it is imported: a fork would have the same as all others."""

from __future__ import annotations

import os
import random
import sys
from types import FrameType
from typing import Any


class EntropyWatch:
    """`EntropyWatch` notes the modules whose bodies draw, themselves or by whatever they call.

    Python's ``random``, ``secrets`` and ``uuid``, and NumPy, come to these two functions; a ``random.Random()`` without
    a seed and torch's generators draw in C, unseen.
    """

    def __init__(self) -> None:
        self.drawn: set[str] = set()
        self._kept: tuple[Any, Any] = (os.urandom, random._urandom)  # type: ignore[attr-defined]

    def __enter__(self) -> EntropyWatch:
        plain, _ = self._kept

        def noted(size: int, /) -> bytes:
            self.drawn.add(module_that_runs())
            return plain(size)  # type: ignore[no-any-return]

        os.urandom = random._urandom = noted  # type: ignore[attr-defined]
        return self

    def __exit__(self, *_: object) -> None:
        os.urandom, random._urandom = self._kept  # type: ignore[attr-defined]


def module_that_runs() -> str:
    """Return the innermost module that is being imported."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return str(frame.f_globals.get("__name__"))
        frame = frame.f_back
    return ""
