"""Where etcd is and how to be let in: parsed and checked before anything is opened."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

# Which address this host has towards another.


def address_towards(host: str | None, port: int) -> str:
    """The address from which packets to ``host`` would come; None is this host. Sends nothing. Raises OSError."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except UnicodeError as error:  # as for an empty part between two dots
        raise OSError(f"{host!a} is no name of a host") from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


DEFAULT_PORT = 2379


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
class EtcdEndpoint:
    """One server."""

    host: str
    port: int
    is_secure: bool

    @property
    def target(self) -> str:
        """Return the address as gRPC wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_secure else 'http'}://{self.target}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """The servers of one cluster, who to trust and who to be."""

    endpoints: tuple[EtcdEndpoint, ...]
    tls: TlsFiles | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(
        cls,
        endpoints: str | Sequence[str],
        *,
        tls: TlsFiles | None = None,
        user: str | None = None,
        password: str | None = None,
    ) -> EtcdAddress:
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


def own_address(etcd: EtcdAddress) -> str:
    """Return where other hosts find this one, which reaches etcd as they do."""
    return address_of_this_host((each.host, each.port) for each in etcd.endpoints)


def address_of_this_host(others: Iterable[tuple[str | None, int]] = ()) -> str:
    """Return the full name of this host, or if that leads nowhere else its address towards ``others`` (host, port).

    Where there are no others, a loopback address does: so it is returned where the name does not resolve at all.
    """
    name = socket.getfqdn()
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        found = set()
    if found and not any(_is_loopback(each) for each in found):
        return name
    for host, port in others:
        with contextlib.suppress(OSError):
            address = address_towards(host, port)
            if not _is_loopback(address):
                return address
    return name if found else "127.0.0.1"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _check_security(endpoints: Sequence[EtcdEndpoint], tls: TlsFiles | None) -> None:
    for endpoint in endpoints:
        if endpoint.is_secure and tls is None:
            raise ValueError(f"{endpoint} needs TLS; give the file of the CA that signed the servers' certificates")
        if not endpoint.is_secure and tls is not None:
            raise ValueError(f"{endpoint} would not use the TLS files that are given; write https://{endpoint.target}")
    if tls is not None:
        tls.check()


def _endpoint(text: str, *, has_tls: bool) -> EtcdEndpoint:
    wrong = f"{text!a} is no etcd endpoint; give http://HOST:PORT or https://HOST:PORT, such as http://10.0.0.1:2379"
    scheme = "https" if has_tls else "http"
    try:
        url = urlsplit(text if "://" in text else f"{scheme}://{text}")
        port = url.port
    except ValueError as error:
        raise ValueError(wrong) from error
    extras = (url.path.rstrip("/"), url.query, url.fragment, url.username, url.password)
    if url.scheme not in ("http", "https") or not url.hostname or port == 0 or any(extras):
        raise ValueError(wrong)
    if any(letter.isspace() or not letter.isprintable() for letter in text):
        raise ValueError(wrong)
    return EtcdEndpoint(url.hostname, DEFAULT_PORT if port is None else port, url.scheme == "https")


def _check_readable(what: str, path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"the {what} file {path} cannot be read: {error.strerror or error}") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted")


# Where etcd is and how to be let in, from options and the environment. Never imports torch or gRPC.
#
# An option wins over its environment variable. A password stands in a file or in the environment, never in a command
# line, where every user of the machine could read it.


DEFAULT_ENDPOINT = "localhost:2379"
ENDPOINT_VARIABLES = ("UNICRON_ETCD_ENDPOINT", "PET_RDZV_ENDPOINT")
PASSWORD_VARIABLE = "UNICRON_ETCD_PASSWORD"  # itself, where a file would be one more thing to keep
OPTIONS = ("etcd_ca", "etcd_cert", "etcd_key", "etcd_user", "etcd_password_file")
_PASSWORD_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Value:
    """What was given, and where, as its reader knows it."""

    source: str
    text: str


def etcd_address(
    endpoint: str | None,
    given: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
    *,
    spell: Callable[[str], str] = str,
) -> EtcdAddress:
    """The address that ``given``, options by name as in ``--rdzv-conf``, and the environment make up.

    Options that do not begin with ``etcd_`` are somebody else's. ``spell`` makes an option's name for the error texts.
    An empty endpoint or variable counts as none; an empty option is an error. Raises ValueError: one sentence without a
    full stop, which names the option or variable that is wrong and what would be right.
    """
    _check_names(given, spell)
    ca, cert, key, user, password_file = (_value(name, given, environ, spell) for name in OPTIONS)
    return EtcdAddress.parse(
        _endpoint_of(endpoint, environ),
        tls=_tls(ca, cert, key, spell),
        user=None if user is None else _printable(user),
        password=_password(user, password_file, environ, spell),
    )


def _check_names(given: Mapping[str, str], spell: Callable[[str], str]) -> None:
    for name in given:
        if name == "etcd_password":
            raise ValueError(
                f"{spell(name)} would show the password to every user of the machine; write it to a file for "
                f"{spell('etcd_password_file')}, or set {PASSWORD_VARIABLE}"
            )
        if name.startswith("etcd_") and name not in OPTIONS:
            known = ", ".join(map(spell, OPTIONS))
            raise ValueError(f"{spell(name)[:80]!a} is no option for etcd; there are {known}")


def _value(
    name: str, given: Mapping[str, str], environ: Mapping[str, str], spell: Callable[[str], str]
) -> _Value | None:
    if name in given:
        text = str(given[name]).strip()
        if not text:
            raise ValueError(f"{spell(name)} is empty; give a value, or leave the option out")
        return _Value(spell(name), text)
    text = environ.get(_variable(name), "").strip()
    return _Value(_variable(name), text) if text else None


def _variable(name: str) -> str:
    return f"UNICRON_{name.upper()}"


def _endpoint_of(endpoint: str | None, environ: Mapping[str, str]) -> str:
    texts = (endpoint or "", *(environ.get(name, "") for name in ENDPOINT_VARIABLES))
    return next((text for text in texts if text.strip()), DEFAULT_ENDPOINT)


def _tls(ca: _Value | None, cert: _Value | None, key: _Value | None, spell: Callable[[str], str]) -> TlsFiles | None:
    for one, other, name in ((cert, key, "etcd_key"), (key, cert, "etcd_cert"), (cert, ca, "etcd_ca")):
        if one is not None and other is None:
            raise ValueError(f"{one.source} needs {spell(name)}, too; give it, or set {_variable(name)}")
    if ca is None:
        return None
    return TlsFiles(ca=_path(ca), cert=None if cert is None else _path(cert), key=None if key is None else _path(key))


def _path(value: _Value) -> Path:
    return Path(os.path.expanduser(_printable(value)))  # Path's own raises where there is no home


def _password(
    user: _Value | None, file: _Value | None, environ: Mapping[str, str], spell: Callable[[str], str]
) -> str | None:
    direct = environ.get(PASSWORD_VARIABLE, "")
    if direct and file is not None and file.source == _variable("etcd_password_file"):
        raise ValueError(f"{PASSWORD_VARIABLE} and {file.source} are both set; set one of them")
    if user is None:
        if file is not None or direct:
            source = PASSWORD_VARIABLE if file is None else file.source
            who = f"give {spell('etcd_user')}, or set {_variable('etcd_user')}"
            raise ValueError(f"{source} is a password without a user; {who}")
        return None
    if file is not None:
        return _read_password(file)
    if not direct:
        raise ValueError(
            f"{user.source} names a user without a password; give {spell('etcd_password_file')}, "
            f"or set {_variable('etcd_password_file')} or {PASSWORD_VARIABLE}"
        )
    return _printable(_Value(PASSWORD_VARIABLE, direct), is_secret=True)


def _read_password(file: _Value) -> str:
    """The only line of the file, without its end."""
    path = _path(file)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe could block for ever
            raise ValueError(f"{file.source}: {path} is no regular file; give one with the password as its only line")
        with path.open("rb") as opened:
            raw = opened.read(_PASSWORD_MAX_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{file.source}: {path} cannot be read: {error.strerror or error}") from error
    try:
        text = raw.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        text = "\n"
    if not text:
        raise ValueError(f"{file.source}: {path} is empty; write the password to it, as its only line")
    if len(raw) > _PASSWORD_MAX_BYTES or not text.isprintable():
        raise ValueError(f"{file.source}: {path} must hold the password as its only line, in UTF-8")
    return text


def _printable(value: _Value, *, is_secret: bool = False) -> str:
    if not value.text.isprintable():
        shown = "" if is_secret else f", as {value.text[:80]!a} does"
        raise ValueError(f"{value.source} must not hold line breaks or other unprintable characters{shown}")
    return value.text
