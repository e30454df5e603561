"""A wait for other nodes that is not silent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unicron_elastic.base.text import one_line

JOIN_S = 1.0  # who reads what is said may not read

logger = logging.getLogger(__name__)


@contextmanager
def telling_who_waits(say: Callable[[], str], silent_s: float) -> Iterator[None]:
    """Tell what ``say`` says if this lasts longer than ``silent_s``, and again if it says something else."""
    is_over = threading.Event()

    def tell() -> None:
        told = ""
        while not is_over.wait(silent_s):
            if (who := say()) not in ("", told):
                told = who
                logger.warning("%s", one_line(who))

    thread = threading.Thread(target=tell, name="unicron-waits", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(JOIN_S)  # workers may be forked next
