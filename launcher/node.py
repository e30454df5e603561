"""The node's health as the agent sees it: what probes find is told to people, and explains how workers ended."""

from __future__ import annotations

import glob
import logging
import signal
from collections.abc import Callable, Iterable, Mapping

from unicron_elastic.health.command import CommandProbe
from unicron_elastic.health.files import read
from unicron_elastic.health.finding import Finding, Level
from unicron_elastic.health.watch import NodeHealth
from unicron_elastic.launcher.loop import Loop
from unicron_elastic.recovery.events import NodeUnhealthy

__all__ = ["NodeWatch"]

STOP_TIMEOUT_S = 1.0
MOMENT_S = 1.0  # between a kill for lack of memory and the end of the killed process
_NVIDIA = "0x10de"  # the vendor's number on the PCI bus
_WORDS = {Level.OK: "ok", Level.WARN: "warning", Level.CRITICAL: "critical"}

logger = logging.getLogger(__name__)


class NodeWatch:
    """Runs the probes from ``start`` to ``stop``; without ``start`` nothing is watched and nothing known."""

    def __init__(self, loop: Loop, say: Callable[[str], None], post: Callable[[NodeUnhealthy], None]) -> None:
        """``say`` tells people a sentence, ``post`` takes what concerns the job."""
        self._loop = loop
        self._say = say
        self._post = post
        self._health: NodeHealth | None = None

    def start(self, folders: Iterable[str], workers: Callable[[], Mapping[int, str]], command: str) -> None:
        """Begins to watch this node, the ``folders`` that the job writes to and its ``workers`` ({pid: name}).

        ``command`` is the site's own check; "": there is none.
        """
        self._health = NodeHealth(
            self._found,
            say=self._note,
            folders=folders,
            workers=workers,
            commands=[CommandProbe(command)] if command else [],
        )
        self._health.start()

    def stop(self) -> None:
        """Watches no more; what a driver or a file system keeps waiting ends with the process."""
        if self._health is not None:
            health, self._health = self._health, None
            health.stop(STOP_TIMEOUT_S)  # who runs us from Python may fork next

    def why_killed(self, exit_code: int, ended_at: float) -> str:
        """Why the kernel killed a worker, as far as it is known; "" if nothing is."""
        if self._health is None or exit_code != -signal.SIGKILL:
            return ""
        kills = self._health.oom.kills_since(ended_at - MOMENT_S)
        if kills is None or kills.in_own_cgroup is False:
            return ""
        return "out of memory" if kills.in_own_cgroup else "out of memory, it seems"

    def _found(self, finding: Finding) -> None:
        """Called from the probes' threads."""
        self._loop.call_soon(lambda: self._tell(finding) if self._health is not None else None)

    def _tell(self, finding: Finding) -> None:
        self._say(f"Health {_WORDS[finding.level]}: {finding.reason}")
        is_of_gpu = finding.probe.startswith("gpu.")
        if (
            is_of_gpu
            and finding.level is Level.CRITICAL
            and finding.status is not None
            and finding.severity is not None
        ):
            event = NodeUnhealthy(
                at=finding.at, status=finding.status, severity=finding.severity, reason=finding.reason
            )
            self._post(event)

    def _note(self, sentence: str) -> None:
        """What cannot be watched. Nobody misses GPUs where there are none."""
        if _has_gpus():
            self._loop.call_soon(lambda: self._say(sentence) if self._health is not None else None)
        else:
            logger.info(sentence)


def _has_gpus() -> bool:
    return any((read(path) or "").strip() == _NVIDIA for path in glob.glob("/sys/bus/pci/devices/*/vendor"))
