"""Waits until gloo's threads have let go of a tensor: one that does so later would abort the ending process."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from torch import Tensor

LET_GO_S = 1.0


def count_references(held: Sequence[Tensor]) -> int:
    """Counts who refers to the only tensor of ``held``.

    It comes in a list, as an argument counts as a reference of its own with Python up to 3.13, and not with 3.14.
    """
    return sys.getrefcount(held[0])


def wait_let_go(held: Sequence[Tensor], references: int) -> None:
    """Waits until gloo's threads have let go of a tensor that had so many references (``count_references``) before.

    They do that after a collective has ended, and a thread which does it while the interpreter ends aborts the process
    (torch 2.13: it needs the interpreter for that).
    """
    deadline = time.monotonic() + LET_GO_S
    while count_references(held) > references and time.monotonic() < deadline:
        time.sleep(0.0005)
