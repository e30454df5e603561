"""The options of ``unicron agent`` and ``unicron coordinator`` that say where the web page is served."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from unicron_elastic.launcher.export.listen_address import ListenAddress, asked_address
from unicron_elastic.launcher.export.web.source import ClusterSource
from unicron_elastic.metrics.figures import PlanFigures
from unicron_elastic.rendezvous.cluster.presence import ClusterPresence
from unicron_elastic.rendezvous.store.interface import Store

if TYPE_CHECKING:
    from unicron_elastic.launcher.export.web.server import WebServer
    from unicron_elastic.metrics.figures import PlanFigures
    from unicron_elastic.rendezvous.cluster.presence import ClusterPresence
    from unicron_elastic.rendezvous.store.address import StoreAddress
    from unicron_elastic.rendezvous.store.interface import Store


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
    return asked_address("web", given_port, given_address, environ)


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
