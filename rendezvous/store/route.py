"""Which address this host has towards another."""

from __future__ import annotations

import socket


def address_towards(host: str | None, port: int) -> str:
    """The address from which packets to ``host`` would come; None is this host. Sends nothing. Raises OSError."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    except UnicodeError as error:  # as for an empty part between two dots
        raise OSError(f"{host!a} is no name of a host") from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
