"""Serves the web page: one HTML file with its style and script, and what it shows, to those who have signed in.

Only reading, but for signing in and out. Nothing on the page comes from elsewhere, and nothing that is told is HTML.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from importlib import resources
from typing import Any
from urllib.parse import parse_qs

from unicron_elastic import __version__
from unicron_elastic.launcher.common.http import BoundedServer
from unicron_elastic.launcher.export.web import sign_in
from unicron_elastic.launcher.export.web.place import CoordinatorPlace
from unicron_elastic.launcher.export.web.waf_history import SPANS
from unicron_elastic.launcher.export.web.watcher import Body, body

REQUEST_S = 10.0  # for a client to send its request and take the answer
REQUESTS_MOST = 32  # that are read at a time, and as many that are answered
FORM_BYTES_MAX = 1024
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TOO_MANY = "Too many ask at this moment."
_FILES = {  # by path: what is served, and its type
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{
        f"/{name}": (name, "text/javascript; charset=utf-8")
        for name in ("page.js", "panels.js", "charts.js", "text.js")
    },
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}


class PageSource:
    """What there is to show; asked from the server's threads, so each answer must be at hand."""

    def secret(self) -> str:
        """The cluster's; "" as long as it is not known."""
        raise NotImplementedError

    def whereabouts(self) -> CoordinatorPlace:
        """Return who coordinates."""
        raise NotImplementedError

    def state(self) -> Body:
        """The cluster as its store has it."""
        raise NotImplementedError

    def waf(self, span: str) -> Body:
        """The WAF over a span of ``SPANS``."""
        raise NotImplementedError


