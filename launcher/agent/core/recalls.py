"""Nodes that are to leave: what the agent hears of them, and when its own workers have completed a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from itertools import pairwise

from unicron_elastic.launcher.agent.process.workers import WorkerProcess
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.recovery.events import Event, NodeRecalled, NodesDepart, StepEnded

LOOK_S = 0.002  # between two looks at the pulse pages: the work that is lost
PATIENCE_S = 2.0  # at least
PATIENCE_STEPS = 3


class Recalls:
    """Of one agent. ``post`` takes events, in the loop."""

    def __init__(self, loop: Loop, post: Callable[[Event], None]) -> None:
        self._loop = loop
        self._post = post
        self._waits = 0  # timers of earlier ones are not for this one
        self.does_anyone_depart = False  # of the present round
        self._why_here, self._why_elsewhere = "", ""  # nodes leave, as far as that was heard

    def told(self, reason: str, why_stay: str, is_drained: bool) -> None:
        """This node is recalled or drained, or not any more; from any thread."""
        self._why_here = reason
        event = NodeRecalled(at=time.monotonic(), reason=reason, why_stay=why_stay, is_drained=is_drained)
        self._loop.call_soon(lambda: self._post(event))

    def others_depart(self, generation: int, nodes: tuple[str, ...], reason: str) -> None:
        """Other nodes leave; from any thread."""
        self.does_anyone_depart = True
        self._why_elsewhere = reason
        event = NodesDepart(at=time.monotonic(), nodes=nodes, reason=reason, generation=generation)
        self._loop.call_soon(lambda: self._post(event))

    def is_about_this_node(self, sentence: str) -> bool:
        """Return whether ``sentence`` goes on with what was said when this node began to leave."""
        return bool(self._why_here) and sentence.startswith(self._why_here)

    def is_told_there(self, sentence: str) -> bool:
        """Return whether ``sentence`` goes on with what a node that leaves has said, here or elsewhere."""
        is_elsewhere = bool(self._why_elsewhere) and sentence.startswith(self._why_elsewhere)
        return is_elsewhere or self.is_about_this_node(sentence)

    def await_step(self, generation: int, workers: Iterable[WorkerProcess]) -> None:
        """Posts ``StepEnded`` when all of these workers have just completed a step, or that took too long."""
        self._waits += 1
        number, watched = self._waits, tuple(workers)
        before, deadline = _steps(watched), time.monotonic() + _patience_s(watched)

        def look() -> None:
            now, steps = time.monotonic(), _steps(watched)
            if number != self._waits:
                return
            if now >= deadline or (len(set(steps)) == 1 and steps != before):
                self._post(StepEnded(at=now, generation=generation))
            else:
                self._loop.call_at(now + LOOK_S, look)

        look()


def _steps(workers: Iterable[WorkerProcess]) -> list[int]:
    """How many each has done, of those who still run and can be seen."""
    readings = [worker.reading() for worker in workers if worker.returncode is None]
    return [reading.step for reading in readings if reading is not None]


def _patience_s(workers: Iterable[WorkerProcess]) -> float:
    """So long a step is waited for: some usual ones."""
    beats = [worker.page.beats()[1] for worker in workers if worker.page is not None]
    usual = [statistics.median(after - at for at, after in pairwise(each)) for each in beats if len(each) > 1]
    return max(PATIENCE_S, PATIENCE_STEPS * max(usual, default=0.0))
