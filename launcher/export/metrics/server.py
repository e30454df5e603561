"""Serves /metrics, /healthz and /readyz from threads of its own, which wait for nothing in the process they tell of."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler
from itertools import accumulate
from typing import Any

from unicron_elastic import __version__
from unicron_elastic.base.extras import install_with
from unicron_elastic.launcher.common.host_names import HostNames
from unicron_elastic.launcher.common.http import BoundedServer
from unicron_elastic.metrics.definitions import METRICS, RECOVERY_BUCKETS_S, Metric
from unicron_elastic.metrics.figures import Distribution
from unicron_elastic.metrics.samples import MetricSample, process_samples

REQUEST_S = 5.0  # for a client to send its request and take the answer
REQUESTS_MOST = 8  # that are read at a time, and as many that are answered
_OF_ANOTHER = b"This is no name of this host; ask by its address, its name, or one in a domain that it searches.\n"
_BOUNDS = (*map(str, RECOVERY_BUCKETS_S), "+Inf")


class Answers:
    """What a process says of itself; asked from the server's threads, so each answer must be at hand."""

    def samples(self) -> Iterable[MetricSample]:
        """All that is known now."""
        return ()

    def why_unwell(self) -> str:
        """Why this process should be ended, as a sentence; "" if it is well."""
        return ""

    def why_not_ready(self) -> str:
        """Why it does not do its work now, as a sentence; "" if it does."""
        return ""


class MetricsServer:
    """From its making to ``close``."""

    def __init__(self, address: str, port: int, answers: Answers) -> None:
        """Port 0 is one of the system's choice. Raises OSError if it cannot be listened on, ImportError."""
        from prometheus_client.registry import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(answers))
        self._server = _Server(address, port, registry, answers)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve, name="unicron-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listens no more. May come twice."""
        self._server.end()
        self._thread.join(1.0)


def open_server(address: str, port: int, answers: Answers, say: Callable[[str], None]) -> MetricsServer | None:
    """A server, or None if there can be none: that is said, and whoever asks for it goes on without."""
    if importlib.util.find_spec("prometheus_client") is None:
        say(f"No metrics are served: prometheus_client is not installed; install it, {install_with('metrics')}.")
        return None
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    try:
        return MetricsServer(address, port, answers)
    except OSError as error:
        say(f"No metrics are served: {where} cannot be listened on ({error.strerror or error}).")
    except ImportError as error:
        say(f"No metrics are served: prometheus_client cannot be imported ({error}).")
    return None


class _Collector:
    """Turns samples into what the client library writes: names, labels and escapes are its business."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    def collect(self) -> Iterator[Any]:
        by_metric: dict[Metric, list[MetricSample]] = {}
        for sample in (*process_samples(__version__), *self._answers.samples()):
            by_metric.setdefault(sample.metric, []).append(sample)
        for metric in METRICS:
            if metric in by_metric:
                yield _family(metric, by_metric[metric])


def _family(metric: Metric, samples: Iterable[MetricSample]) -> Any:
    from prometheus_client import core

    name = metric.name.removesuffix("_total").removesuffix("_info")
    if metric.kind == "info":
        info = core.InfoMetricFamily(name, metric.help, labels=())
        for sample in samples:
            info.add_metric((), dict(zip(metric.labels, sample.labels, strict=True)))
        return info
    if metric.is_histogram:
        return _histogram(
            core.HistogramMetricFamily(name, metric.help, labels=metric.labels, unit=metric.unit), samples
        )
    kind = core.CounterMetricFamily if metric.kind == "counter" else core.GaugeMetricFamily
    found = kind(name, metric.help, labels=metric.labels, unit=metric.unit)
    for sample in samples:
        assert not isinstance(sample.value, Distribution)
        found.add_metric(sample.labels, sample.value)
    return found


def _histogram(found: Any, samples: Iterable[MetricSample]) -> Any:
    """The library wants how many values were at most each bound."""
    for sample in samples:
        assert isinstance(sample.value, Distribution)
        counts = accumulate(sample.value.counts)
        buckets = [(bound, float(count)) for bound, count in zip(_BOUNDS, counts, strict=True)]
        found.add_metric(sample.labels, buckets, sample.value.total)
    return found


class _Server(BoundedServer):
    """What its handlers need."""

    def __init__(self, address: str, port: int, registry: Any, answers: Answers) -> None:
        """Raises OSError."""
        self.registry, self.answers = registry, answers
        self.names = HostNames(address)
        super().__init__(address, port, _Handler, requests_most=REQUESTS_MOST, request_s=REQUEST_S)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version = f"unicron/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        """One of the three. Those who ask for health are answered however many ask for metrics."""
        path = self.path.partition("?")[0]
        has_room = self.server.has_asked(self.connection)
        try:
            match path:
                case "/metrics" if not all(map(self.server.names.knows, self.headers.get_all("Host", [""]))):
                    self._answer(421, "text/plain; charset=utf-8", _OF_ANOTHER)
                case "/metrics" if not has_room:
                    self._answer(503, "text/plain; charset=utf-8", b"Too many ask at this moment.\n")
                case "/metrics":
                    self._metrics()
                case "/healthz":
                    self._state(self.server.answers.why_unwell())
                case "/readyz":
                    self._state(self.server.answers.why_not_ready())
                case _:
                    self._answer(404, "text/plain; charset=utf-8", b"There are /metrics, /healthz and /readyz.\n")
        except OSError:
            raise  # the client is gone
        except Exception:  # what is told must not depend on what goes wrong in telling it
            self.server.log_error(f"{path} could not be answered.")
            self._answer(500, "text/plain; charset=utf-8", b"An error; the log has it.\n")

    do_HEAD = do_GET

    def _metrics(self) -> None:
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        self._answer(200, content_type, encode(self.server.registry))

    def _state(self, why_not: str) -> None:
        self._answer(503 if why_not else 200, "text/plain; charset=utf-8", f"{why_not or 'ok'}\n".encode())

    def _answer(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's signature
        """Nothing: a scrape is no news."""
