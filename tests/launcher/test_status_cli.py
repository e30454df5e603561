"""``unicron status`` on a store in memory: exit codes, plain text and JSON, and what is said if nobody can be asked."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from overview_lab import node, overview
from plan_lab import NOW, publish, put_cluster, two_jobs
from rich.console import Console
from test_overview_reading import NEWS
from typer.testing import CliRunner

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.launcher.cli import app
from unicron_elastic.launcher.commands import show as status_show
from unicron_elastic.launcher.commands import status as status_cli
from unicron_elastic.launcher.commands.cluster import OpenCluster
from unicron_elastic.launcher.view.cluster.plan import plan_reading
from unicron_elastic.rendezvous.records import news
from unicron_elastic.rendezvous.records.cluster import (
    LEADER,
    LeaderRecord,
    leader_text,
    quarantine_key,
    quarantine_text,
)
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import Store
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd
from unicron_elastic.testing.memory_store import MemoryServer, MemoryStore

NAMED_BINARY = os.environ.get("UNICRON_TEST_ETCD")


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(time.monotonic)


@pytest.fixture
def store(server: MemoryServer, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Two jobs that train, and that the commands look at."""
    opened = MemoryStore(server)

    @contextmanager
    def open_it(*_: object) -> Iterator[OpenCluster]:
        yield OpenCluster(partial(MemoryStore, server), "here")

    monkeypatch.setattr(status_cli, "open_cluster", open_it)
    monkeypatch.setattr(status_cli.time, "time", lambda: NOW)
    opened.put(LEADER, leader_text(LeaderRecord(node_id="n1/agent", host="n1", address="10.0.0.1:4000")))
    put_cluster(opened, two_jobs())
    publish(opened, plan_reading(opened.read_prefix(""), NOW).snapshot, NOW - 60.0)
    opened.delete("plan/nodes/n6%2Fagent")  # idle: it would be on its way
    publish(opened, plan_reading(opened.read_prefix(""), NOW).snapshot, NOW - 60.0)
    opened.put(news.job_news_key("chat"), news.job_news_text(NEWS))
    return opened


