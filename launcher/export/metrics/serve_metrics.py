"""The options of ``unicron agent`` and ``unicron coordinator`` that say where metrics are served."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from unicron_elastic.launcher.export.listen_address import asked_address
from unicron_elastic.launcher.export.metrics.server import Answers, MetricsServer, open_server

MetricsPort = Annotated[
    str | None,
    typer.Option(
        metavar="PORT",
        help="Serve metrics for Prometheus at /metrics, and /healthz and /readyz, on this port; 0: no "
        "[env: UNICRON_METRICS_PORT].",
    ),
]
MetricsAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST",
        help="The address to serve them on, 0.0.0.0 for all; else 127.0.0.1 [env: UNICRON_METRICS_ADDRESS].",
    ),
]


def serve_metrics(
    given_port: str | None,
    given_address: str | None,
    answers: Answers,
    say: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> MetricsServer | None:
    """The server that was asked for; None if none was, or if there can be none, which is said.

    A port that is none ends the command with one sentence.
    """
    place = asked_address("metrics", given_port, given_address, environ)
    return open_server(place.address, place.port, answers, say) if place is not None else None
