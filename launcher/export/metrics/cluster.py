"""What an agent of the cluster, or a coordinator, says of itself: its part in the cluster, its node, and its child."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from unicron_elastic.launcher.export.metrics.server import Answers
from unicron_elastic.metrics.figures import NodeFigures
from unicron_elastic.metrics.samples import MetricSample, node_samples
from unicron_elastic.rendezvous.cluster.cluster_answers import ClusterAnswers

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
