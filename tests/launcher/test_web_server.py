"""The web page's server: who gets in, what is answered, and what strangers can do to it."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from unicron_elastic.launcher.common.http import LOOPBACK
from unicron_elastic.launcher.export.listen_address import ListenAddress
from unicron_elastic.launcher.export.web import server as web_server
from unicron_elastic.launcher.export.web.place import CoordinatorPlace
from unicron_elastic.launcher.export.web.server import FORM_BYTES_MAX, REQUESTS_MOST, PageSource, WebServer
from unicron_elastic.launcher.export.web.sign_in import GUESSES_MOST, password
from unicron_elastic.launcher.export.web.watcher import Body, body

SECRET = "5e" * 32
LONG = {"state": {"sentence": "All jobs train. " * 400}, "trouble": ""}


class Told(PageSource):
    """Says what a test wants."""

    def __init__(self) -> None:
        self.known = SECRET
        self.place = CoordinatorPlace(leads=True)
        self.asked: list[str] = []
        self.trouble: Exception | None = None

    def secret(self) -> str:
        return self.known

    def whereabouts(self) -> CoordinatorPlace:
        return self.place

    def state(self) -> Body:
        self.asked.append("state")
        if self.trouble is not None:
            raise self.trouble
        return body(LONG)

    def waf(self, span: str) -> Body:
        self.asked.append(span)
        return body({"points": []})


class Client:
    """One browser, as far as it matters."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.cookie = ""
        self.headers: http.client.HTTPMessage

    def ask(self, method: str, path: str, sent: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """Status and body; names of headers with underscores."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=20)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.cookie:
            given.setdefault("Cookie", self.cookie)
        try:
            connection.request(method, path, sent, given)
            answer = connection.getresponse()
            self.headers = answer.headers
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Status, and what the JSON in the body says."""
        status, text = self.ask("GET", path, **headers)
        return status, json.loads(text)

    def post(self, path: str, told: Any) -> int:
        """Status."""
        return self.ask("POST", path, json.dumps(told).encode(), Content_Type="application/json")[0]

    def sign_in(self, word: str = password(SECRET)) -> int:
        """Status; keeps the cookie."""
        status = self.post("/sign-in", {"password": word})
        self.cookie = (self.headers["Set-Cookie"] or "").partition(";")[0]
        return status


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def server(told: Told) -> Iterator[WebServer]:
    opened = WebServer(LOOPBACK, 0, told)
    yield opened
    opened.close()


@pytest.fixture
def client(server: WebServer) -> Client:
    return Client(server.port)


def raw(server: WebServer, sent: bytes) -> bytes:
    """All that comes back for these bytes."""
    with socket.create_connection((LOOPBACK, server.port), timeout=20) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while part := connection.recv(65536):
            found += part
        return found


# -- who gets in -------------------------------------------------------------------------------------------------------


def test_nothing_is_shown_to_who_has_not_signed_in(client: Client, told: Told) -> None:
    for path in ("/state", "/waf", "/waf?span=day"):
        assert client.get(path) == (401, {"error": "Sign in."})
        assert client.ask("HEAD", path) == (401, b"")
    assert told.asked == []


def test_the_password_opens_it_and_signing_out_takes_the_cookie(client: Client) -> None:
    assert client.sign_in() == 204
    attributes = client.headers["Set-Cookie"].split("; ")[1:]
    assert sorted(attributes) == ["HttpOnly", "Max-Age=43200", "Path=/", "SameSite=Strict"]
    assert client.get("/state") == (200, LONG)
    assert client.post("/sign-out", {}) == 204
    assert client.headers["Set-Cookie"].startswith(client.cookie.partition("=")[0] + "=; Max-Age=0;")


@pytest.mark.parametrize(
    "word", ["", "x", SECRET, password(SECRET)[:-1], password(SECRET).upper(), "pässwörd", "\ud800"]
)
def test_nothing_else_opens_it(client: Client, word: str) -> None:
    assert client.sign_in(word) == 403
    assert client.headers["Set-Cookie"] is None
    assert client.get("/state")[0] == 401


def test_a_session_of_another_secret_or_a_changed_one_is_none(client: Client, told: Told) -> None:
    client.sign_in()
    name, _, session = client.cookie.partition("=")
    expires, nonce, proof = session.split(".")
    for forged in (
        f"{int(expires) + 1}.{nonce}.{proof}",
        f"{expires}.{nonce}.",
        f"{expires}.{nonce}",
        "",
        '"',
        "x" * 4000,
    ):
        assert client.get("/state", Cookie=f"{name}={forged}")[0] == 401, forged
    assert client.get("/state", Cookie=f"{name}={session}")[0] == 200
    told.known = "ab" * 32
    assert client.get("/state")[0] == 401


def test_odd_cookies_cost_nothing_and_the_right_one_is_found_among_others(client: Client) -> None:
    client.sign_in()
    name, _, session = client.cookie.partition("=")
    began_s = time.process_time()
    for odd in ('x="' + "\\\\" * 30_000 + '"', "a=b; " * 12_000, "=" * 60_000, ";" * 60_000, f"{name}x=1; x{name}=1"):
        assert client.get("/state", Cookie=odd)[0] == 401
    assert time.process_time() - began_s < 2.0
    assert client.get("/state", Cookie=f"other=1; {name}={session}; more=2")[0] == 200


def test_before_the_secret_is_known_nobody_gets_in(client: Client, told: Told) -> None:
    told.known = ""
    assert client.get("/state")[0] == 503
    assert client.sign_in("") == client.sign_in(password(SECRET)) == 503
    assert client.post("/sign-out", {}) == 204


def test_guessing_is_slowed_down_and_then_even_the_right_one_waits(client: Client) -> None:
    assert [client.sign_in("wrong") for _ in range(GUESSES_MOST)] == [403] * GUESSES_MOST
    assert client.sign_in("wrong") == 429
    assert 1 <= int(client.headers["Retry-After"]) <= 7
    assert client.sign_in() == 429


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_what_a_form_of_another_page_can_send_is_refused(client: Client, kind: str) -> None:
    sent = json.dumps({"password": password(SECRET)}).encode()
    assert client.ask("POST", "/sign-in", sent, Content_Type=kind)[0] == 415
    assert client.headers["Set-Cookie"] is None


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"", 400), (b"[]", 400), (b'{"password": 1}', 400), (b"{", 400), (b"[" * 1000, 400), (b"\xff", 400)],
)
def test_what_is_no_password_is_refused(client: Client, sent: bytes, status: int) -> None:
    assert client.ask("POST", "/sign-in", sent, Content_Type="application/json")[0] == status


