"""The options of ``unicron agent`` and ``unicron coordinator`` that say where metrics are served."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Annotated

import typer

from unicron_elastic.launcher.common.http import LOOPBACK
from unicron_elastic.launcher.config.answers import BAD_USAGE, fail
from unicron_elastic.launcher.config.options import port
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
    source = "--metrics-port" if given_port is not None else "UNICRON_METRICS_PORT"
    text = environ.get("UNICRON_METRICS_PORT", "0") if given_port is None else given_port
    try:
        number = port(text)
    except ValueError as error:
        fail(BAD_USAGE, f"{source}: {text!r} is not valid; give {error}.")
    address = given_address if given_address is not None else environ.get("UNICRON_METRICS_ADDRESS", LOOPBACK)
    return open_server(address, number, answers, say) if number else None
