"""The metrics of one ``unicron-run``: renewed in its event loop, so that who asks for them is answered from a value.

They are served here, or told to the agent of the cluster that started this process, which serves those of its node.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.ledger import ledger_records
from unicron_elastic.compat.errors import SignalException
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.launcher.export.metrics.link import Teller
from unicron_elastic.launcher.export.metrics.server import Answers, MetricsServer
from unicron_elastic.launcher.view.job.view import LocalJobView
from unicron_elastic.metrics.figures import JobFigures, WorkerFigures
from unicron_elastic.metrics.incidents import IncidentTotals
from unicron_elastic.metrics.samples import MetricSample, job_samples
from unicron_elastic.recovery.state import Phase

LOOK_S = 1.0  # between two looks; no scrape is that frequent
UNWELL_S = 30.0  # without a turn of the loop, while it has work

_LOOPS_IN = (Phase.RUNNING.value, Phase.STOPPING.value)  # else it may wait for nodes, GPUs or workers, as it should
_NOT_READY = {
    Phase.IDLE.value: "No workers run: this node meets the others, or clears up.",
    Phase.STOPPING.value: "The workers are being stopped.",
    Phase.LEAVING.value: "This node is about to leave the job.",
    Phase.FINISHED.value: "The job has ended on this node.",
}

logger = logging.getLogger(__name__)


class JobMetrics(Answers):
    """Of one agent, from ``start`` to ``close``. All but what it answers belongs to the loop's thread."""

    def __init__(
        self,
        loop: Loop,
        view: Callable[[], LocalJobView],
        node: str,
        ledger: Callable[[], Path],
        *,
        look_s: float = LOOK_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ledger`` tells where incidents are recorded, once workers have started."""
        self._loop = loop
        self._look_s = look_s
        self._clock = clock
        self._view = view
        self._node = node
        self._ledger = ledger
        self._started_unix_s = time.time()
        self._totals = IncidentTotals()
        self._early: list[Incident] | None = []  # recorded before the ledger was read
        self._has_replayed = self.has_counted = False  # begun, and done
        self._last_step_at = 0.0
        self._last_step_unix_s: float | None = None
        self._samples: tuple[MetricSample, ...] = ()
        self._phase = Phase.IDLE.value
        self._turned_at = self._clock()  # when the loop last went round
        self.is_meeting = False  # the loop stands while nodes meet
        self.cluster_samples: Callable[[], Iterable[MetricSample]] = tuple  # of an agent that takes part in a cluster
        self._teller: Teller | None = None
        self._server: MetricsServer | None = None
        self._is_over = False

    def start(self, *, server: Callable[[Answers], MetricsServer | None] | None, teller: Teller | None) -> bool:
        """Begins; False if there is nobody to tell."""
        self._teller = teller
        self._server = None if server is None else server(self)
        if self._server is None and teller is None:
            return False
        self._look_on()
        return True

    def phase_is(self, phase: str) -> None:
        """Looks at once if the phase is another one: the loop may stand until the next."""
        if phase != self._phase:
            self._look()

    def recorded(self, incident: Incident) -> None:
        """An incident as it was written to the ledger."""
        if self._early is not None:
            self._early.append(incident)
        else:
            self._totals.add(incident)

    def close(self) -> None:
        """Tells the last, and serves nothing any more. May come twice."""
        if not self._is_over:
            self._look()
            self._is_over = True
        if self._server is not None:
            self._server.close()
        if self._teller is not None:
            self._teller.close()

    # -- in the loop ---------------------------------------------------------------------------------------------------

    def _look_on(self) -> None:
        if not self._is_over:
            self._turned_at = self._clock()
            self._look()
            self._loop.call_at(self._clock() + self._look_s, self._look_on)

    def _look(self) -> None:
        try:
            view = self._view()
            self._phase = view.phase
            self._samples = tuple(job_samples(self._figures(view)))
        except SignalException:
            raise
        except Exception:  # a job trains as well when nobody knows how
            logger.debug("The metrics of the job could not be renewed", exc_info=True)
            return
        if view.generation and not self._has_replayed:
            self._replay()
        if self._teller is not None:
            self._teller.tell(self._samples)

    def _figures(self, view: LocalJobView) -> JobFigures:
        if view.last_step_at is not None and view.last_step_at > self._last_step_at:
            self._last_step_at = view.last_step_at
            self._last_step_unix_s = time.time() - self._clock() + view.last_step_at
        return JobFigures(
            run_id=view.run_id,
            script=view.job,
            node=self._node,
            phase=view.phase,
            generation=view.generation,
            restarts_used=view.restarts_used,
            restarts_limit=view.max_restarts,
            nodes=view.nodes if view.generation else 0,
            world_size=view.world_size if view.generation else 0,
            workers=tuple(
                WorkerFigures(
                    rank=worker.rank,
                    is_running=worker.state == "running",
                    step=worker.step,
                    step_time_s=worker.step_time_s,
                )
                for worker in view.workers
            ),
            is_incident_open=view.is_incident_open,
            started_unix_s=self._started_unix_s,
            last_step_unix_s=self._last_step_unix_s,
            incidents=self._totals.figures() if self.has_counted else None,
        )

    # -- what was before -----------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        """Counts what this node's ledger has of this run, in a thread: it may be long.

        Until that is done nothing is told of incidents: a counter that began at 0 would seem to have grown then.
        """
        self._has_replayed = True
        path, run_id = self._ledger(), self._view().run_id
        threading.Thread(target=self._read, args=(path, run_id), name="unicron-ledger", daemon=True).start()

    def _read(self, path: Path, run_id: str) -> None:
        totals = IncidentTotals()
        try:
            if path.is_file():  # not a pipe or /dev/stderr
                for incident in ledger_records(path, lambda _problem: None):
                    if (incident.run_id, incident.host) == (run_id, self._node):
                        totals.add(incident)
        except OSError as error:
            logger.debug("The ledger could not be read: %s", error)
        self._loop.call_soon(lambda: self._replayed(totals))

    def _replayed(self, totals: IncidentTotals) -> None:
        """Records that came meanwhile may be among those that were read: they count once."""
        early, self._early = self._early or [], None
        self._totals, self.has_counted = totals, True
        for incident in early:
            totals.add(incident)

    # -- from other threads --------------------------------------------------------------------------------------------

    def samples(self) -> Iterable[MetricSample]:
        """Return the samples of the latest look."""
        return *self._samples, *self.cluster_samples()

    def why_unwell(self) -> str:
        """The loop stands, though it has work."""
        if self.is_meeting or self._phase not in _LOOPS_IN:
            return ""
        stood_s = self._clock() - self._turned_at
        return f"The agent's loop has not gone round for {stood_s:.0f} s." if stood_s > UNWELL_S else ""

    def why_not_ready(self) -> str:
        """No workers run here."""
        return _NOT_READY.get(self._phase, "")
