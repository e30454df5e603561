"""The web page's part in a cluster: what is read of the store, who shows it, and how people find it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from plan_lab import NOW, publish, put_cluster, two_jobs
from typer.testing import CliRunner

from unicron_elastic.launcher.cli import app
from unicron_elastic.launcher.commands import web as web_cli
from unicron_elastic.launcher.commands.cluster import OpenCluster
from unicron_elastic.launcher.common.http import LOOPBACK
from unicron_elastic.launcher.config.cluster_options import ClusterOptions
from unicron_elastic.launcher.export.listen_address import ListenAddress
from unicron_elastic.launcher.export.web import server as web_server
from unicron_elastic.launcher.export.web import sign_in as web_sign_in
from unicron_elastic.launcher.export.web import source as web_source
from unicron_elastic.launcher.export.web import watcher as web_watcher
from unicron_elastic.launcher.export.web.place import CoordinatorPlace
from unicron_elastic.launcher.export.web.serve_web import serve_web, web_place
from unicron_elastic.launcher.export.web.source import ClusterSource, read_state
from unicron_elastic.launcher.export.web.waf_history import SPANS
from unicron_elastic.membership.coordination import Leader
from unicron_elastic.rendezvous.records.cluster import LEADER, SECRET, LeaderRecord, leader_text, web_key
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.interface import Store
from unicron_elastic.testing.memory_store import MemoryServer, MemoryStore

ROOT = Path(__file__).parents[2]
WORD = web_sign_in.password("5e" * 32)


@pytest.fixture
def store() -> Store:
    return MemoryStore(MemoryServer(time.monotonic))


@pytest.fixture
def in_cluster(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store that ``unicron web`` looks at."""

    @contextmanager
    def opened(_at: ClusterOptions) -> Iterator[OpenCluster]:
        yield OpenCluster(lambda: store, "http://etcd1:2379")

    monkeypatch.setattr(web_cli, "open_cluster", opened)
    return store


def lead(store: Store, page: str = "", node_id: str = "b/1") -> None:
    """b coordinates; its page is at ``page``."""
    store.put(SECRET, b"5e" * 32)
    store.put(LEADER, leader_text(LeaderRecord(node_id=node_id, host="b", address="10.0.0.2:4000")))
    if page:
        store.put(web_key(node_id), page.encode())


def web(*options: str) -> Any:
    return CliRunner().invoke(app, ["web", *options])


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("b.example:9480", "b coordinates the cluster; its page is at http://b.example:9480/"),
        ("", "b coordinates the cluster, and serves no page: it was started without --web-port."),
        (
            "127.0.0.1:9480",
            (
                "b coordinates the cluster; its page can be reached from that host alone, or by: "
                "ssh -L 9480:127.0.0.1:9480 b, and http://localhost:9480/."
            ),
        ),
    ],
)
def test_unicron_web_says_where_the_page_is(in_cluster: Store, page: str, sentence: str) -> None:
    lead(in_cluster, page)
    assert web().output == f"{sentence}\nPassword: {WORD}\n"
    assert web("--only-password").output == f"{WORD}\n"
    url = "http://b.example:9480/" if page.startswith("b.") else None
    assert json.loads(web("--json").output) == {"coordinator": "b", "url": url, "password": WORD}


def test_unicron_web_of_a_cluster_that_is_none_or_odd(in_cluster: Store) -> None:
    found = web()
    assert (found.exit_code, found.output) == (
        1, "unicron: No agent has been in the cluster at http://etcd1:2379 yet.\n",
    )  # fmt: skip
    lead(in_cluster, "b.example:9480/evil")
    found = web()
    assert found.exit_code == 0
    assert "b coordinates the cluster, and serves no page" in found.output
    assert "is no ADDRESS:PORT" in found.output
    in_cluster.put(LEADER, b"[]")
    assert "Nobody coordinates the cluster at the moment." in web().output


def test_what_is_shown_is_what_the_store_has(store: Store) -> None:
    put_cluster(store, two_jobs())
    publish(store, two_jobs(), NOW)
    lead(store)
    told = read_state(store, "etcd1:2379")
    assert told["where"] == "etcd1:2379"
    assert abs(told["at_unix_s"] - time.time()) < 60
    assert [job["job"] for job in told["jobs"]] == ["chat", "code"]
    assert {"n1", "n6"} <= {node["host"] for node in told["nodes"]}
    assert told["coordinator"]["host"] == "b"
    assert "5e5e" not in json.dumps(told)
    assert web_watcher.body(told).packed


class Presence:
    """What a process sees of the cluster."""

    def __init__(self) -> None:
        self.leader: Leader | None = None
        self.keys: dict[str, str] = {}

    def known_secret(self) -> str:
        return "5e" * 32

    def get(self, key: str) -> str | None:
        return self.keys.get(key)


