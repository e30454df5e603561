"""Tells the cluster's store how far a job is and what broke, for who looks at all jobs of a cluster.

Looked at is in the event loop; the store, which may not answer for seconds, is written to from a thread of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from unicron_elastic.base.incident import Incident
from unicron_elastic.compat.agent import WorkerGroup
from unicron_elastic.compat.errors import SignalException
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.launcher.view.job.view import LocalJobView
from unicron_elastic.recovery.state import JobState
from unicron_elastic.rendezvous.job.job_rendezvous import JobRendezvous

if TYPE_CHECKING:
    from unicron_elastic.rendezvous.records.news import JobNews
    from unicron_elastic.rendezvous.records.news_writer import NewsWriter


LOOK_S = 5.0
CLOSE_S = 1.0  # so long the end of the agent waits for incidents that are not written yet
_INCIDENTS_MOST = 64  # that wait while the store is away

logger = logging.getLogger(__name__)


class JobTeller:
    """Of one agent. Does nothing unless its rendezvous has a store that others can read."""

    def __init__(self, loop: Loop, handler: JobRendezvous) -> None:
        """``handler`` is the job's rendezvous."""
        self._loop = loop
        self._writer: NewsWriter | None = handler.news_writer()
        self._look: Callable[[], JobNews | None] | None = None
        self._changed = threading.Condition()
        self._news: JobNews | None = None
        self._stepped_unix_s: float | None = None  # as last seen: new workers have made no step, but the job has
        self._incidents = deque[Incident](maxlen=_INCIDENTS_MOST)
        self._is_over = False
        self._thread: threading.Thread | None = None

    def start(self, look: Callable[[], JobNews | None]) -> None:
        """Tells from now on what ``look`` sees; None is not told."""
        if self._writer is not None:
            self._look = look
            self._thread = threading.Thread(target=self._run, args=(self._writer,), name="unicron-teller", daemon=True)
            self._thread.start()
            self._look_on()

    def recorded(self, incident: Incident) -> None:
        """An incident as it was written to the ledger."""
        with self._changed:
            if self._thread is not None:
                self._incidents.append(incident)
                self._changed.notify()

    def close(self) -> None:
        """Tells nothing any more, after the incidents that are known."""
        with self._changed:
            self._is_over = True
            self._look = None
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        self._writer = None  # and lets go of the rendezvous

    def _look_on(self) -> None:
        if self._look is None:
            return
        try:
            news = self._look()
        except SignalException:
            raise
        except Exception:  # a job trains as well when nobody knows how far it is
            logger.debug("The job is not looked at any more", exc_info=True)
            return
        if news is not None:
            self._stepped_unix_s = news.stepped_unix_s or self._stepped_unix_s
            with self._changed:
                self._news = replace(news, stepped_unix_s=self._stepped_unix_s)
                self._changed.notify()
        self._loop.call_at(time.monotonic() + LOOK_S, self._look_on)

    def _run(self, writer: NewsWriter) -> None:
        while (what := self._next()) is not None:
            try:
                if isinstance(what, Incident):
                    writer.tell_incident(what)
                else:
                    writer.tell_job(what)
            except Exception:
                logger.debug("News of the job could not be told", exc_info=True)

    def _next(self) -> Incident | JobNews | None:
        """What to tell; incidents first, and those at the end as well. None: it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._news is not None or bool(self._incidents))
            if self._incidents:
                return self._incidents.popleft()
            news, self._news = self._news, None
            return None if self._is_over else news


def news_of(view: LocalJobView, state: JobState, group: WorkerGroup) -> JobNews | None:
    """How far the job is, as its first node sees it; None on the other nodes."""
    from unicron_elastic.rendezvous.records.news import JobNews

    world = state.world
    leads = world is not None and bool(world.members) and world.members[0].node == state.node
    is_first = group.group_rank == 0 if world is None else leads
    if not is_first or not view.workers:
        return None
    now, now_unix_s = time.monotonic(), time.time()
    return JobNews(
        at_unix_s=now_unix_s,
        step=view.step,
        step_s=view.step_time_s,
        stepped_unix_s=None if view.last_step_at is None else now_unix_s - (now - view.last_step_at),
        world=0 if world is None else world.number,
        nodes=view.nodes,
        workers=view.world_size if world is None else world.size,
        restarts_used=view.restarts_used,
        max_restarts=view.max_restarts,
        is_incident_open=view.is_incident_open,
    )
