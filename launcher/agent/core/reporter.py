"""What people get to see of a job: sentences and a panel on the console, incidents in the ledger."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from unicron_elastic.base.incident import Incident
from unicron_elastic.base.ledger import Ledger, default_ledger
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.launcher.config.options import Options
from unicron_elastic.launcher.export.metrics.link import Teller
from unicron_elastic.launcher.view.job.console import open_console
from unicron_elastic.launcher.view.job.view import LocalJobView, WorkerView
from unicron_elastic.recovery.state import JobState
from unicron_elastic.worker.pulse import PulseReading

if TYPE_CHECKING:
    from unicron_elastic.launcher.export.metrics.job import JobMetrics
    from unicron_elastic.metrics.samples import MetricSample


class _Spoken(logging.Handler):
    """A handler that says what is logged."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """One record."""
        self._say(self.format(record))


class Reporter:
    """Speaks for the agent; nothing it does can hold up or fail a recovery."""

    def __init__(self, options: Options, loop: Loop, run_id: str) -> None:
        self._options = options
        self._loop = loop
        self._run_id = run_id
        self.folder: Path | None = None  # of the run's log files; reports go there
        self._console = open_console(options.console, sys.stderr)
        self._ledger: Ledger | None = None
        self._begun_at = time.monotonic()
        self._last_incident: str | None = None
        self._said_once: set[str] = set()
        self._told_elsewhere: set[int] = set()  # numbers of incidents of which another node speaks
        self.last_said = ""
        self._is_closed = False
        self._spoken = _Spoken(self.say)
        self._metrics: JobMetrics | None = None

    def speak_for_library(self) -> None:
        """What the library below would log is said as the agent's own words, until closed."""
        logger = logging.getLogger("unicron_elastic")
        logger.addHandler(self._spoken)
        logger.propagate = False

    @property
    def farewell(self) -> str:
        """What takes the panel off the terminal if this process cannot do it itself; empty without a panel."""
        return self._console.farewell

    def say(self, sentence: str) -> None:
        """One sentence for people."""
        self.last_said = sentence
        self._console.say(sentence)

    def say_once(self, topic: str, sentence: str) -> None:
        """One sentence for people, the first time that there is one of this topic."""
        if topic not in self._said_once:
            self._said_once.add(topic)
            self.say(sentence)

    def show_while_running(self, view: Callable[[], LocalJobView]) -> None:
        """Refreshes the live panel, where there is one, until closed."""
        interval_s = self._console.refresh_interval_s
        if interval_s is None:
            return

        def refresh() -> None:
            if not self._is_closed:
                now = time.monotonic()
                seen = replace(view(), uptime_s=now - self._begun_at, last_incident=self._last_incident)
                self._console.show(seen)
                self._loop.call_at(now + interval_s, refresh)

        self._loop.call_at(time.monotonic(), refresh)

    def serve_metrics(
        self,
        view: Callable[[], LocalJobView],
        node: str,
        teller: Teller | None,
        *,
        cluster_samples: Callable[[], Iterable[MetricSample]],
        may_thread: bool,
    ) -> None:
        """Serves the job's metrics, if that is wanted, or tells them to the agent that runs it, until closed.

        Those of the cluster are served with them. Without ``may_thread`` nothing is: that is said.
        """
        address, port = self._options.metrics_address, self._options.metrics_port
        if teller is None and not port:
            return
        if not may_thread:
            self.say("No metrics are served: workers may be forked from this very process, which must have no threads.")
            return
        from unicron_elastic.launcher.export.metrics.job import JobMetrics  # and an HTTP server, for who wants one
        from unicron_elastic.launcher.export.metrics.server import open_server

        metrics = JobMetrics(self._loop, view, node, self._ledger_path)
        metrics.cluster_samples = cluster_samples
        opened = partial(open_server, address, port, say=self.say) if port else None
        if metrics.start(server=opened, teller=teller):
            self._metrics = metrics

    def phase_is(self, phase: str) -> None:
        """The job is in this phase now."""
        if self._metrics is not None:
            self._metrics.phase_is(phase)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """While the nodes meet the loop stands, as it should."""
        if self._metrics is not None:
            self._metrics.is_meeting = True
        try:
            yield
        finally:
            if self._metrics is not None:
                self._metrics.is_meeting = False

    def record(self, incident: Incident, *, is_told: bool = False) -> Incident:
        """Writes the incident to the ledger and, when it is over, says what it cost. Returns it as written.

        ``is_told``: another node says all of it.
        """
        written = self._open_ledger().record(incident)
        if self._metrics is not None:
            self._metrics.recorded(written)
        self._last_incident = incident.reason
        if is_told:
            self._told_elsewhere.add(incident.number)
        if incident.total_ms is not None and incident.number not in self._told_elsewhere:
            self.say(f"Incident {incident.number}: first step {incident.total_ms:.0f} ms after the fault.")
        return written

    def record_again(self, incident: Incident) -> Incident:
        """Writes what is known more of an incident that was told. Returns it as written."""
        return self._open_ledger().record(incident)

    def keep_evidence(self, text: str) -> str | None:
        """Writes a report beside the ledger and returns its path; None if that is not possible."""
        return self._open_ledger().keep_evidence(text)

    def _open_ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(self._ledger_path(), self.say)
        return self._ledger

    def _ledger_path(self) -> Path:
        return Path(self._options.ledger) if self._options.ledger else default_ledger(self._run_id, self.folder)

    def close(self) -> None:
        """Takes the panel away, and serves no metrics any more."""
        self._is_closed = True
        if self._metrics is not None:
            self._metrics.close()
        logger = logging.getLogger("unicron_elastic")
        if self._spoken in logger.handlers:
            logger.removeHandler(self._spoken)
            logger.propagate = True
        self._console.close()


def job_view(
    state: JobState, readings: Mapping[int, PulseReading | None], *, nodes: int, world_size: int
) -> LocalJobView:
    """What the panel shows of a job; ``readings`` are the workers' pulse pages by local rank.

    The times and the last incident are the reporter's to add.
    """
    workers = []
    ends = [reading.at for reading in readings.values() if reading is not None and reading.at is not None]
    for worker in state.workers:
        reading = readings.get(worker.local_rank)
        workers.append(
            WorkerView(
                rank=worker.rank,
                local_rank=worker.local_rank,
                pid=worker.pid,
                state="running" if worker.exit_code is None else f"ended ({worker.exit_code})",
                step=reading.step if reading else None,
                step_time_s=reading.step_time_s if reading else None,
            )
        )
    return LocalJobView(
        job=state.job,
        run_id=state.run_id,
        generation=state.generation,
        restarts_used=state.restarts_used,
        max_restarts=state.policy.max_restarts,
        nodes=nodes,
        world_size=world_size,
        workers=tuple(workers),
        uptime_s=0.0,
        last_incident=None,
        phase=state.phase.value,
        is_incident_open=state.incident is not None,
        last_step_at=max(ends, default=None),
    )
