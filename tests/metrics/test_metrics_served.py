"""The server: what it writes is valid and complete, it waits for nobody, and what it cannot do it says."""

from __future__ import annotations

import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from metric_values import ODD, every_sample
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from unicron_elastic.launcher.common.http import LOOPBACK
from unicron_elastic.launcher.export.metrics import server as metrics_server
from unicron_elastic.launcher.export.metrics.server import REQUESTS_MOST, Answers, MetricsServer, open_server
from unicron_elastic.metrics.definitions import METRICS
from unicron_elastic.metrics.samples import MetricSample

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Said(Answers):
    """Answers that a test sets."""

    def __init__(self) -> None:
        self.unwell = self.not_ready = ""
        self.told: Callable[[], Iterable[MetricSample]] = every_sample

    def samples(self) -> Iterable[MetricSample]:
        return self.told()

    def why_unwell(self) -> str:
        return self.unwell

    def why_not_ready(self) -> str:
        return self.not_ready


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def server(said: Said) -> Iterator[MetricsServer]:
    opened = MetricsServer(LOOPBACK, 0, said)
    yield opened
    opened.close()


def get(server: MetricsServer, path: str, accept: str = "", method: str = "GET") -> tuple[int, str, str]:
    """Status, content type and body."""
    url = f"http://{LOOPBACK}:{server.port}{path}"
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


def test_every_metric_of_the_reference_is_served_and_no_other(server: MetricsServer) -> None:
    _, content_type, text = get(server, "/metrics", OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_openmetrics(text)}
    served = {sample.name for family in families.values() for sample in family.samples}
    assert served == {series for metric in METRICS for series in metric.series}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total").removesuffix("_info")]
        assert (family.type, family.documentation, family.unit) == (metric.kind, metric.help, metric.unit)
        of_bucket = {"le"} if metric.is_histogram else set()
        for sample in family.samples:
            assert set(sample.labels) - of_bucket == set(metric.labels), sample


def test_both_formats_say_the_same(server: MetricsServer) -> None:
    _, content_type, text = get(server, "/metrics")
    assert content_type.startswith("text/plain; version=")
    plain = {(s.name, *sorted(s.labels.items())): s.value for family in parse_text(text) for s in family.samples}
    _, _, text = get(server, "/metrics", OPENMETRICS)
    assert plain == {
        (s.name, *sorted(s.labels.items())): s.value for family in parse_openmetrics(text) for s in family.samples
    }


def test_buckets_count_up(server: MetricsServer) -> None:
    _, _, text = get(server, "/metrics", OPENMETRICS)
    (family,) = (each for each in parse_openmetrics(text) if each.name == "unicron_recovery_time_seconds")
    buckets = {each.labels["le"]: each.value for each in family.samples if each.name.endswith("_bucket")}
    assert (buckets["5.0"], buckets["10.0"], buckets["30.0"], buckets["+Inf"]) == (0, 1, 1, 1)
    assert {each.name.rpartition("_")[2]: each.value for each in family.samples if "le" not in each.labels} == {
        "count": 1, "sum": 7.5,
    }  # fmt: skip


def test_labels_are_escaped(server: MetricsServer, said: Said) -> None:
    said.told = lambda: every_sample(run_id=ODD)
    for accept, parse in ((OPENMETRICS, parse_openmetrics), ("", parse_text)):
        _, _, text = get(server, "/metrics", accept)
        assert {s.labels["run_id"] for f in parse(text) for s in f.samples if s.name == "unicron_step"} == {ODD}


def test_health_and_readiness(server: MetricsServer, said: Said) -> None:
    for path in ("/healthz", "/readyz"):
        assert get(server, path)[::2] == (200, "ok\n")
    said.unwell, said.not_ready = "The loop stands.", "Nothing runs."
    assert get(server, "/healthz")[::2] == (503, "The loop stands.\n")
    assert get(server, "/readyz")[::2] == (503, "Nothing runs.\n")
    assert get(server, "/metrics")[0] == 200  # it is told all the same


def test_other_paths_and_methods(server: MetricsServer) -> None:
    assert get(server, "/")[::2] == (404, "There are /metrics, /healthz and /readyz.\n")
    assert get(server, "/healthz?probe=1")[0] == 200
    assert get(server, "/metrics", method="HEAD")[::2] == (200, "")
    assert get(server, "/metrics", method="POST")[0] == 501


