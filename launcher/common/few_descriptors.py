"""Whether this process may open as many files as an agent does; else it would only be seen by what fails later."""

from __future__ import annotations

import resource
from collections.abc import Callable

OWN = 32  # of an agent without workers
OF_A_WORKER = 6


def few_descriptors(workers: int, limits: Callable[[int], tuple[int, int]] = resource.getrlimit) -> str:
    """Say that an agent of so many workers may not have all files open that it needs; "" if it may."""
    needed, (may_open, _) = OWN + OF_A_WORKER * workers, limits(resource.RLIMIT_NOFILE)
    if may_open == resource.RLIM_INFINITY or may_open >= needed:
        return ""
    return (
        f"this process may have {may_open} files open, and with its workers needs about {needed}: what is opened last "
        "fails. Raise the limit (ulimit -n)."
    )
