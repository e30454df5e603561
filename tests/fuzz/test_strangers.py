"""All that listens serves those who belong, while strangers do what they like; logs, threads and descriptors stay few.

``UNICRON_FUZZ_S`` says for how many seconds the slow test goes on.
"""

from __future__ import annotations

import io
import logging
import os
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from strangers import Stranger, until
from torch.distributed import TCPStore

from unicron_elastic.base.seldom import EVERY_S
from unicron_elastic.launcher.export.metrics.server import Answers, MetricsServer
from unicron_elastic.launcher.export.web.place import CoordinatorPlace
from unicron_elastic.launcher.export.web.server import PageSource, WebServer
from unicron_elastic.launcher.export.web.watcher import Body, body
from unicron_elastic.launcher.node.output_receiver import OutputReceiver, key_for_output
from unicron_elastic.launcher.node.output_sender import _greet
from unicron_elastic.rendezvous.cluster.heartbeat_wire import Hello
from unicron_elastic.rendezvous.cluster.links import Links
from unicron_elastic.rendezvous.job.bound_store import bound_store
from unicron_elastic.state.layout import flatten
from unicron_elastic.state.pull.client import pull
from unicron_elastic.state.pull.server import Held, StateServer

SECRET, KEY = "5e" * 32, b"key"
DEADLINE_S = 10.0
THREADS_MOST = 600  # 64 of a state server, 128 of the web page, 32 of metrics, and those that have just ended
LONG_S = float(os.environ.get("UNICRON_FUZZ_S", "600"))

Well = Callable[[], None]


class _Heartbeats:
    """A coordinator, whose thread polls as an agent's does."""

    def __init__(self) -> None:
        self.opened: set[str] = set()
        self._boss, self._over = self._links("boss", self.opened.add), threading.Event()
        self._boss.leads = True
        self.port = self._boss.port
        self._count = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _links(self, name: str, opened: Callable[[str], None]) -> Links:
        hello = Hello(f"{name}/1", name, "job")
        silent = dict.fromkeys(("on_lost", "on_probed", "on_message"), lambda *_told: None)
        links = Links("127.0.0.1", hello, on_opened=opened, **silent)
        links.secret = SECRET
        return links

    def _run(self) -> None:
        while not self._over.is_set():
            self._boss.poll(0.05)

    def well(self) -> None:
        """An agent that knows the secret is let in."""
        self._count += 1
        opened: list[str] = []
        with closing(self._links(f"one{self._count}", opened.append)) as one:
            end = time.monotonic() + DEADLINE_S
            while not opened:
                assert time.monotonic() < end, "no agent is let in"
                one.connect("boss/1", f"127.0.0.1:{self.port}")
                one.poll(0.05)

    def close(self) -> None:
        self._over.set()
        self._thread.join(DEADLINE_S)
        self._boss.close()


class _State:
    """A process that serves its state."""

    def __init__(self) -> None:
        self._server = StateServer(self, KEY)
        self.port, self.close = self._server.address["tcp"][1], self._server.close

    def hold(self) -> Held:
        return Held(3, *flatten({"w": torch.arange(6.0)}))

    def release(self, _held: Held) -> None:
        pass

    def well(self) -> None:
        """A replica gets the state; as replicas do, it tries again."""

        def is_served() -> bool:
            try:
                pull([{**self._server.address, "unix": ""}], KEY, step=3, timeout_s=DEADLINE_S).release()
            except Exception:
                return False
            return True

        assert until(is_served, DEADLINE_S), "no replica is served"


class _Output:
    """Who shows the output of other hosts."""

    def __init__(self) -> None:
        self._receiver = OutputReceiver(SECRET, io.BytesIO(), io.BytesIO(), host="127.0.0.1", beat_s=1.0)
        self.port, self.close = self._receiver.port, self._receiver.close

    def well(self) -> None:
        """A node is let in."""

        def is_greeted() -> bool:
            try:
                with socket.create_connection(("127.0.0.1", self.port), DEADLINE_S) as sock:
                    _greet(sock, key_for_output(SECRET), "n1", time.monotonic() + DEADLINE_S)
            except (OSError, ValueError):
                return False
            return True

        assert until(is_greeted, DEADLINE_S), "no node is let in"


class _Page(PageSource):
    def secret(self) -> str:
        return SECRET

    def whereabouts(self) -> CoordinatorPlace:
        return CoordinatorPlace(leads=True)

    def state(self) -> Body:
        return body({})

    def waf(self, span: str) -> Body:  # noqa: ARG002 - the base class's signature
        return body({})


def _answers(port: int, path: str) -> Well:
    def well() -> None:
        def is_answered() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_S) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        assert until(is_answered, DEADLINE_S), f"{path} is not answered"

    return well


class _Store:
    """The store of a round: torch's, which we bind."""

    def __init__(self) -> None:
        self._store = bound_store("127.0.0.1", timedelta(seconds=DEADLINE_S))
        self.port = self._store.port

    def well(self) -> None:
        """Others reach it."""
        TCPStore("127.0.0.1", self.port, None, False, timedelta(seconds=DEADLINE_S), wait_for_workers=False).set(
            "a", "b"
        )

    def close(self) -> None:
        del self._store


@pytest.fixture
def listening() -> Iterator[dict[int, Well]]:
    """By port, what must go on there."""
    with ExitStack() as opened:
        found: dict[int, Well] = {}
        for each in (_Heartbeats(), _State(), _Output(), _Store()):
            opened.callback(each.close)
            found[each.port] = each.well
        metrics, page = MetricsServer("127.0.0.1", 0, Answers()), WebServer("127.0.0.1", 0, _Page())
        opened.callback(metrics.close)
        opened.callback(page.close)
        found[metrics.port], found[page.port] = _answers(metrics.port, "/healthz"), _answers(page.port, "/")
        yield found


@pytest.mark.timeout(LONG_S + 120)
@pytest.mark.parametrize("seconds", [0.5, pytest.param(LONG_S, marks=pytest.mark.slow)])
def test_those_who_belong_are_served(
    listening: dict[int, Well], seconds: float, caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    seed = 6 if seconds < LONG_S else random.randrange(1 << 32)
    began_at, over = time.monotonic(), threading.Event()
    strangers = [Stranger(port, random.Random(seed + port_number)) for port_number, port in enumerate(listening)]

    def act(stranger: Stranger) -> None:
        while not over.is_set():
            stranger.act()

    threads = [threading.Thread(target=act, args=(each,), daemon=True) for each in strangers]
    for thread in threads:
        thread.start()
    try:
        while time.monotonic() - began_at < seconds:
            for well in listening.values():
                well()
            assert threading.active_count() < THREADS_MOST, f"seed {seed}"
    finally:
        over.set()
        for thread in threads:
            thread.join(DEADLINE_S * 2)
        for each in strangers:
            each.close()
    minutes = 1 + (time.monotonic() - began_at) / EVERY_S
    said = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(said) <= minutes * len(listening), (seed, [each.getMessage() for each in said[:5]])
    assert all(each.getMessage().isprintable() and len(each.getMessage()) < 1000 for each in said)
    assert errors == [], f"seed {seed}"
    assert list(tmp_path.iterdir()) == []
    for well in listening.values():
        well()
    assert until(lambda: threading.active_count() < 40, DEADLINE_S), [each.name for each in threading.enumerate()]
