"""How long heartbeats and sections took, and the time-outs learned from that.

A learned time-out is the longest that was measured on any rank, times a safety factor of 5; with the one learned
before it is averaged half and half (NVIDIA Resiliency Extension 0.7, ``FaultToleranceConfig.safety_factor`` and
``calculate_and_set_section_timeouts``).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

from unicron_elastic.worker.rank_monitor.data import HeartbeatTimeouts, SectionTimeouts

NEW_SHARE = 0.5
# Where the longest is kept of what is not a section; no section has such a name, since names are text.
_FIRST_HEARTBEAT, _HEARTBEAT, _OUTSIDE = 0, 1, 2


class Measured:
    """The longest of each, in seconds. Times given are monotonic seconds."""

    def __init__(self, safety_factor: float, at: float, sections: Iterable[str]) -> None:
        self._factor = safety_factor
        self._longest: dict[str | int, float] = {}
        self._sections = set(sections)  # all that should be measured
        self._heartbeat_at: float | None = None
        self._began_at = at
        self._outside_since = at

    def heartbeat(self, at: float) -> None:
        """The script sent one."""
        if self._heartbeat_at is None:
            self._take(_FIRST_HEARTBEAT, at - self._began_at)
        else:
            self._take(_HEARTBEAT, at - self._heartbeat_at)
        self._heartbeat_at = at

    def outside_until(self, at: float) -> None:
        """No section was open since the last one was closed."""
        self._take(_OUTSIDE, at - self._outside_since)

    def opened(self, section: str) -> None:
        """Its time-out is to be learned."""
        self._sections.add(section)

    def closed(self, section: str, open_s: float, at: float, is_last: bool) -> None:
        """Close a section that was open for so long; ``is_last`` if no other is open now."""
        self._take(section, open_s)
        if is_last:
            self._outside_since = at

    def share(self) -> None:
        """Takes the longest of all ranks, if there is a process group: then all of them have to call this."""
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return
        rows: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(rows, (self._longest, sorted(self._sections)))
        for longest, sections in rows:
            self._sections.update(sections)
            for what, seconds in longest.items():
                self._take(what, seconds)

    def heartbeat_timeouts(self, present: HeartbeatTimeouts) -> HeartbeatTimeouts | None:
        """None if there were fewer than two heartbeats."""
        initial, subsequent = self._timeout(_FIRST_HEARTBEAT), self._timeout(_HEARTBEAT)
        if initial is None or subsequent is None:
            return None
        if present.were_calculated:
            initial, subsequent = _mean(initial, present.initial), _mean(subsequent, present.subsequent)
        return HeartbeatTimeouts(initial, subsequent, were_calculated=True)

    def section_timeouts(
        self, selected: Collection[str] | None, with_outside: bool, present: SectionTimeouts
    ) -> SectionTimeouts | None:
        """``present`` with new ones for ``selected``, None: all sections. None if one of them was not closed yet."""
        names = self._sections if selected is None else set(selected)
        learned = {name: seconds for name in names if (seconds := self._timeout(name)) is not None}
        outside = self._timeout(_OUTSIDE) if with_outside else None
        if len(learned) < len(names) or (with_outside and outside is None) or (selected is None and not names):
            return None
        known = present.calculated_sections
        new = {
            name: _mean(new_s, present.section.get(name) if name in known else None) for name, new_s in learned.items()
        }
        if outside is None:
            outside = present.out_of_section
        elif present.is_out_of_section_calculated:
            outside = _mean(outside, present.out_of_section)
        return SectionTimeouts(
            section={**present.section, **new},
            out_of_section=outside,
            calculated_sections=known | names,
            is_out_of_section_calculated=with_outside or present.is_out_of_section_calculated,
        )

    def _take(self, what: str | int, seconds: float) -> None:
        self._longest[what] = max(seconds, self._longest.get(what, 0.0))

    def _timeout(self, what: str | int) -> float | None:
        longest_s = self._longest.get(what, 0.0)
        return self._factor * longest_s if longest_s > 0 else None


def _mean(new_s: float, old_s: float | None) -> float:
    """Without an old one: the new one."""
    return new_s if old_s is None else NEW_SHARE * new_s + (1.0 - NEW_SHARE) * old_s