def test_an_error_in_telling_is_an_answer(server: MetricsServer, said: Said, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> list[MetricSample]:
        raise RuntimeError("a bug")

    said.told = fail
    assert get(server, "/metrics")[::2] == (500, "An error; the log has it.\n")
    assert "a bug" in caplog.text
    said.told = every_sample
    assert get(server, "/metrics")[0] == 200


@pytest.mark.parametrize("said_first", [b"", b"GET /healthz HTTP/1.1\r\nHost: ", b"\r\n"])
def test_clients_that_say_nothing_keep_nobody_from_being_answered(server: MetricsServer, said_first: bytes) -> None:
    """However many they are: who is silent for the longest time makes room."""
    silent = []
    for _ in range(4 * REQUESTS_MOST):
        silent.append(socket.create_connection((LOOPBACK, server.port)))
        silent[-1].sendall(said_first)
        if len(silent) >= REQUESTS_MOST:
            assert get(server, "/healthz")[0] == 200
            assert get(server, "/metrics")[0] == 200
    for each in silent:
        each.close()


def test_too_many_at_a_time_are_turned_away_but_for_those_who_ask_for_health(server: MetricsServer, said: Said) -> None:
    asked, may_go_on = threading.Semaphore(0), threading.Event()

    def slow() -> list[MetricSample]:
        asked.release()
        assert may_go_on.wait(20)
        return []

    said.told = slow
    threads = [threading.Thread(target=get, args=(server, "/metrics"), daemon=True) for _ in range(REQUESTS_MOST)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert asked.acquire(timeout=20)
    assert get(server, "/metrics")[::2] == (503, "Too many ask at this moment.\n")
    assert get(server, "/healthz")[0] == get(server, "/readyz")[0] == 200
    may_go_on.set()
    for thread in threads:
        thread.join(20)
    assert get(server, "/metrics")[0] == 200


def test_a_descriptor_that_is_wanting_does_not_stop_it(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()
    accept = socket.socket.accept

    def fail(_self: socket.socket) -> Any:
        tried.set()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", fail)
    with socket.create_connection((LOOPBACK, server.port)):
        assert tried.wait(20)
        monkeypatch.setattr(socket.socket, "accept", accept)
        assert get(server, "/healthz")[0] == 200


def test_threads_that_are_wanting_do_not_use_up_its_places(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, tried = threading.Thread.start, []

    def fail(self: threading.Thread) -> None:
        tried.append(self)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    for _ in range(2 * REQUESTS_MOST):
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            get(server, "/healthz")
    assert len(tried) == 2 * REQUESTS_MOST
    monkeypatch.setattr(threading.Thread, "start", start)
    assert get(server, "/healthz")[0] == 200


def test_a_closed_server_listens_no_more_and_its_port_is_free(said: Said) -> None:
    first = MetricsServer(LOOPBACK, 0, said)
    assert get(first, "/healthz")[0] == 200
    first.close()
    first.close()
    with pytest.raises(urllib.error.URLError):
        get(first, "/healthz")
    second = MetricsServer(LOOPBACK, first.port, said)
    assert get(second, "/healthz")[0] == 200
    second.close()


def test_a_port_that_is_taken_is_one_sentence(said: Said, server: MetricsServer) -> None:
    sentences: list[str] = []
    assert open_server(LOOPBACK, server.port, said, sentences.append) is None
    where = f"127.0.0.1:{server.port}"
    assert sentences == [f"No metrics are served: {where} cannot be listened on (Address already in use)."]


def test_an_address_that_is_none_is_one_sentence(said: Said) -> None:
    sentences: list[str] = []
    assert open_server("no such host", 9400, said, sentences.append) is None
    assert len(sentences) == 1
    assert sentences[0].startswith("No metrics are served: no such host:9400 cannot be listened on (")


def test_a_missing_library_is_one_sentence(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server.importlib.util, "find_spec", lambda _name: None)
    sentences: list[str] = []
    assert open_server(LOOPBACK, 9400, said, sentences.append) is None
    assert sentences == [
        (
            "No metrics are served: prometheus_client is not installed; "
            "install it, in the checkout of unicron-elastic: pip install -e '.[metrics]'."
        )
    ]


def test_a_broken_library_is_one_sentence(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client.registry", None)
    sentences: list[str] = []
    assert open_server(LOOPBACK, 9400, said, sentences.append) is None
    assert len(sentences) == 1
    assert "cannot be imported" in sentences[0]


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_an_address_of_ipv6(said: Said) -> None:
    opened = open_server("::1", 0, said, pytest.skip)
    assert opened is not None
    with urllib.request.urlopen(f"http://[::1]:{opened.port}/healthz", timeout=10) as answer:
        assert answer.status == 200
    opened.close()
