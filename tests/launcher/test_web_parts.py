"""What the web page is made of beside its server: sign-in, the WAF's memory, places, and the thread that looks."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_elastic.launcher.export.listen_address import ListenAddress
from unicron_elastic.launcher.export.web import sign_in as web_sign_in
from unicron_elastic.launcher.export.web import watcher as web_watcher
from unicron_elastic.launcher.export.web.place import CoordinatorPlace
from unicron_elastic.launcher.export.web.sign_in import (
    ADDRESSES_MOST,
    GUESS_AGAIN_S,
    GUESSES_MOST,
    SESSION_S,
    Guesses,
    is_password,
    is_session,
    new_session,
    password,
)
from unicron_elastic.launcher.export.web.waf_history import SAMPLE_S, SPANS, WafHistory
from unicron_elastic.launcher.export.web.watcher import Watcher
from unicron_elastic.metrics.figures import PlanFigures, PlannedJobFigures
from unicron_elastic.rendezvous.cluster.heartbeat_wire import welcome
from unicron_elastic.rendezvous.store.interface import Store, StoreUnreachableError
from unicron_elastic.testing.memory_store import MemoryServer, MemoryStore

SECRET, OTHER = "5e" * 32, "ab" * 32
DEADLINE_S = 20.0
EVERY_S = 0.1


# -- sign-in -----------------------------------------------------------------------------------------------------------


def test_the_password_gives_nothing_of_the_secret_away() -> None:
    word = password(SECRET)
    assert len(word) == 32
    assert int(word, 16) >= 0
    assert word not in SECRET
    assert word != password(OTHER)
    assert word.encode() not in welcome(SECRET, "web password", 1.0)  # no proof of anything else
    assert is_password(SECRET, f" {word}\n")
    assert not is_password(SECRET, password(OTHER))
    with pytest.raises(ValueError, match="secret is not known"):
        password("")


def test_a_session_counts_for_its_time_and_its_secret() -> None:
    session = new_session(SECRET, 1_000.0)
    assert session != new_session(SECRET, 1_000.0)
    assert is_session(SECRET, session, 1_000.0 + SESSION_S - 1)
    assert not is_session(SECRET, session, 1_000.0 + SESSION_S)
    assert not is_session(OTHER, session, 1_000.0)
    for odd in ("", ".", "..", "é.é.é", "\ud800", session[:-1], f"9{session}", session.replace(".", "..")):
        assert not is_session(SECRET, odd, 1_000.0)


def test_guesses_come_back_one_by_one() -> None:
    guesses = Guesses()
    for _ in range(GUESSES_MOST):
        assert guesses.wait_s("a", 100.0) == 0.0
        guesses.was_wrong("a", 100.0)
    assert guesses.wait_s("a", 100.0) == pytest.approx(GUESS_AGAIN_S)
    assert guesses.wait_s("b", 100.0) == 0.0
    assert guesses.wait_s("a", 100.0 + GUESS_AGAIN_S) == 0.0
    guesses.was_wrong("a", 100.0 + GUESS_AGAIN_S)
    assert guesses.wait_s("a", 100.0 + GUESS_AGAIN_S) == pytest.approx(GUESS_AGAIN_S)
    assert guesses.wait_s("a", 1e9) == 0.0


def test_many_addresses_take_bounded_memory_and_the_latest_is_remembered() -> None:
    guesses = Guesses()
    for number in range(3 * ADDRESSES_MOST):
        guesses.was_wrong(f"address {number}", 100.0)
    for _ in range(GUESSES_MOST):
        guesses.was_wrong("last", 100.0)
    assert guesses.wait_s("last", 100.0) > 0.0
    assert len(guesses._of) == ADDRESSES_MOST


# -- the WAF over time -------------------------------------------------------------------------------------------------


def figures(plan_flops: float | None, *achieved_flops: float) -> PlanFigures:
    jobs = tuple(
        PlannedJobFigures(run_id=f"job{n}", plan_nodes=1, plan_flops=1.0, achieved_flops=each, nodes=())
        for n, each in enumerate(achieved_flops)
    )
    return PlanFigures(waf_flops=plan_flops, jobs=jobs)


def test_history_keeps_the_last_hour_closely_and_the_day_roughly() -> None:
    history = WafHistory()
    begin = 1_800_000_000.0
    for number in range(2 * 17_280):  # two days
        history.add(begin + number * SAMPLE_S, figures(2e12, 1e12, number * 1.0))
    for span, (apart_s, most) in SPANS.items():
        told = history.to_json(span)
        assert (told["span_s"], told["apart_s"], len(told["points"])) == (apart_s * most, apart_s, most)
        moments = [point[0] for point in told["points"]]
        assert {b - a for a, b in pairwise(moments)} == {apart_s}
        assert moments[-1] > begin + 2 * 86_400 - 2 * apart_s
        assert len(json.dumps(told)) < 100_000


def test_history_has_gaps_where_this_process_did_not_coordinate() -> None:
    history = WafHistory()
    history.add(1000.0, None)
    history.add(1005.0, figures(None))
    history.add(1010.0, figures(3.00000001e12, 1e12, 1.5e12))
    assert history.to_json("hour")["points"] == [[1000.0, None, None], [1005.0, None, 0.0], [1010.0, 3e12, 2.5e12]]
    history.add(500.0, figures(1.0, 1.0))  # the clock was set back
    assert history.to_json("hour")["points"] == [[500.0, 1.0, 1.0]]


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url", "is_local"),
    [
        ("node2.example:9480", "http://node2.example:9480/", False),
        ("127.0.0.1:1", "http://127.0.0.1:1/", True),
        ("localhost:65535", "http://localhost:65535/", True),
        ("[::1]:9480", "http://[::1]:9480/", True),
        ("[2001:db8::7]:9480", "http://[2001:db8::7]:9480/", False),
    ],
)
def test_places_are_written_and_read(text: str, url: str, is_local: bool) -> None:
    place = ListenAddress.parse(text)
    assert (place.text, place.url, place.is_local) == (text, url, is_local)


@pytest.mark.parametrize(
    "text", ["", ":1", "a:0", "a:65536", "a:+1", "a:\u0661", "a b:1", "a/b:1", "a@b:1", '"><script>:1']
)
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no ADDRESS:PORT"):
        ListenAddress.parse(text)


@given(st.text(max_size=400) | st.from_regex(r"[a-z0-9.:\[\]%-]*:\d{1,6}", fullmatch=True))
@settings(max_examples=100, deadline=None)
def test_any_text_is_a_place_that_can_be_written_again_or_none(text: str) -> None:
    try:
        place = ListenAddress.parse(text)
    except ValueError:
        return
    assert ListenAddress.parse(place.text) == place
    assert isinstance(place.is_local, bool)
    assert not set('/@?#"<>& ') & set(place.text)


def test_who_coordinates_is_said_with_the_way_there() -> None:
    local = CoordinatorPlace(False, "b", ListenAddress("127.0.0.1", 9480))
    assert local.sentence == (
        "b coordinates the cluster; its page can be reached from that host alone, or by: "
        "ssh -L 9480:127.0.0.1:9480 b, and http://localhost:9480/."
    )
    assert local.url == ""
    assert "without --web-port" in CoordinatorPlace(False, "b").sentence
    assert CoordinatorPlace(False, "b", ListenAddress("b", 9480)).url == "http://b:9480/"


# -- the thread that looks ---------------------------------------------------------------------------------------------


class Looks:
    """A store of which it is known how often it was read."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.trouble: Exception | None = None
        self.opened = 0
        self.costs_s = 0.0  # of a CPU
        self.is_hanging = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def open_store(self) -> Store:
        self.opened += 1
        return MemoryStore(MemoryServer(time.monotonic))

    def read(self, _store: Store) -> Mapping[str, Any]:
        self.at.append(time.monotonic())
        began_s = time.thread_time()
        while time.thread_time() - began_s < self.costs_s:
            pass
        if not self.may_go_on.is_set():
            self.is_hanging.set()
            assert self.may_go_on.wait(DEADLINE_S)
        if self.trouble is not None:
            raise self.trouble
        return {"look": len(self.at)}


