"""What the web page shows of the cluster that this process is in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from unicron_elastic.launcher.export.listen_address import ListenAddress
from unicron_elastic.launcher.export.web.place import CoordinatorPlace
from unicron_elastic.launcher.export.web.server import PageSource
from unicron_elastic.launcher.export.web.watcher import Body, Watcher
from unicron_elastic.metrics.figures import PlanFigures
from unicron_elastic.rendezvous.cluster.presence import ClusterPresence
from unicron_elastic.rendezvous.records.cluster import web_key
from unicron_elastic.rendezvous.store.interface import Store

if TYPE_CHECKING:
    from unicron_elastic.metrics.figures import PlanFigures
    from unicron_elastic.rendezvous.cluster.presence import ClusterPresence
    from unicron_elastic.rendezvous.store.interface import Store


READ_S = 4.0  # for all that is asked of etcd


class ClusterSource(PageSource):
    """From ``start`` to ``close``."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        presence: Callable[[], ClusterPresence | None],
        leads: Callable[[], bool],
        figures: Callable[[], PlanFigures | None],
        where: str,
    ) -> None:
        """``presence``: None as long as it has not entered; ``leads``: whether this process coordinates.

        ``where``: the store, for people.
        """
        self._presence, self._leads = presence, leads
        self._watcher = Watcher(open_store, lambda store: read_state(store, where), figures)

    def start(self) -> None:
        """Begins to look."""
        self._watcher.start()

    def secret(self) -> str:
        """Return the secret as it was last seen in the store."""
        presence = self._presence()
        return "" if presence is None else presence.known_secret()

    def whereabouts(self) -> CoordinatorPlace:
        """Return where the page is served, as the store was last seen."""
        presence = self._presence()
        if self._leads():
            return CoordinatorPlace(leads=True)
        leader = None if presence is None else presence.leader
        if presence is None or leader is None:
            return CoordinatorPlace(leads=False)
        try:
            place = ListenAddress.parse(presence.get(web_key(leader.node_id)) or "")
        except ValueError:
            place = None
        return CoordinatorPlace(False, leader.host, place)

    def state(self) -> Body:
        """Return the state as the thread that looks has it."""
        return self._watcher.state()

    def waf(self, span: str) -> Body:
        """Return WAF as the thread that looks has it."""
        return self._watcher.waf(span)

    def close(self) -> None:
        """Looks no more. May come twice."""
        self._watcher.close()


def read_state(store: Store, where: str) -> Mapping[str, Any]:
    """All that the page shows but the WAF over time. Raises StoreError."""
    from unicron_elastic.launcher.view.cluster.reading import overview_of  # and NumPy, which only a coordinator needs

    return overview_of(store.read_prefix("", timeout_s=READ_S), time.time(), where=where).to_json()
