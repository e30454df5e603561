"""Tells when a GradScaler is asked to scale a loss. Imports nothing of torch until it is given a scaler's class."""

from __future__ import annotations

import functools
from typing import Any, Protocol
from weakref import WeakSet

from unicron_elastic.compat.watching.watchers import Watchers


class ScalingWatcher(Protocol):
    """It wants to know of each loss that is scaled."""

    def is_scaling(self, scaler: Any) -> None:
        """Hears that this scaler is about to scale a loss. What it raises, ``scale`` raises."""


_watchers = Watchers[Any]()
_watched: WeakSet[Any] = WeakSet()  # classes


def watch_scaling(kind: type, watcher: ScalingWatcher) -> None:
    """Tells ``watcher``, as long as it lives, before a scaler of this class, or of another that was watched, scales.

    The class is changed, not the scaler: that one is copied, pickled and compared as before.
    """
    _watchers.add(watcher)
    owner = next((each for each in kind.__mro__ if "scale" in vars(each)), None)
    if owner is None or owner in _watched:
        return
    scale = owner.scale  # type: ignore[attr-defined]

    @functools.wraps(scale)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        for each in _watchers:
            each.is_scaling(self)
        return scale(self, *args, **kwargs)

    owner.scale = watched  # type: ignore[attr-defined]
    _watched.add(owner)
