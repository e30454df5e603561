"""The wait of a node whose workers have ended well for the others of its round."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.distributed import DistStoreError, Store

__all__ = ["StoreUntil"]

LOOK_S = 0.05
LATER_LOOK_S = 0.5
SOON_S = 5.0  # so long after another it may look often whether the others have ended, too


class StoreUntil:
    """A round's store, as torch's barrier uses it, but nothing is waited for once ``is_over``.

    torch waits in one call, which neither a signal nor the loss of a node ends before its time-out of minutes.
    """

    def __init__(self, store: Store, is_over: Callable[[], bool]) -> None:
        self._store = store
        self._is_over = is_over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def wait(self, keys: list[str]) -> None:
        """Raises DistStoreError after the store's time-out."""
        began = time.monotonic()
        timeout_s = self._store.timeout.total_seconds()
        while not self._has_come(keys) and not self._is_over():
            waited_s = time.monotonic() - began
            if waited_s > timeout_s:
                raise DistStoreError(f"the others did not end within {timeout_s:g} s")
            time.sleep(LOOK_S if waited_s < SOON_S else LATER_LOOK_S)

    def _has_come(self, keys: list[str]) -> bool:
        try:
            return bool(self._store.check(keys))
        except RuntimeError:  # it answered just now, and ends with its node, which has waited as well
            return True
