"""Which address this host has towards another."""

from __future__ import annotations

import socket

__all__ = ["address_towards"]


def address_towards(host: str | None, port: int) -> str:
    """The address from which packets to ``host`` would come; None is this host. Sends nothing. Raises OSError."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])
