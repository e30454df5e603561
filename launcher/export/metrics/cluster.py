"""What an agent of the cluster, or a coordinator, says of itself: its part in the cluster, its node, and its child."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated

import typer

from unicron_elastic.launcher.common.http import LOOPBACK
from unicron_elastic.launcher.config.answers import BAD_USAGE, fail
from unicron_elastic.launcher.config.options import port
from unicron_elastic.launcher.export.metrics.server import Answers, MetricsServer, open_server
from unicron_elastic.metrics.figures import NodeFigures
from unicron_elastic.metrics.samples import MetricSample, node_samples
from unicron_elastic.rendezvous.cluster.node import ClusterAnswers

UNWELL_S = 60.0  # without a turn of an agent's loop, which waits for the store now and then
_NOT_READY = {"joining": "The workers of its job start.", "leaving": "The workers of its job end."}


class CoordinatorMetrics(Answers):
    """Of a coordinator without a node."""

    def __init__(self, cluster: Callable[[], ClusterAnswers]) -> None:
        """``cluster`` tells what is known of the cluster now."""
        self._cluster = cluster

    def samples(self) -> Iterator[MetricSample]:
        """The cluster's."""
        yield from self._cluster().samples()

    def why_unwell(self) -> str:
        """A loop of it stands."""
        return self._cluster().why_unwell()

    def why_not_ready(self) -> str:
        """Say why not: it neither coordinates nor follows."""
        return self._cluster().why_not_ready()


class AgentMetrics(CoordinatorMetrics):
    """Of an agent with a node. It is ready if its job's workers run, or if it waits for an order."""

    def __init__(
        self,
        cluster: Callable[[], ClusterAnswers],
        *,
        node: Callable[[], NodeFigures],
        child: Callable[[], Iterable[MetricSample]],
        stood_s: Callable[[], float],
        why_kept_out: Callable[[], str],
    ) -> None:
        """``child``: what its job's part of this node said last; ``stood_s``: since its loop last went round."""
        super().__init__(cluster)
        self._node = node
        self._child = child
        self._stood_s = stood_s
        self._why_kept_out = why_kept_out

    def samples(self) -> Iterator[MetricSample]:
        """Its node's, the cluster's, and its job's."""
        yield from node_samples(self._node())
        yield from super().samples()
        yield from self._child()

    def why_unwell(self) -> str:
        """A loop of it stands."""
        if (stood_s := self._stood_s()) > UNWELL_S:
            return f"The agent's loop has not gone round for {stood_s:.0f} s."
        return super().why_unwell()

    def why_not_ready(self) -> str:
        """No workers run here, and it waits for no order."""
        return super().why_not_ready() or self._why_kept_out() or _NOT_READY.get(self._node().state, "")


# The options of ``unicron agent`` and ``unicron coordinator`` that say where metrics are served.


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