def _status(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["status", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.usefixtures("store")
def test_all_well_is_0():
    result = _status()
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("FINE  here  ")
    assert "Both jobs train." in result.stdout
    assert "1,842" in result.stdout
    assert "\x1b" not in result.stdout


def test_something_degraded_is_1(store):
    kept = Quarantined(node="n5", reason="XID 79", since=NOW - 5.0, until=None, by="unicron-run", is_broken=True)
    store.put(quarantine_key("n5"), quarantine_text(kept))
    result = _status()
    assert result.exit_code == 1
    assert result.stdout.startswith("DEGRADED  here  ")


def test_something_critical_is_2(store):
    store.put(news.job_news_key("chat"), news.job_news_text(replace(NEWS, stepped_unix_s=NOW - 3600.0)))
    result = _status("--json")
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert told["verdict"]["level"] == "critical"
    assert told["verdict"]["problems"][0]["kind"] == "stands"
    assert told["verdict"]["reason"] == "chat has made no step for 60 minutes."


def test_a_cluster_that_cannot_be_read_is_3_and_says_where_other_jobs_are_seen():
    result = _status("--endpoint", "localhost:1")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "refuses connections" in result.stderr
    assert "A job whose nodes meet without etcd" in result.stderr


@pytest.mark.parametrize("endpoint", ["nonsense:port", "http://"])
def test_an_endpoint_that_is_none_is_no_verdict_either(endpoint):
    assert _status("--endpoint", endpoint).exit_code == 3


def _watched(monkeypatch: pytest.MonkeyPatch, *arguments: str, after: list[Any]) -> Any:
    """Of --watch, with something done before each look but the first; then Ctrl-C."""
    todo = iter(after)

    def sleep(_: float) -> None:
        step = next(todo, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    clock = SimpleNamespace(sleep=sleep, time=time.time, monotonic=time.monotonic)  # others sleep as they did
    monkeypatch.setattr(status_cli, "time", clock)
    return _status("--watch", *arguments)


def test_a_log_gets_what_changes_and_the_last_verdict(store, monkeypatch):
    def lose() -> None:
        store.delete("plan/nodes/n2%2Fagent")

    result = _watched(monkeypatch, after=[lambda: None, lose, lambda: None])
    first, _, later = result.stdout.partition("\n2027-")
    assert first.startswith("FINE")
    lines = [line.split("  ", 1)[1] for line in f"2027-{later}".splitlines()]
    assert lines == ["n2: is gone.", "Job chat: 2 of 3 nodes.", "DEGRADED: chat trains on 2 of 3 nodes."]
    assert result.exit_code == 1


def test_json_has_a_line_for_each_change(store, monkeypatch):
    result = _watched(monkeypatch, "--json", after=[lambda: None, lambda: store.delete("plan/nodes/n2%2Fagent")])
    looks = [json.loads(line) for line in result.stdout.splitlines()]
    assert [look["verdict"]["level"] for look in looks] == ["fine", "degraded"]
    assert [look["changes"][:1] for look in looks] == [[], ["n2: is gone."]]


@pytest.mark.usefixtures("store")
def test_a_store_that_goes_away_is_said_once_and_so_is_its_return(server, monkeypatch):
    result = _watched(monkeypatch, after=[server.stop, lambda: None, server.resume])
    assert result.stderr.count("The cluster cannot be read: the store in memory cannot be reached.") == 1
    assert result.stdout.endswith("The cluster can be read again.\n")
    assert result.exit_code == 0
    assert _watched(monkeypatch, after=[server.stop]).exit_code == 3


@pytest.mark.usefixtures("store")
def test_a_store_that_was_replaced_is_closed_and_the_new_one_is_watched(server, monkeypatch):
    made: list[MemoryStore] = []

    @contextmanager
    def open_it(*_: object) -> Iterator[OpenCluster]:
        def open_store() -> Store:
            made.append(MemoryStore(server))
            return made[-1]

        yield OpenCluster(open_store, "here")

    monkeypatch.setattr(status_cli, "open_cluster", open_it)
    result = _watched(monkeypatch, after=[server.lose_data, lambda: None, lambda: None])
    assert result.stderr.count("The cluster cannot be read: ") == 1
    assert "The cluster can be read again.\n" in result.stdout
    assert "Job chat: is gone.\n" in result.stdout
    assert result.exit_code == 0
    assert [str(store.trouble()) for store in made] == ["this store was closed", "None"]


def test_the_watch_goes_on_with_an_etcd_that_comes_back_empty(monkeypatch):
    binary = Path(NAMED_BINARY) if NAMED_BINARY else None
    with EmbeddedEtcd(binary=binary) as first, ExitStack() as opened:
        with EtcdStore(StoreAddress.parse(first.endpoint)) as store:
            store.put(LEADER, leader_text(LeaderRecord(node_id="n1/agent", host="n1", address="10.0.0.1:4000")))

        def replace_it() -> None:
            first.stop()
            opened.enter_context(EmbeddedEtcd(port=first.port, binary=binary))

        looks = [replace_it, *[lambda: None] * 5]
        result = _watched(monkeypatch, "--endpoint", first.endpoint, after=looks)
    assert "The cluster cannot be read: " in result.stderr
    assert "The cluster can be read again.\n" in result.stdout
    assert result.exit_code == 0


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setattr(status_show.sys.stdout, "isatty", lambda: True, raising=False)
    for name in ("dumb", ""):
        monkeypatch.setenv("TERM", name)
        assert status_show.terminal() is None


def test_the_screen_is_as_large_as_the_terminal_and_comes_back():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60, height=8, color_system=None, legacy_windows=False)
    handler = signal.getsignal(signal.SIGTERM)
    with status_show.Screen(console) as shown:
        assert shown.see(overview(nodes=tuple(node(f"n{i}", job=f"job{i}") for i in range(50)))) == 0
        drawn = screen.getvalue()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert shown.cannot_see("The cluster cannot be read: etcd is away.") == 3
    assert signal.getsignal(signal.SIGTERM) == handler
    assert drawn.startswith("\x1b[?1049h")
    assert len(drawn.split("\x1b[H")[-1].splitlines()) <= 8
    assert "more nodes" in drawn
    later = screen.getvalue()[len(drawn) :]
    assert "OUT OF DATE. The cluster cannot be read: etcd is away." in later
    assert "\x1b[?1049l" in later


def test_a_screen_with_nothing_to_show_yet_says_nothing():
    screen = io.StringIO()
    with status_show.Screen(Console(file=screen, force_terminal=True, width=60, height=8)) as shown:
        assert shown.cannot_see("why") == 3
    assert "why" not in screen.getvalue()


@pytest.mark.parametrize("mistake", [["--no-such-flag"], ["--interval", "often"], ["nonsense"]])
def test_a_mistake_on_the_command_line_is_no_verdict(mistake):
    result = _status(*mistake)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr
