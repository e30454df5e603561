"""What the web page shows of the cluster that this process is in."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unicron_elastic.launcher.common.http import LOOPBACK
from unicron_elastic.launcher.config.answers import BAD_USAGE, fail
from unicron_elastic.launcher.config.options import port
from unicron_elastic.launcher.export.web.place import CoordinatorPlace, ListenAddress
from unicron_elastic.launcher.export.web.server import PageSource
from unicron_elastic.launcher.export.web.watcher import Body, Watcher
from unicron_elastic.metrics.figures import PlanFigures
from unicron_elastic.rendezvous.cluster.presence import ClusterPresence
from unicron_elastic.rendezvous.records.cluster import web_key
from unicron_elastic.rendezvous.store.interface import Store

if TYPE_CHECKING:
    from unicron_elastic.launcher.export.web.server import WebServer
    from unicron_elastic.metrics.figures import PlanFigures
    from unicron_elastic.rendezvous.cluster.presence import ClusterPresence
    from unicron_elastic.rendezvous.store.address import StoreAddress
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
    from unicron_elastic.launcher.view.cluster.reading import read_overview  # and NumPy, which only a coordinator needs

    ends_at = time.monotonic() + READ_S
    # Never nothing, so that a call that is late says itself what is wrong.
    return read_overview(store, lambda: max(0.05, ends_at - time.monotonic()), time.time(), where=where).to_json()


# The options of ``unicron agent`` and ``unicron coordinator`` that say where the web page is served.


_ALL = ("", "0.0.0.0", "::")

WebPort = Annotated[
    str | None,
    typer.Option(
        metavar="PORT",
        help="Serve the web page of the cluster on this port while this process coordinates it; 0: no "
        "[env: UNICRON_WEB_PORT].",
    ),
]
WebAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST",
        help="The address to serve it on, 0.0.0.0 for all; else 127.0.0.1 [env: UNICRON_WEB_ADDRESS].",
    ),
]


def web_place(
    given_port: str | None, given_address: str | None, environ: Mapping[str, str] = os.environ
) -> ListenAddress | None:
    """Where to listen; None if no page was asked for. A port that is none ends the command with one sentence."""
    source = "--web-port" if given_port is not None else "UNICRON_WEB_PORT"
    text = environ.get("UNICRON_WEB_PORT", "0") if given_port is None else given_port
    try:
        number = port(text)
    except ValueError as error:
        fail(BAD_USAGE, f"{source}: {text!r} is not valid; give {error}.")
    address = given_address if given_address is not None else environ.get("UNICRON_WEB_ADDRESS", LOOPBACK)
    return ListenAddress(address, number) if number else None


def serve_web(
    place: ListenAddress,
    own_address: str,
    say: Callable[[str], None],
    tell_others: Callable[[str], None],
    *,
    open_store: Callable[[], Store],
    presence: Callable[[], ClusterPresence | None],
    leads: Callable[[], bool],
    figures: Callable[[], PlanFigures | None],
    where: StoreAddress,
) -> WebPage | None:
    """The page of this process, or None if there can be none: that is said, and the process goes on without.

    ``own_address``: where others find this host, for a page that listens on all of its addresses; ``tell_others`` is
    told where they find the page, ADDRESS:PORT. The rest is as of ``web_source.ClusterSource``.
    """
    from unicron_elastic.launcher.export.web.server import WebServer

    source = ClusterSource(open_store, presence, leads, figures, str(where))
    try:
        server = WebServer(place.address, place.port, source)
    except OSError as error:
        say(f"No web page is served: {place.text} cannot be listened on ({error.strerror or error}).")
        return None
    source.start()
    found = ListenAddress(own_address if place.address in _ALL else place.address, server.port)
    tell_others(found.text)
    say(f"The web page of the cluster is at {found.url} while this process coordinates; unicron web has its password.")
    return WebPage(server, source)


class WebPage:
    """What is served, until ``close``."""

    def __init__(self, server: WebServer, source: ClusterSource) -> None:
        self._server, self._source = server, source

    def close(self) -> None:
        """Serves no more. May come twice."""
        self._server.close()
        self._source.close()
