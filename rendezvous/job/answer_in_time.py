"""A call to a store that is given up if no answer comes: its own time-out does not end it where the host is silent."""

from __future__ import annotations

import threading
from collections.abc import Callable


def answer_in_time(ask: Callable[[], object], timeout_s: float) -> None:
    """Call ``ask`` in a thread, which is left to itself after that time. Raises what it raises, and TimeoutError."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            ask()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="unicron-tell", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise TimeoutError(f"the round's store did not answer within {timeout_s:g} s")
    if errors:
        raise errors[0]
