"""What an agent of the cluster says: its node's state, its part, its child; and when it is ready. And its options."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import typer
from metric_values import COORDINATION, every_sample

from unicron_elastic.launcher.config.forwarded import environment, shared_arguments
from unicron_elastic.launcher.export.metrics.cluster import AgentMetrics
from unicron_elastic.launcher.export.metrics.serve_metrics import serve_metrics
from unicron_elastic.launcher.export.metrics.server import Answers
from unicron_elastic.launcher.node.planned import child_environment, shared_options
from unicron_elastic.metrics.figures import NodeFigures
from unicron_elastic.metrics.samples import MetricSample, coordination_samples
from unicron_elastic.planning.model.jobs import GivenRates, JobSpec


class Part:
    """Its part in the cluster."""

    def __init__(self, unwell: str = "", not_ready: str = "") -> None:
        self.unwell, self.not_ready = unwell, not_ready

    def samples(self) -> Any:
        return coordination_samples(COORDINATION)

    def why_unwell(self) -> str:
        return self.unwell

    def why_not_ready(self) -> str:
        return self.not_ready


def _agent(state: str, part: Part | None = None, *, stood_s: float = 0.0, kept_out: str = "") -> AgentMetrics:
    child = [each for each in every_sample() if each.metric.name == "unicron_step"]
    return AgentMetrics(
        lambda: part or Part(),  # type: ignore[arg-type,return-value]
        node=lambda: NodeFigures(node="n1", state=state),
        child=lambda: child,
        stood_s=lambda: stood_s,
        why_kept_out=lambda: kept_out,
    )


def test_it_tells_of_its_node_its_part_and_its_child() -> None:
    names = [each.metric.name for each in _agent("working").samples()]
    assert names == [
        *["unicron_node_state"] * 4,
        "unicron_coordinates", "unicron_coordinator_known", "unicron_store_visible", "unicron_lost_nodes_total",
        "unicron_step",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("state", "why_not"),
    [
        ("idle", ""),  # it waits for an order
        ("working", ""),
        ("joining", "The workers of its job start."),
        ("leaving", "The workers of its job end."),
    ],
)
def test_it_is_ready_while_its_workers_run_or_it_waits_for_an_order(state: str, why_not: str) -> None:
    assert _agent(state).why_not_ready() == why_not
    assert _agent(state).why_unwell() == ""


def test_who_may_not_work_is_not_ready() -> None:
    assert _agent("idle", kept_out="It is drained.").why_not_ready() == "It is drained."
    assert _agent("idle", Part(not_ready="No etcd.")).why_not_ready() == "No etcd."


def test_a_loop_that_stands_is_unwell() -> None:
    assert _agent("working", stood_s=61.4).why_unwell() == "The agent's loop has not gone round for 61 s."
    assert _agent("working", Part(unwell="Heartbeats.")).why_unwell() == "Heartbeats."


class Nothing(Answers):
    def samples(self) -> list[MetricSample]:
        return []


def test_without_a_port_nothing_is_served() -> None:
    assert serve_metrics(None, None, Nothing(), pytest.fail, {}) is None
    assert serve_metrics("0", None, Nothing(), pytest.fail, {"UNICRON_METRICS_PORT": "9"}) is None


def test_an_option_or_its_variable_opens_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for given, environ in ((str(port), {}), (None, {"UNICRON_METRICS_PORT": str(port)})):
        opened = serve_metrics(given, None, Nothing(), pytest.fail, environ)
        assert opened is not None
        assert opened.port == port
        opened.close()


def test_an_address_is_that_of_the_option_or_the_variable() -> None:
    said: list[str] = []
    environ = {"UNICRON_METRICS_ADDRESS": "no such host"}
    assert serve_metrics("9400", None, Nothing(), said.append, environ) is None
    assert serve_metrics("9400", "nor this", Nothing(), said.append, environ) is None
    assert [sentence.split(" cannot")[0] for sentence in said] == [
        "No metrics are served: no such host:9400", "No metrics are served: nor this:9400",
    ]  # fmt: skip


@pytest.mark.parametrize("address", ["node1..cluster", f"{'x' * 64}.cluster", "\udcff"])
def test_an_address_that_can_be_no_name_is_said_as_any_that_is_wrong(address: str) -> None:
    said: list[str] = []
    assert serve_metrics("9400", address, Nothing(), said.append, {}) is None
    assert said == [f"No metrics are served: {address}:9400 cannot be listened on ({address!a} is no name of a host)."]


@pytest.mark.parametrize(
    ("given", "environ", "source"),
    [("http", {}, "--metrics-port"), (None, {"UNICRON_METRICS_PORT": "-1"}, "UNICRON_METRICS_PORT")],
)
def test_a_port_that_is_none_ends_the_command(
    given: str | None, environ: dict[str, str], source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as caught:
        serve_metrics(given, None, Nothing(), pytest.fail, environ)
    assert caught.value.exit_code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"unicron: {source}: ")
    assert "give a port from 1 to 65535, or 0 for none." in told


def test_a_job_does_not_get_the_port_of_its_agent_nor_of_who_submitted_it() -> None:
    agents = {"UNICRON_METRICS_PORT": "9400", "UNICRON_METRICS_ADDRESS": "0.0.0.0", "UNICRON_WARM": "off"}
    assert environment(agents) == {"UNICRON_WARM": "off"}
    spec = JobSpec(name="j", command=("train.py",), directory="/", throughput=GivenRates((0.0, 1.0)), env=agents)
    env = child_environment(spec, "n1", {}, agents)
    assert not [name for name in env if name.startswith("UNICRON_METRICS")]
    assert shared_options(["--metrics-port=1", "--metrics_address", "::", "--nnodes=2", "--max-restarts=1"]) == [
        "--max-restarts=1"
    ]
    assert shared_arguments(["--metrics-port", "1", "--metrics_port=2", "t.py", "--metrics-port=3"], 2) == (
        "t.py", "--metrics-port=3",
    )  # fmt: skip
