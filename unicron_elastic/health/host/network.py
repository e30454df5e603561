"""Links of the network: interfaces that were up and are down, or that come and go.

Source: the kernel's Documentation/ABI/testing/sysfs-class-net (operstate, carrier_changes, flags) and
Documentation/networking/operstates.rst.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from unicron_elastic.base.fault import Status
from unicron_elastic.base.finding import LINK_DOWN, Finding, Level, ProbeNotes, finding
from unicron_elastic.health.host.files import read, read_number

# States in which an interface takes no traffic. "unknown" is what a driver without states says: it proves nothing.
_DOWN = frozenset({"down", "lowerlayerdown", "notpresent", "dormant"})
_IFF_UP = 1


@dataclass(slots=True)
class Window:
    """By how much a counter grew within the last `length_s`."""

    length_s: float
    samples: deque[tuple[float, int]] = field(default_factory=deque)

    def growth(self, now: float, value: int) -> int:
        """Takes the counter's value at `now`. One that shrank was reset, and starts anew."""
        samples = self.samples
        if samples and value < samples[-1][1]:
            samples.clear()
        samples.append((now, value))
        while len(samples) > 1 and samples[1][0] <= now - self.length_s:
            samples.popleft()
        return value - samples[0][1]


@dataclass(slots=True)
class _History:
    changes: Window
    was_up: bool = False


class LinkProbe:
    """Watches the interfaces `only`, or else all that belong to hardware, or to a bond of such.

    Bridges, tunnels, pairs of containers and the loopback are left out unless named. The loss of one is critical, a
    warning if its bond goes on without it; `flaps` changes of carrier within `window_s` (a loss is one, its end
    another) are a warning. Only interfaces that were seen up count, for many nodes have ports that nobody uses.
    """

    def __init__(
        self,
        *,
        only: Collection[str] | None = None,
        flaps: int = 2,
        window_s: float = 60.0,
        net: str = "/sys/class/net",
        notes: ProbeNotes | None = None,
    ) -> None:
        self._only = None if only is None else frozenset(only)
        self._flaps = flaps
        self._window_s = window_s
        self._net = net
        self._notes = notes or ProbeNotes()
        self._histories: dict[str, _History] = {}

    def check(self, now: float) -> list[Finding]:
        """Links that are down or flap at `now` (monotonic seconds)."""
        try:
            names = os.listdir(self._net)
        except OSError as error:
            self._notes.once(f"{self._net} cannot be read ({error.strerror}): network links are not watched.")
            return []
        watched = sorted(name for name in names if self._is_watched(name))
        for name in sorted((self._only or frozenset()) - set(names) - set(self._histories)):
            self._notes.once(f"There is no network interface {name}: it is watched once it has come.")
        found = [found for name in watched for found in self._check(name, now)]
        missing = sorted(set(self._histories) - set(watched))
        found.extend(self._lost(name, now) for name in missing if self._histories[name].was_up)
        return found

    def _is_watched(self, name: str) -> bool:
        if self._only is not None:
            return name in self._only
        folder = f"{self._net}/{name}"
        return os.path.exists(f"{folder}/device") or os.path.exists(f"{folder}/bonding")

    def _check(self, name: str, now: float) -> Iterator[Finding]:
        folder = f"{self._net}/{name}"
        state = _word(f"{folder}/operstate")
        history = self._histories.setdefault(name, _History(Window(self._window_s)))
        history.was_up = history.was_up or state == "up"
        if history.was_up and state in _DOWN:
            yield self._down(name, now)
        changes = read_number(f"{folder}/carrier_changes")
        if changes is None:
            self._notes.once(f"How often {name} lost its link is not told: whether it flaps is not watched.")
            return
        growth = history.changes.growth(now, changes)
        if history.was_up and growth >= self._flaps:
            reason = f"The link of {name} went down or came up {growth} times within {self._window_s:.0f} s."
            yield finding("link.flapping", Level.WARN, Status.LINK_FLAPPING, name, reason, at=now)

    def _down(self, name: str, now: float) -> Finding:
        folder = f"{self._net}/{name}"
        is_switched_off = not _flags(f"{folder}/flags") & _IFF_UP
        words = "was switched off" if is_switched_off else "has lost its link"
        bond = f"{folder}/master"
        if os.path.exists(f"{bond}/bonding") and _word(f"{bond}/operstate") == "up":
            reason = f"{name} {words}; its bond goes on without it."
            return finding("link", Level.WARN, LINK_DOWN, name, reason, at=now)
        return finding("link", Level.CRITICAL, LINK_DOWN, name, f"{name} {words}.", at=now)

    def _lost(self, name: str, now: float) -> Finding:
        """Hardware that fell off the bus; but a virtual function that moves into a container goes away likewise."""
        level = Level.WARN if self._only is None else Level.CRITICAL
        return finding("link", level, LINK_DOWN, name, f"The network interface {name} is gone.", at=now)


def _word(path: str) -> str:
    return (read(path) or "").strip()


def _flags(path: str) -> int:
    """Read the interface's flags, such as "0x1003"; taken as switched on where they cannot be read."""
    try:
        return int(_word(path), 16)
    except ValueError:
        return _IFF_UP
