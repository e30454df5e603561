"""Writes news of a run, and of its incidents on a node, to the store, for people to look at."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from unicron_elastic.base.incident import Incident
from unicron_elastic.rendezvous.records.news import (
    INCIDENTS_FOR_S,
    JOB_NEWS_FOR_S,
    JobNews,
    incidents_key,
    incidents_text,
    job_news_key,
    job_news_text,
    parse_incidents,
    with_incident,
)
from unicron_elastic.rendezvous.store.interface import Entry, LeaseGoneError, Put, Store, StoreError, Write

logger = logging.getLogger(__name__)


class NewsWriter:
    """Of one run, for one thread. What cannot be written is no reason to stop anything: False says so."""

    def __init__(self, store: Callable[[], Store | None], run_id: str) -> None:
        """``store``: the open one; None, if there is none at the moment."""
        self._store = store
        self._key = job_news_key(run_id)
        self._lease_id: int | None = None

    def tell_job(self, news: JobNews) -> bool:
        """Takes the place of what was told of the run before. May take seconds."""
        try:
            store = self._store()
            if store is None:
                return False
            store.put(self._key, job_news_text(news), self._lease(store))
        except (StoreError, LeaseGoneError) as error:
            self._lease_id = None
            logger.debug("%s could not be written: %s.", self._key, error)
            return False
        return True

    def tell_incident(self, incident: Incident) -> bool:
        """Adds it to the last ones of its node, or what is known more of it. May take seconds."""
        try:
            return self._add(incident)
        except (StoreError, LeaseGoneError, ValueError) as error:
            logger.debug("Incident %d could not be told: %s.", incident.number, error)
        return False

    def _lease(self, store: Store) -> int:
        """Lease the run's news for another minute."""
        if self._lease_id is None or store.keep_alive(self._lease_id) is None:
            self._lease_id = store.grant(JOB_NEWS_FOR_S).lease_id
        return self._lease_id

    def _add(self, incident: Incident) -> bool:
        store, key = self._store(), incidents_key(incident.host)
        if store is None:
            return False
        lease_id, old = store.grant(INCIDENTS_FOR_S).lease_id, None

        def added(entry: Entry | None) -> Write:
            nonlocal old
            known: tuple[Incident, ...] = ()
            if entry is not None:
                with contextlib.suppress(ValueError):  # the new ones take its place
                    known = parse_incidents(entry)
            old = None if entry is None else entry.lease_id
            return Write(puts=(Put(key, incidents_text(with_incident(known, incident)), lease_id),))

        store.update(key, added)
        if old is not None:
            store.revoke(old)  # the key hangs on the new one
        return True
