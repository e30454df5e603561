"""The wait of a node whose workers have ended well for the others of its round."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

LOOK_S = 0.05


def wait_at_last_barrier(
    is_over: Callable[[], bool],
    wait: Callable[[], None],
    held: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Lets ``wait`` wait in a thread of its own, started within ``held``, which is left to itself once ``is_over``.

    torch's barrier waits for minutes in one call, which neither a signal nor the loss of a node ends, and for longer
    where the host of the store went silent.
    """
    has_ended = threading.Event()

    def run() -> None:
        try:
            wait()
        finally:
            has_ended.set()

    if not is_over():
        with held():
            threading.Thread(target=run, name="unicron-barrier", daemon=True).start()
    while not is_over() and not has_ended.wait(LOOK_S):
        pass