@pytest.fixture
def looks() -> Looks:
    return Looks()


def until(condition: Any) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def told(watcher: Watcher) -> Any:
    return json.loads(watcher.state().plain)


Watch = Callable[..., Watcher]


@pytest.fixture
def watch(looks: Looks) -> Iterator[Watch]:
    """Starts a watcher of ``looks``."""
    with contextlib.ExitStack() as opened:

        def start(**limits: float) -> Watcher:
            made = Watcher(looks.open_store, looks.read, lambda: figures(2.0, 1.0), **{"every_s": EVERY_S, **limits})
            made.start()
            opened.callback(made.close)
            return made

        yield start
        looks.may_go_on.set()


@pytest.fixture
def watcher(watch: Watch) -> Watcher:
    return watch()


def test_nobody_asks_nothing_is_read(watcher: Watcher, looks: Looks) -> None:
    until(lambda: json.loads(watcher.waf("hour").plain)["points"])  # it has gone round
    assert (looks.at, looks.opened) == ([], 0)


def test_the_store_is_read_at_most_once_a_period_whoever_asks(watcher: Watcher, looks: Looks) -> None:
    began_at = time.monotonic()
    assert told(watcher)["state"] == {"look": 1}  # the first is waited for
    threads = [threading.Thread(target=lambda: [watcher.state() for _ in range(200)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: watcher.state() and len(looks.at) >= 4)
    assert len(looks.at) <= 1 + (time.monotonic() - began_at) / EVERY_S
    assert min(b - a for a, b in pairwise(looks.at)) >= EVERY_S * 0.99
    assert looks.opened == 1


def test_dear_looks_are_made_less_often(watch: Watch, looks: Looks) -> None:
    looks.costs_s = 0.02
    watcher = watch(every_s=0.01)
    until(lambda: watcher.state() and len(looks.at) >= 3)
    assert min(b - a for a, b in pairwise(looks.at)) >= 0.02 / web_watcher.BUSY_SHARE


def test_a_store_that_hangs_keeps_nobody_waiting(watcher: Watcher, looks: Looks) -> None:
    watcher.state()
    looks.may_go_on.clear()
    until(lambda: watcher.state() and looks.is_hanging.is_set())
    began_at = time.monotonic()
    assert told(watcher)["state"] == {"look": len(looks.at) - 1}
    assert time.monotonic() - began_at < 1.0


def test_trouble_is_told_beside_the_last_state_and_goes_again(
    watcher: Watcher, looks: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(watcher)["trouble"] == ""
    looks.trouble = StoreUnreachableError("no server at etcd1:2379 answers")
    until(lambda: told(watcher)["trouble"])
    found = told(watcher)
    assert found["trouble"] == "etcd cannot be read: no server at etcd1:2379 answers."
    assert found["state"]["look"] >= 1
    looks.trouble = RuntimeError("a bug")
    until(lambda: "logged" in told(watcher)["trouble"])
    assert "a bug" in caplog.text
    looks.trouble = None
    until(lambda: not told(watcher)["trouble"])
    assert looks.opened == 2  # another object after the store's trouble


def test_the_store_is_closed_once_nobody_looks(watch: Watch, looks: Looks) -> None:
    watcher = watch(sample_s=0.02, idle_s=0.05)
    watcher.state()
    until(lambda: watcher._store is None)
    assert told(watcher)["state"]["look"] == len(looks.at)  # read anew, and waited for
    assert looks.opened == 2


def test_what_is_told_is_packed_where_that_is_worth_it() -> None:
    assert web_watcher.body({"a": 1}).packed == b""
    found = web_watcher.body({"a": "x" * 5000})
    assert gzip.decompress(found.packed) == found.plain
    assert web_watcher.body({"a": "\ud800"}).plain == b'{"a":"\\ud800"}'
    with pytest.raises(ValueError, match="JSON"):
        web_watcher.body({"a": float("nan")})


def test_a_place_that_is_asked_for_has_a_cookie_of_its_own() -> None:
    assert web_sign_in.cookie_name(SECRET) != web_sign_in.cookie_name(OTHER)
