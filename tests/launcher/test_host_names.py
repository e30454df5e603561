"""Who asks by a name that a page on the internet may have is not answered; all who scrape are."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicron_elastic.launcher.common.host_names import HostNames
from unicron_elastic.launcher.common.http import LOOPBACK
from unicron_elastic.launcher.export.metrics.server import Answers, MetricsServer


@pytest.fixture
def names(tmp_path: Path) -> HostNames:
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 10.0.0.10\nsearch train.svc.k8s.example.com k8s.example.com.\noptions ndots:5\n")
    return HostNames("metrics.example.org", resolver=resolver, own=lambda: ["node-7", "Node-7.hpc.example.edu."])


@pytest.mark.parametrize(
    "host",
    [
        "", "10.2.3.4:9400", "10.2.3.4", "[::1]:9400", "[fe80::1%eth0]:9400", "::1", "localhost:9400", "node-7",
        "node-7:9400",
        "unicron-metrics:9400", "unicron-metrics.train.svc:9400", "unicron-metrics.train.svc.cluster.local:9400",
        "10-2-3-4.train.pod.k8s.example.com:9400", "ip-10-2-3-4.eu-west-1.compute.internal:9400",
        "NODE-7.hpc.example.edu:9400",
        "node-7.hpc.example.edu.:9400", "metrics.example.org",
    ],
)  # fmt: skip
def test_what_scrapes_is_answered(names: HostNames, host: str) -> None:
    assert names.knows(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:9400", "node-7.evil.example", "localhost.evil.example", "10.2.3.4.evil.example",
        "k8s.example.com.evil.example", "xk8s.example.com", "svc.evil.example", "metrics.example.org.evil.example",
        "a.b:x",
        "127.0.0.1.nip.io",
    ],
)  # fmt: skip
def test_what_may_be_a_page_on_the_internet_is_not(names: HostNames, host: str) -> None:
    assert not names.knows(host)


def test_a_name_is_looked_up_once_and_only_if_it_is_strange() -> None:
    asked = []
    names = HostNames("0.0.0.0", resolver=Path("/nowhere"), own=lambda: asked.append(1) or ["a.example"])  # type: ignore[func-returns-value]
    assert names.knows("localhost")
    assert not asked
    assert names.knows("a.example")
    assert not names.knows("b.example")
    assert asked == [1]


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    opened = MetricsServer(LOOPBACK, 0, Answers())
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("path", "hosts", "code"),
    [
        ("/metrics", ["evil.example"], 421),
        ("/metrics", ["localhost", "evil.example"], 421),
        ("http://evil.example/metrics", ["localhost"], 404),
        ("/metrics", ["localhost"], 200),
        ("/metrics", ["127.0.0.1:9400"], 200),
        ("/metrics", [], 200),
        ("/healthz", ["evil.example"], 200),  # it tells nothing, and a wrong answer restarts a pod
    ],
)
def test_the_metrics_port(server: MetricsServer, path: str, hosts: list[str], code: int) -> None:
    connection = http.client.HTTPConnection(LOOPBACK, server.port, timeout=20)
    connection.putrequest("GET", path, skip_host=True)
    for host in hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == code
    assert (b"unicron_" in answer.read()) == (code == 200 and path == "/metrics")
    connection.close()