def test_who_does_not_coordinate_knows_who_does_and_where_that_page_is(store: Store) -> None:
    presence: Any = Presence()
    entered: list[Any] = []
    leads: list[bool] = []
    source = ClusterSource(
        lambda: store, lambda: entered[0] if entered else None, lambda: bool(leads), lambda: None, "etcd1:2379"
    )
    assert (source.secret(), source.whereabouts()) == ("", CoordinatorPlace(False))
    entered.append(presence)
    assert (source.secret(), source.whereabouts()) == ("5e" * 32, CoordinatorPlace(False))
    presence.leader = Leader("b/1", "b", "10.0.0.2:4000", 7)
    assert source.whereabouts() == CoordinatorPlace(False, "b", None)
    presence.keys[web_key("b/1")] = "b.example:9480"
    assert source.whereabouts() == CoordinatorPlace(False, "b", ListenAddress("b.example", 9480))
    presence.keys[web_key("b/1")] = "http://elsewhere/"
    assert source.whereabouts() == CoordinatorPlace(False, "b", None)
    leads.append(True)
    assert source.whereabouts() == CoordinatorPlace(leads=True)
    source.close()  # without a start


# -- options -----------------------------------------------------------------------------------------------------------


def test_a_page_is_served_where_it_was_asked_for() -> None:
    assert web_place(None, None, {}) is None
    assert web_place("0", "0.0.0.0", {"UNICRON_WEB_PORT": "9480"}) is None
    assert web_place(None, None, {"UNICRON_WEB_PORT": "9480"}) == ListenAddress("127.0.0.1", 9480)
    environ = {"UNICRON_WEB_PORT": "1", "UNICRON_WEB_ADDRESS": "10.0.0.2"}
    assert web_place("9480", None, environ) == ListenAddress("10.0.0.2", 9480)
    assert web_place(None, "::", environ) == ListenAddress("::", 1)


@pytest.mark.parametrize(("given", "source"), [("80a", "--web-port"), (None, "UNICRON_WEB_PORT")])
def test_a_port_that_is_none_ends_the_command(
    given: str | None, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        web_place(given, None, {"UNICRON_WEB_PORT": "80a"})
    assert ended.value.exit_code == 2
    said = capsys.readouterr().err
    assert said == f"unicron: {source}: '80a' is not valid; give a port from 1 to 65535, or 0 for none.\n"


def served(store: Store, place: ListenAddress, said: list[str], told: list[str]) -> Any:
    return serve_web(
        place, "login1.example", said.append, told.append, open_store=lambda: store, presence=lambda: None,
        leads=lambda: False, figures=lambda: None, where=StoreAddress.parse("etcd1:2379"),
    )  # fmt: skip


def test_an_address_that_can_be_no_name_is_said_and_no_page_is_served(store: Store) -> None:
    said, told = list[str](), list[str]()
    assert served(store, ListenAddress("node1..cluster", 9404), said, told) is None
    assert said == [
        ("No web page is served: node1..cluster:9404 cannot be listened on ('node1..cluster' is no name of a host).")
    ]
    assert told == []


def test_others_are_told_where_the_page_is(store: Store) -> None:
    said, told = list[str](), list[str]()
    first = served(store, ListenAddress("127.0.0.1", 0), said, told)
    port = int(told[0].rpartition(":")[2])
    assert told == [f"127.0.0.1:{port}"]
    assert said == [
        (
            f"The web page of the cluster is at http://127.0.0.1:{port}/ while this process coordinates; "
            "unicron web has its password."
        )
    ]
    assert served(store, ListenAddress("127.0.0.1", port), said, told) is None
    assert said[1:] == [f"No web page is served: 127.0.0.1:{port} cannot be listened on (Address already in use)."]
    first.close()
    first.close()
    everywhere = served(store, ListenAddress("0.0.0.0", port), said, told)
    assert told[1:] == [f"login1.example:{port}"]
    everywhere.close()


# -- what the documentation says ---------------------------------------------------------------------------------------


def test_bounds_in_the_documentation_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "web.md").read_text(encoding="utf-8")
    assert SPANS == {"hour": (5.0, 720), "day": (60.0, 1440)}
    for words in (
        "has a point every 5 s, the last day one every minute",
        f"A sign-in lasts {web_sign_in.SESSION_S // 3600} hours",
        (
            f"After {web_sign_in.GUESSES_MOST} wrong passwords from an address one more may be tried every "
            f"{web_sign_in.GUESS_AGAIN_S:.0f} s"
        ),
        f"A request has {web_server.REQUEST_S:.0f} s",
        f"at most {web_server.REQUESTS_MOST} at a time",
        "at most once a second",
    ):
        assert words in " ".join(page.split()), words
    assert web_watcher.EVERY_S == 1.0
    assert (LOOPBACK, web_source.READ_S) == ("127.0.0.1", 4.0)


def test_what_is_read_has_enough_contrast_in_light_and_dark() -> None:
    """4.5 to 1, as WCAG 2.2 asks of text at its level AA, by its formula."""
    css = (ROOT / "launcher" / "export" / "web" / "page" / "page.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block)) for block in re.findall(r":root \{([^}]*)\}", css)
    )
    pairs = [
        (ink, ground) for ink in ("ink", "quiet", "accent", "well", "warn", "bad") for ground in ("card", "ground")
    ]
    pairs += [(ink, ground) for ink in ("ink", "quiet") for ground in ("warn-soft", "bad-soft")]
    pairs += [("warn", "warn-soft"), ("bad", "bad-soft"), ("card", "accent")]
    for colours in (light, {**light, **dark}):
        poor = {pair: round(found, 2) for pair in pairs if (found := contrast(*(colours[name] for name in pair))) < 4.5}
        assert poor == {}


def contrast(one: str, other: str) -> float:
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