def test_what_is_sent_is_bounded(server: WebServer, client: Client) -> None:
    assert client.post("/sign-in", {"password": "x" * FORM_BYTES_MAX}) == 413
    for length in ("", "Content-Length: -1\r\n", "Content-Length: 1_0\r\n", "Content-Length: 9999999999999\r\n"):
        head = f"POST /sign-in HTTP/1.1\r\nContent-Type: application/json\r\n{length}\r\n".encode()
        assert raw(server, head + b"{}").split()[1] == b"411"


# -- what is answered --------------------------------------------------------------------------------------------------


def test_the_page_is_served_whole_and_asks_nobody_else(client: Client) -> None:
    seen, wanted = set(), ["/"]
    while wanted:
        path = wanted.pop()
        seen.add(path)
        status, text = client.ask("GET", path)
        assert (status, len(text)) == (200, int(client.headers["Content-Length"])), path
        shown = text.decode().replace("http://www.w3.org/2000/svg", "")
        assert re.findall(r"https?://(?!\[)|//[a-z]", shown.replace("/^http:\\/\\/", "")) == [], path
        if path == "/" or path.endswith(".js"):
            found = re.findall(r'(?:src|href)="([^"#]+)"|from "\./([^"]+)"', shown)
            wanted += [each for pair in found for name in pair if name and (each := f"/{name}") not in seen]
    assert seen == {"/", "/page.css", "/page.js", "/panels.js", "/charts.js", "/text.js", "/icon.svg"}


def test_the_page_has_no_html_from_text_and_no_inline_script_or_style(client: Client) -> None:
    for path in ("/page.js", "/panels.js", "/charts.js", "/text.js"):
        text = client.ask("GET", path)[1].decode()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\.style\b", text
        )
    page = client.ask("GET", "/")[1].decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=|javascript:", page)


@pytest.mark.parametrize("path", ["/", "/page.js", "/state", "/waf", "/nothing", "/sign-in"])
def test_every_answer_has_the_headers_that_keep_others_out(client: Client, path: str) -> None:
    client.ask("GET", path)
    for name, value in web_server.HEADERS.items():
        assert client.headers[name] == value
    assert client.headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert [name for name in client.headers if name.lower().startswith("access-control-")] == []
    assert "Python" not in client.headers["Server"]


def test_only_reading_and_only_what_is_there(client: Client, server: WebServer) -> None:
    client.sign_in()
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "TRACE", "QUATSCH"):
        assert client.ask(method, "/state", Content_Type="application/json")[0] == 405, method
        assert client.headers["Allow"] == "GET, HEAD"
    for path in (
        "/../server.py",
        "/page.js/",
        "/page/page.js",
        "/%2e%2e/%2e%2e/cli.py",
        "/state/",
        "http://x/state",
    ):
        status, text = client.ask("GET", path)
        assert (status, json.loads(text)) == (404, {"error": "There is nothing of that name."}), path
    assert b" 404 " in raw(server, b"GET /../../etc/passwd HTTP/1.0\r\n\r\n")


