"""torch's TCPStore, hosted on one address of this node instead of on all.

The store has no password, and torch's listens on every address whatever host it is given: also on that of a public
network beside the cluster's. A socket that is bound before, and handed over, is the way around that.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from unicron_elastic.compat.expectations import Feature, lacks

_BACKLOG = 2048  # as torch's own


def bound_store(address: str, timeout: timedelta, port: int = 0) -> TCPStore:
    """A new store in this process, on a port of the system's choice for 0; ``address`` is what others will be told.

    If that is an address of this node, the store listens there and nowhere else. A name may stand for another address
    here than elsewhere, as for a loopback one in Debian's /etc/hosts: then it listens on all, as torch's does.
    Raises DistNetworkError if it cannot have the port.
    """
    listener = None if lacks(Feature.BIND) else _listener(address, port)
    if listener is None:
        return TCPStore("0.0.0.0", port, None, True, timeout, wait_for_workers=False)
    port, fd = listener.getsockname()[1], listener.detach()
    try:
        return TCPStore(address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=fd)
    except BaseException:
        os.close(fd)
        raise


def _listener(address: str, port: int) -> socket.socket | None:
    """None if ``address`` is none, or none of this node, or the port is taken: let torch say so."""
    try:
        version = ipaddress.ip_address(address).version
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except (OSError, ValueError):
        return None
