"""By which names a server here may be asked for."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

# What no public name ends in, so that no page on the internet can be called so (RFC 6761, 6762, 8375; ICANN for
# internal; svc is Kubernetes' own).
_PRIVATE = (".localhost", ".local", ".internal", ".home.arpa", ".svc")
RESOLVER = Path("/etc/resolv.conf")


class HostNames:
    """`HostNames` knows what this host is called by those who may ask it.

    A page on the internet can have its own name stand for an address here, and so have the browser of somebody inside
    ask us and read the answer. Its requests still bear the page's name. An address, a name without a dot, one below a
    domain that this host searches, or one of its own cannot be such a page's.
    """

    def __init__(
        self, address: str, *, resolver: Path = RESOLVER, own: Callable[[], Iterable[str]] | None = None
    ) -> None:
        """``address`` is what the server listens on. ``own`` looks up what the host is called, which may take long."""
        self._address = _plain(address)
        self._look_up = own or (lambda: (socket.gethostname(), socket.getfqdn()))
        self._below = (*_PRIVATE, *_searched(resolver))

    def knows(self, host: str) -> bool:
        """Whether a request with this Host header may be answered; "" is that of one without, as no browser sends."""
        name = _plain(_without_port(host))
        if "." not in name or _is_address(name) or name.endswith(self._below) or name == self._address:
            return True
        return name in self._own

    @cached_property
    def _own(self) -> frozenset[str]:
        return frozenset(_plain(each) for each in self._look_up())


def _without_port(host: str) -> str:
    name, colon, port = host.strip().rpartition(":")
    return name if colon and port.isdecimal() and (name.endswith("]") or ":" not in name) else host.strip()


def _plain(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _searched(resolver: Path) -> list[str]:
    """The domains in which the system looks for short names, each as the end of a name."""
    found: list[str] = []
    try:
        for line in resolver.read_text(encoding="utf-8", errors="replace").splitlines():
            word, *domains = line.split() or [""]
            if word in ("search", "domain"):
                found = [f".{_plain(each)}" for each in domains if _plain(each)]
    except OSError:
        pass
    return found
