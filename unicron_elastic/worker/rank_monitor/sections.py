"""The sections that a script has open; the innermost of them is the worker's phase."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from unicron_elastic.worker.notices import SectionOverdue
from unicron_elastic.worker.phases import phase
from unicron_elastic.worker.pulse import TRAIN
from unicron_elastic.worker.rank_monitor.data import RankMonitorClientError

# Sections around a training step are training: its steps are timed one by one, and better than any section.
STEP_SECTIONS = frozenset({"step", "train", "train_step", "training", "training_step", "iteration"})


class Sections:
    """Opened and closed by name, in any order. The phase shown is the section opened last of those still open."""

    def __init__(self) -> None:
        self._opened: dict[str, tuple[phase, float]] = {}  # since when, in monotonic seconds; the latest is the last
        self._shown: phase | None = None
        self._told: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._opened)

    def open(self, name: str, at: float) -> None:
        """Raises RankMonitorClientError if ``name`` is open already or is no name."""
        if name in self._opened:
            raise RankMonitorClientError(f"section {name!r} is open already: end it before it starts again")
        try:
            named = phase(TRAIN if name in STEP_SECTIONS else name)
        except (TypeError, ValueError) as error:
            raise RankMonitorClientError(f"{name!r} cannot be a section: {error}") from None
        self._opened[name] = named, at
        self._show()

    def close(self, name: str, at: float) -> float:
        """How long it was open, in seconds. Raises RankMonitorClientError if it is not."""
        if name not in self._opened:
            raise RankMonitorClientError(f"section {name!r} is not open: it cannot be ended")
        _, since = self._opened.pop(name)
        self._told.discard(name)
        self._show()
        return at - since

    def names(self) -> list[str]:
        """Those that are open, the innermost last."""
        return list(self._opened)

    def overdue(self, limits_s: Mapping[str, float | None], at: float) -> list[SectionOverdue]:
        """Those open for longer than ``limits_s``, each of them once: an inner one must not hide an outer one."""
        found = []
        for name, (_, since) in self._opened.items():
            limit_s = limits_s.get(name)
            if limit_s is not None and at - since > limit_s and name not in self._told:
                self._told.add(name)
                found.append(SectionOverdue(section=name, open_s=at - since, limit_s=limit_s))
        return found

    def _show(self) -> None:
        """Shows the innermost. What the script's own ``phase`` said before the first of them comes back at the end."""
        if threading.current_thread() is not threading.main_thread():
            return  # as with phases: others do not hold up the worker's steps
        if self._shown is not None:
            self._shown.__exit__()
        innermost = next(reversed(self._opened.values()), None)
        self._shown = innermost[0].__enter__() if innermost is not None else None
