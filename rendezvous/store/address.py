"""Where a store is and how to be let in: parsed and checked before anything is opened."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

DEFAULT_PORTS = {"http": 2379, "https": 2379}  # by scheme: these are etcd's, see open.py


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files: whom to trust and, unless the server asks for none, an own certificate with its key."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    def check(self) -> None:
        """Raises ValueError if a file is missing, unreadable or not what it should be."""
        if (self.cert is None) != (self.key is None):
            raise ValueError("a certificate and its key go together; give both files or neither")
        for what, path in (("CA", self.ca), ("certificate", self.cert), ("key", self.key)):
            if path is not None:
                _check_readable(what, path)
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
        except (ssl.SSLError, ValueError) as error:
            raise ValueError(f"the CA file {self.ca} holds no certificate in PEM form") from error
        if self.cert is not None and self.key is not None:
            try:
                # An encrypted key would ask for its password on the terminal.
                context.load_cert_chain(str(self.cert), str(self.key), password=_no_password)
            except (ssl.SSLError, ValueError) as error:
                raise ValueError(
                    f"{self.cert} and {self.key} must be a certificate and its own unencrypted key in PEM form"
                ) from error


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One server."""

    scheme: str
    host: str
    port: int

    @property
    def is_secure(self) -> bool:
        """Return whether the connection is encrypted, and its server proves who it is."""
        return self.scheme == "https"

    @property
    def target(self) -> str:
        """Return the address as gRPC wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """The servers of one store, who to trust and who to be."""

    endpoints: tuple[Endpoint, ...]
    tls: TlsFiles | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def scheme(self) -> str:
        """Return that of its endpoints, which are of one kind of store."""
        return self.endpoints[0].scheme

    @classmethod
    def parse(
        cls,
        endpoints: str | Sequence[str],
        *,
        tls: TlsFiles | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> StoreAddress:
        """Understands ``http://HOST:PORT``, ``https://HOST:PORT`` and ``HOST:PORT``, several with commas or as a list.

        Without a scheme TLS is used if ``tls`` is given. Raises ValueError: what is wrong, and what would be right.
        """
        texts = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
        parsed = tuple(dict.fromkeys(_endpoint(text.strip(), has_tls=tls is not None) for text in texts))
        if not parsed:
            raise ValueError("no etcd endpoint is given; give at least one, such as http://10.0.0.1:2379")
        _check_security(parsed, tls)
        if (user is None) != (password is None) or user == "":
            raise ValueError("an etcd user and its password go together; give both or neither")
        return cls(endpoints=parsed, tls=tls, user=user, password=password)

    def __str__(self) -> str:
        return ",".join(map(str, self.endpoints))


def _check_security(endpoints: Sequence[Endpoint], tls: TlsFiles | None) -> None:
    for endpoint in endpoints:
        if endpoint.is_secure and tls is None:
            raise ValueError(f"{endpoint} needs TLS; give the file of the CA that signed the servers' certificates")
        if not endpoint.is_secure and tls is not None:
            raise ValueError(f"{endpoint} would not use the TLS files that are given; write https://{endpoint.target}")
    if tls is not None:
        tls.check()


def _endpoint(text: str, *, has_tls: bool) -> Endpoint:
    wrong = f"{text!a} is no etcd endpoint; give http://HOST:PORT or https://HOST:PORT, such as http://10.0.0.1:2379"
    scheme = "https" if has_tls else "http"
    try:
        url = urlsplit(text if "://" in text else f"{scheme}://{text}")
        port = url.port
    except ValueError as error:
        raise ValueError(wrong) from error
    extras = (url.path.rstrip("/"), url.query, url.fragment, url.username, url.password)
    if url.scheme not in DEFAULT_PORTS or not url.hostname or port == 0 or any(extras):
        raise ValueError(wrong)
    if any(letter.isspace() or not letter.isprintable() for letter in text):
        raise ValueError(wrong)
    return Endpoint(url.scheme, url.hostname, DEFAULT_PORTS[url.scheme] if port is None else port)


def _check_readable(what: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"the {what} file {path} cannot be read: {error.strerror or error}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")
