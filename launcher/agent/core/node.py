"""The node's health as the agent sees it: what probes find is told to people, and explains how workers ended."""

from __future__ import annotations

import glob
import logging
import signal
from collections.abc import Callable, Collection, Iterable, Mapping

from unicron_elastic.base.finding import Finding, Level
from unicron_elastic.health.gpu.session import process_visible_devices
from unicron_elastic.health.gpu.state import GpuState
from unicron_elastic.health.host.command import CommandProbe
from unicron_elastic.health.host.files import read
from unicron_elastic.health.watch import NodeHealth
from unicron_elastic.launcher.agent.hangs.gpu_lines import DRIVER_TIMEOUT_S, Asker, gpu_lines
from unicron_elastic.launcher.agent.process.gpu_memory import FREE_TIMEOUT_S, MemoryWait, leftovers
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.recovery.events import NodeUnhealthy

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
        self._workers: Callable[[], Mapping[int, str]] = dict
        self._gpus: Asker[list[GpuState]] | None = None

    def start(self, folders: Iterable[str], workers: Callable[[], Mapping[int, str]], command: str) -> None:
        """Begins to watch this node, the ``folders`` that the job writes to and its ``workers`` ({pid: name}).

        ``command`` is the site's own check; "": there is none.
        """
        self._workers = workers
        self._health = NodeHealth(
            self._found,
            say=self._note,
            folders=folders,
            workers=workers,
            commands=[CommandProbe(command)] if command else [],
        )
        self._gpus = Asker(self._health.gpus.state)
        self._health.start()

    def stop(self) -> None:
        """Watches no more; what a driver or a file system keeps waiting ends with the process."""
        if self._health is not None:
            health, self._health = self._health, None
            self._gpus, self._workers = None, dict  # who names the workers is not to be held after the run
            health.stop(STOP_TIMEOUT_S)  # who runs us from Python may fork next

    def why_killed(self, exit_code: int, ended_at: float) -> str:
        """Why the kernel killed a worker, as far as it is known; "" if nothing is."""
        if self._health is None or exit_code != -signal.SIGKILL:
            return ""
        kills = self._health.oom.kills_since(ended_at - MOMENT_S)
        if kills is None or kills.in_own_cgroup is False:
            return ""
        return "out of memory" if kills.in_own_cgroup else "out of memory, it seems"

    def gpu_lines(self) -> list[str]:
        """How the GPUs are, for a report; nothing without any. Waits a second at most; safe from any thread."""
        health, asker = self._health, self._gpus
        if health is None or asker is None or not health.gpus.is_open:
            return []
        return gpu_lines(asker.ask(DRIVER_TIMEOUT_S), self._workers())

    def when_gpus_are_free(
        self, pids: Collection[int], on_done: Callable[[], None], mark: str = "", timeout_s: float = FREE_TIMEOUT_S
    ) -> Callable[[], None]:
        """Calls ``on_done`` in the loop's thread once the workers ``pids``, all ended, hold no GPU memory any more.

        At once where there are no GPUs. After ``timeout_s`` people are told who holds what, and it goes on. ``mark`` is
        as in ``leftovers``. What is returned gives up the wait.
        """
        health = self._health
        if not pids or health is None or not health.gpus.is_open:
            on_done()
            return lambda: None

        def done(sentence: str) -> None:
            if sentence:
                self._say(sentence)
            on_done()

        gpus, ended = health.gpus, frozenset(pids)
        return MemoryWait(self._loop, lambda: leftovers(gpus.holders(), ended, mark), done, timeout_s).cancel

    def wait_until_gpus_are_free(
        self, pids: Collection[int], mark: str = "", timeout_s: float = FREE_TIMEOUT_S
    ) -> None:
        """The same for who has nothing else to do: runs the loop meanwhile, so not from one of its callbacks."""
        done: list[bool] = []
        cancel = self.when_gpus_are_free(pids, lambda: done.append(True), mark, timeout_s)
        try:
            self._loop.run_until(lambda: bool(done))
        finally:
            cancel()  # a signal's handler may have raised

    def _found(self, finding: Finding) -> None:
        """Called from the probes' threads."""
        self._loop.call_soon(lambda: self._tell(finding) if self._health is not None else None)

    def _tell(self, finding: Finding) -> None:
        self._say(f"Health {_WORDS[finding.level]}: {finding.reason}")
        is_grave = finding.level is Level.CRITICAL and _is_of_job(finding)
        if is_grave and finding.status is not None and finding.severity is not None:
            status, severity = finding.status, finding.severity
            self._post(NodeUnhealthy(at=finding.at, status=status, severity=severity, reason=finding.reason))

    def _note(self, sentence: str) -> None:
        """What cannot be watched. Nobody misses GPUs where there are none."""
        if _has_gpus():
            self._loop.call_soon(lambda: self._say(sentence) if self._health is not None else None)
        else:
            logger.info(sentence)


def _is_of_job(finding: Finding) -> bool:
    """Whether it is about a GPU that the job may use; those it sees have their number in CUDA in their names.

    A driver that does not fit its library stops no process that runs, and a job without GPUs never.
    """
    if not finding.probe.startswith("gpu.") or finding.probe in ("gpu.driver", "gpu.hang"):
        return False
    return process_visible_devices() is None or "cuda:" in finding.subject


def _has_gpus() -> bool:
    return any((read(path) or "").strip() == _NVIDIA for path in glob.glob("/sys/bus/pci/devices/*/vendor"))
