"""A store in which waiting ends when a newer world comes, as gloo waits there for peers that may have died."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, Store

from unicron_elastic.engine.transport.superseded import Superseded
from unicron_elastic.engine.transport.waiter import Patience

LOOK_MIN_S, LOOK_MAX_S = 0.0005, 0.05  # between two looks, a tenth of the time that has passed
STORE_TIMEOUT_S = 30.0


class InterruptibleStore(Store):  # type: ignore[misc]
    """An `InterruptibleStore` is ``store``; who waits in it for a key gets Superseded when a newer world has come."""

    def __init__(self, store: Store, is_superseded: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._is_superseded = is_superseded

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        wait_until(lambda: self._store.check([key]), self._is_superseded)
        return bytes(self._store.get(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit_s = STORE_TIMEOUT_S if timeout is None else timeout.total_seconds()
        if not wait_until(lambda: self._store.check(list(keys)), self._is_superseded, limit_s):
            raise DistStoreError(f"{', '.join(keys)} did not come within {limit_s:g} s")

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))


def wait_until(
    has_come: Callable[[], bool],
    is_superseded: Callable[[], bool],
    limit_s: float = math.inf,
    patience: Patience | None = None,
) -> bool:
    """Looks again and again; false if the time is over, or ``patience`` if there is one. Raises Superseded.

    A TCPStore's own waiting cannot be broken off, and complains when its time is over.
    """
    begin = time.monotonic()
    if patience is not None:
        patience.begin()
    while not has_come():
        if is_superseded():
            raise Superseded
        waited_s = time.monotonic() - begin
        if waited_s > limit_s if patience is None else patience.is_over():
            return False
        time.sleep(min(max(waited_s / 10, LOOK_MIN_S), LOOK_MAX_S))
    return True
