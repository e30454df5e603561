"""Serves /metrics, /healthz and /readyz from threads of its own, which wait for nothing in the process they tell of.

Whoever asks too much is turned away: at most a few requests at a time, and none for longer than some seconds.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from typing import Any

from unicron_elastic import __version__
from unicron_elastic.metrics.definitions import METRICS, RECOVERY_BUCKETS_S, Metric
from unicron_elastic.metrics.figures import Distribution
from unicron_elastic.metrics.samples import Sample, process_samples

__all__ = ["LOOPBACK", "Answers", "MetricsServer", "open_server"]

LOOPBACK = "127.0.0.1"
REQUEST_S = 5.0  # for a client to send its request and take the answer
REQUESTS_MOST = 8  # at a time
PAUSE_S = 0.1  # after a request that could not be taken
_BOUNDS = (*map(str, RECOVERY_BUCKETS_S), "+Inf")

logger = logging.getLogger(__name__)


class Answers:
    """What a process says of itself; asked from the server's threads, so each answer must be at hand."""

    def samples(self) -> Iterable[Sample]:
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
        say("No metrics are served: prometheus_client is not installed; pip install 'unicron-elastic[metrics]' has it.")
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
        by_metric: dict[Metric, list[Sample]] = {}
        for sample in (*process_samples(__version__), *self._answers.samples()):
            by_metric.setdefault(sample.metric, []).append(sample)
        for metric in METRICS:
            if metric in by_metric:
                yield _family(metric, by_metric[metric])


def _family(metric: Metric, samples: Iterable[Sample]) -> Any:
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


def _histogram(found: Any, samples: Iterable[Sample]) -> Any:
    """The library wants how many values were at most each bound."""
    for sample in samples:
        assert isinstance(sample.value, Distribution)
        counts = accumulate(sample.value.counts)
        buckets = [(bound, float(count)) for bound, count in zip(_BOUNDS, counts, strict=True)]
        found.add_metric(sample.labels, buckets, sample.value.total)
    return found


class _Server(ThreadingHTTPServer):
    """Answers several at a time, and never more than that."""

    request_queue_size = 64
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True  # of a process that has just ended; another one that listens is noticed all the same

    def __init__(self, address: str, port: int, registry: Any, answers: Answers) -> None:
        """Raises OSError."""
        self.registry, self.answers = registry, answers
        self._free = threading.BoundedSemaphore(REQUESTS_MOST)
        self._is_over = False
        family, _, _, _, where = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )[0]
        self.address_family = family
        super().__init__((str(where[0]), int(where[1])), _Handler)

    def server_bind(self) -> None:
        """Without the base class's look-up of a host name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def serve(self) -> None:
        """Until ``end``, which needs no look at a clock: a socket that is shut down can be read."""
        while not self._is_over:
            try:
                self.handle_request()
            except (OSError, ValueError):  # it was closed in this moment
                if not self._is_over:
                    raise

    def end(self) -> None:
        """Ends ``serve``."""
        self._is_over = True
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed before
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            if not self._is_over:
                time.sleep(PAUSE_S)  # without a descriptor for it, who waits would be seen again at once
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - the base class's signature
        return self._free.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except BaseException:  # there is no thread for it
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - the base class's signature
        logger.debug("A request for metrics was broken off", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version = f"unicron/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        """One of the three."""
        path = self.path.partition("?")[0]
        try:
            match path:
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
            logger.warning("%s could not be answered", path, exc_info=True)
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
