"""Under which address other hosts find this one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable

from unicron_elastic.rendezvous.store.address import StoreAddress


def address_towards(host: str | None, port: int) -> str:
    """The address from which packets to ``host`` would come; None is this host. Sends nothing. Raises OSError."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except UnicodeError as error:  # as for an empty part between two dots
        raise OSError(f"{host!a} is no name of a host") from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def own_address(store: StoreAddress) -> str:
    """Return where other hosts find this one, which reaches the store as they do."""
    return address_of_this_host((each.host, each.port) for each in store.endpoints)


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
