"""Ports of RDMA adapters (InfiniBand, RoCE): those that were active and are not, or that lose their link.

Source: the kernel's Documentation/ABI/stable/sysfs-class-infiniband: `state` is a number and a word ("4: ACTIVE"),
`link_downed` counts how often the link was lost.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from unicron_elastic.base.fault import Status
from unicron_elastic.base.finding import LINK_DOWN, Finding, Level, finding
from unicron_elastic.health.host.files import read, read_number
from unicron_elastic.health.host.network import Window

_ACTIVE = "ACTIVE"


@dataclass(slots=True)
class _PortHistory:
    losses: Window
    was_active: bool = False


class PortProbe:
    """Watches the ports of the adapters `only` ("mlx5_0"), or of all. Only ports that were seen active count."""

    def __init__(
        self,
        *,
        only: Collection[str] | None = None,
        window_s: float = 60.0,
        infiniband: str = "/sys/class/infiniband",
    ) -> None:
        self._only = None if only is None else frozenset(only)
        self._window_s = window_s
        self._root = infiniband
        self._histories: dict[tuple[str, str], _PortHistory] = {}

    def check(self, now: float) -> list[Finding]:
        """Ports that are down or flap at `now` (monotonic seconds); nothing where there is no such adapter."""
        ports = {
            (adapter, port)
            for adapter in _names(self._root)
            if self._only is None or adapter in self._only
            for port in _names(f"{self._root}/{adapter}/ports")
        }
        return [found for key in sorted(ports | set(self._histories)) for found in self._check(*key, now)]

    def _check(self, adapter: str, port: str, now: float) -> Iterator[Finding]:
        folder = f"{self._root}/{adapter}/ports/{port}"
        label = f"{adapter} port {port}"
        state = (read(f"{folder}/state") or "").partition(":")[2].strip()
        history = self._histories.setdefault((adapter, port), _PortHistory(Window(self._window_s)))
        history.was_active = history.was_active or state == _ACTIVE
        if not history.was_active:
            return
        if state != _ACTIVE:
            reason = f"{label} is no longer active: " + (f"its state is {state}." if state else "it is gone.")
            yield finding("link.rdma", Level.CRITICAL, LINK_DOWN, label, reason, at=now)
        losses = read_number(f"{folder}/counters/link_downed")
        if losses is not None and (growth := history.losses.growth(now, losses)) > 0:
            times = "once" if growth == 1 else f"{growth} times"
            reason = f"{label} lost its link {times} within {self._window_s:.0f} s."
            yield finding("link.rdma-flapping", Level.WARN, Status.LINK_FLAPPING, label, reason, at=now)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # no such adapter: nothing to say, most machines have none
        return []