def test_waf_has_spans(client: Client, told: Told) -> None:
    client.sign_in()
    assert [client.get(f"/waf{query}")[0] for query in ("", "?span=day", "?span=hour&span=day", "?x=1")] == [200] * 4
    assert told.asked == ["hour", "day", "day", "hour"]
    assert client.get("/waf?span=week") == (400, {"error": "span must be hour or day."})
    assert client.get("/waf?" + "&".join(f"a{n}=1" for n in range(99)))[0] == 400


def test_long_answers_are_packed_for_who_can_read_it(client: Client) -> None:
    client.sign_in()
    status, text = client.ask("GET", "/state", Accept_Encoding="br, gzip")
    assert (status, client.headers["Content-Encoding"], json.loads(gzip.decompress(text))) == (200, "gzip", LONG)
    assert len(text) < 300
    assert client.ask("GET", "/state")[1] == json.dumps(LONG, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("place", "facts"),
    [
        (CoordinatorPlace(False), {"error": "Nobody coordinates the cluster at the moment.", "host": "", "page": ""}),
        (
            CoordinatorPlace(False, "b", ListenAddress("b.example", 9480)),
            {
                "error": "b coordinates the cluster; its page is at http://b.example:9480/",
                "host": "b",
                "page": "http://b.example:9480/",
            },
        ),
    ],
)
def test_who_does_not_coordinate_says_who_does(
    client: Client, told: Told, place: CoordinatorPlace, facts: dict[str, str]
) -> None:
    told.place = place
    assert client.get("/state")[0] == 401  # to strangers not even that
    client.sign_in()
    assert client.get("/state") == client.get("/waf") == (409, facts)
    assert told.asked == []


def test_an_error_in_telling_is_logged_and_not_told(
    client: Client, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    client.sign_in()
    told.trouble = RuntimeError("a bug with a path /home/me")
    assert client.get("/state") == (500, {"error": "An error, which this process has logged."})
    assert "a bug with a path" in caplog.text


# -- what strangers can do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / <script>alert(1)</script> HTTP/1.1\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
        b"\0" * 100 + b"\r\n\r\n",
        b"<script>alert(1)</script> / HTTP/1.1\r\n\r\n",
    ],
)
def test_odd_requests_get_a_short_answer_that_repeats_nothing(server: WebServer, client: Client, sent: bytes) -> None:
    found = raw(server, sent)
    assert len(found) < 1200
    assert b"script" not in found
    assert found == b"" or b"default-src 'self'" in found or not found.startswith(b"HTTP")
    assert client.ask("GET", "/")[0] == 200


def test_who_sends_a_byte_now_and_then_is_cut_off(told: Told) -> None:
    opened = WebServer(LOOPBACK, 0, told, request_s=0.3)
    try:
        with socket.create_connection((LOOPBACK, opened.port), timeout=20) as slow:
            began_at = time.monotonic()
            with pytest.raises(OSError):  # noqa: PT012 - one of the two ends it
                while time.monotonic() - began_at < 20:
                    slow.sendall(b"G")
                    slow.settimeout(0.05)
                    try:
                        if not slow.recv(1):
                            raise ConnectionResetError
                    except TimeoutError:
                        pass
            assert time.monotonic() - began_at < 10
        assert Client(opened.port).ask("GET", "/")[0] == 200
    finally:
        opened.close()


def test_connections_are_bounded_and_those_that_say_nothing_keep_nobody_out(server: WebServer, client: Client) -> None:
    half = b"POST /sign-in HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    for said_first in (b"", half):
        idle = [socket.create_connection((LOOPBACK, server.port)) for _ in range(2 * REQUESTS_MOST)]
        for each in idle:
            with contextlib.suppress(OSError):  # it made room already
                each.sendall(said_first)
        assert client.ask("GET", "/")[0] == 200
        threads = [thread for thread in threading.enumerate() if "process_request_thread" in thread.name]
        assert len(threads) <= 4 * REQUESTS_MOST
        for each in idle:
            each.close()


def test_a_closed_server_listens_no_more(told: Told) -> None:
    opened = WebServer(LOOPBACK, 0, told)
    opened.close()
    opened.close()
    with pytest.raises(OSError):
        Client(opened.port).ask("GET", "/")
    with pytest.raises(OSError):
        WebServer("203.0.113.7", 0, told)