class WebServer:
    """From its making to ``close``."""

    def __init__(self, address: str, port: int, source: PageSource, *, request_s: float = REQUEST_S) -> None:
        """Port 0 is one of the system's choice. Raises OSError if it cannot be listened on."""
        self._server = _Server(address, port, source, request_s)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve, name="unicron-web", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listens no more. May come twice."""
        self._server.end()
        self._thread.join(1.0)


class _Server(BoundedServer):
    """What its handlers need."""

    def __init__(self, address: str, port: int, source: PageSource, request_s: float) -> None:
        """Raises OSError."""
        folder = resources.files("unicron_elastic.launcher.export.web") / "page"
        self.files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _FILES.items()}
        self.source = source
        self.guesses = sign_in.Guesses()
        self.guessing = threading.Lock()
        super().__init__(address, port, _Handler, requests_most=REQUESTS_MOST, request_s=request_s)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = REQUEST_S
    server_version = f"unicron/{__version__}"
    sys_version = ""

    def do_GET(self) -> None:
        """A file of the page, or what it shows."""
        path, _, query = self.path.partition("?")
        if not self.server.has_asked(self.connection):
            self._refuse(503, _TOO_MANY)
        elif path in self.server.files:
            text, kind = self.server.files[path]
            self._answer(200, kind, text)
        elif path in ("/state", "/waf"):
            self._safely(lambda: self._show(path, query))
        else:
            self._refuse(404, "There is nothing of that name.")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Signs in or out."""
        match self.path:
            case "/sign-in":
                self._safely(self._sign_in)
            case "/sign-out":
                self._safely(self._sign_out)
            case _:
                self.send_error(405)

    # -- what is shown -------------------------------------------------------------------------------------------------

    def _show(self, path: str, query: str) -> None:
        source = self.server.source
        if not (secret := source.secret()):
            return self._refuse(503, "This process has not joined the cluster yet.")
        if not self._is_signed_in(secret):
            return self._refuse(401, "Sign in.")
        place = source.whereabouts()
        if not place.leads:
            return self._refuse(409, place.sentence, host=place.host, page=place.url)
        if path == "/state":
            return self._tell(200, source.state())
        if (span := _span(query)) not in SPANS:
            return self._refuse(400, f"span must be {' or '.join(SPANS)}.")
        return self._tell(200, source.waf(span))

    # -- who may see it ------------------------------------------------------------------------------------------------

    def _is_signed_in(self, secret: str) -> bool:
        return sign_in.is_session(secret, self._cookie(sign_in.cookie_name(secret)), time.time())

    def _cookie(self, name: str) -> str:
        # Without http.cookies, which takes long for values that are odd on purpose: everybody may send them.
        for part in self.headers.get("Cookie", "").split(";"):
            key, _, value = part.strip().partition("=")
            if key == name:
                return value
        return ""

    def _sign_in(self) -> None:
        if not (secret := self.server.source.secret()):
            return self._refuse(503, "This process has not joined the cluster yet.")
        if (told := self._form()) is None:
            return None
        address, now_s = self.client_address[0], time.monotonic()
        with self.server.guessing:
            wait_s = self.server.guesses.wait_s(address, now_s)
            is_right = not wait_s and sign_in.is_password(secret, told)
            if not wait_s and not is_right:
                self.server.guesses.was_wrong(address, now_s)
        if wait_s:
            after_s = int(wait_s) + 1
            why = f"Too many wrong passwords came from here; try again in {after_s} s."
            return self._refuse(429, why, more={"Retry-After": str(after_s)})
        if not is_right:
            return self._refuse(403, "That is not the password of this cluster.")
        session = sign_in.new_session(secret, time.time())
        return self._set_cookie(secret, session, sign_in.SESSION_S)

    def _sign_out(self) -> None:
        if self._form() is None:
            return
        if secret := self.server.source.secret():
            self._set_cookie(secret, "", 0)
        else:
            self._answer(204, "", b"")

    def _set_cookie(self, secret: str, value: str, max_age_s: int) -> None:
        cookie = f"{sign_in.cookie_name(secret)}={value}; Max-Age={max_age_s}; Path=/; HttpOnly; SameSite=Strict"
        self._answer(204, "", b"", {"Set-Cookie": cookie})

    def _form(self) -> str | None:
        """The password in what was sent, which must be JSON: other pages cannot make a browser send that.

        None if it is something else, which has been answered.
        """
        kind = self.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        length = self.headers.get("Content-Length", "")
        if kind != "application/json":
            self._refuse(415, "Send application/json.")
        elif not (length.isascii() and length.isdecimal() and len(length) < 10):
            self._refuse(411, "Say how long it is.")
        elif int(length) > FORM_BYTES_MAX:
            self._refuse(413, f"Send at most {FORM_BYTES_MAX} bytes.")
        else:
            try:
                told = json.loads(self.rfile.read(int(length)))
            except (ValueError, RecursionError):
                told = None
            found = told.get("password", "") if isinstance(told, dict) else None
            if not self.server.has_asked(self.connection):
                self._refuse(503, _TOO_MANY)
                return None
            if isinstance(found, str):
                return found
            self._refuse(400, 'Send {"password": "..."}.')
        return None

    # -- how it is said ------------------------------------------------------------------------------------------------

    def _safely(self, act: Callable[[], None]) -> None:
        try:
            act()
        except OSError:
            raise  # the client is gone
        except Exception:  # the log has it; a stranger need not know
            self.server.log_error("A request for the web page could not be answered.")
            self._refuse(500, "An error, which this process has logged.")

    def _refuse(self, code: int, why: str, *, more: dict[str, str] | None = None, **facts: str) -> None:
        self.close_connection = True
        self._tell(code, body({"error": why, **facts}), more)

    def _tell(self, code: int, told: Body, more: dict[str, str] | None = None) -> None:
        headers = {"Vary": "Accept-Encoding", **(more or {})}
        text = told.plain
        if told.packed and "gzip" in self.headers.get("Accept-Encoding", ""):
            text, headers["Content-Encoding"] = told.packed, "gzip"
        self._answer(code, "application/json", text, headers)

    def _answer(self, code: int, kind: str, text: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(code)
        headers = {"Content-Type": kind} if kind else {}
        for name, value in {**HEADERS, **headers, "Content-Length": str(len(text)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """What the base class cannot make sense of, without repeating it."""
        is_method = code in (405, 501)
        why = "Only GET and HEAD are answered." if is_method else "This is no request that can be answered."
        if not hasattr(self, "command") or self.command is None:
            self.command = ""
        self.close_connection = True
        self._answer(405 if is_method else code, "application/json", body({"error": why}).plain,
                     {"Allow": "GET, HEAD"} if is_method else {})  # fmt: skip

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's signature
        """Nothing: what is asked is no news, and may have a password in it."""


def _span(query: str) -> str:
    try:
        return parse_qs(query, max_num_fields=4).get("span", ["hour"])[-1]
    except ValueError:  # more than that
        return ""
