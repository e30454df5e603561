"""Where the store is and how to be let in, from options and the environment. Never imports torch or gRPC.

An option wins over its environment variable. A password stands in a file or in the environment, never in a command
line, where every user of the machine could read it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from unicron_elastic.rendezvous.store.address import StoreAddress, TlsFiles

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


def address_from_options(
    endpoint: str | None,
    given: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
    *,
    spell: Callable[[str], str] = str,
) -> StoreAddress:
    """The address that ``given``, options by name as in ``--rdzv-conf``, and the environment make up.

    Options that do not begin with ``etcd_`` are somebody else's. ``spell`` makes an option's name for the error texts.
    An empty endpoint or variable counts as none; an empty option is an error. Raises ValueError: one sentence without a
    full stop, which names the option or variable that is wrong and what would be right.
    """
    _check_names(given, spell)
    ca, cert, key, user, password_file = (_value(name, given, environ, spell) for name in OPTIONS)
    return StoreAddress.parse(
        named_endpoint(endpoint, environ) or DEFAULT_ENDPOINT,
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


def named_endpoint(endpoint: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Where the store is, as an option or a variable says; "": none does."""
    texts = (endpoint or "", *(environ.get(name, "") for name in ENDPOINT_VARIABLES))
    return next((text for text in texts if text.strip()), "")


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
