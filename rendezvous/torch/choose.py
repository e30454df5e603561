"""Which rendezvous a job gets."""

from __future__ import annotations

import errno
import logging
import socket

from unicron_elastic.compat.meeting_state import read_no_code
from unicron_elastic.compat.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    get_rendezvous_handler,
    name_methods_at_once,
    parse_rendezvous_endpoint,
    static_place,
)
from unicron_elastic.rendezvous.job.job_rendezvous import JobRendezvous
from unicron_elastic.rendezvous.store.options import DEFAULT_ENDPOINT, named_endpoint
from unicron_elastic.rendezvous.store.own_address import address_of_this_host
from unicron_elastic.rendezvous.torch.create_handler import create_handler, nodes_of
from unicron_elastic.rendezvous.torch.fresh_store import FreshStoreRendezvous
from unicron_elastic.rendezvous.torch.handler import BACKEND
from unicron_elastic.rendezvous.torch.local import LocalRendezvous
from unicron_elastic.rendezvous.torch.static import StaticRendezvous

logger = logging.getLogger(__name__)

_PROBE_S = 1.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def rendezvous_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """torch's handler for these parameters, or ours where torch's would hand out a stale store.

    Raises ValueError for parameters that name no valid rendezvous, as torch does.
    """
    host, port = _endpoint(parameters)
    if parameters.backend == "static" and port == 0 and parameters.max_nodes > 1:
        raise ValueError(
            f"port 0 in the endpoint {parameters.endpoint!r} is any free port, which the other nodes could not know: "
            "give all nodes the same port (--master-port, or HOST:PORT in --rdzv-endpoint)"
        )
    if parameters.backend == "static" and parameters.max_nodes == 1 and port >= 0:
        return LocalRendezvous(
            backend="static", run_id=parameters.run_id, host=host, port=port, timeout_s=_timeout_s(parameters)
        )
    if parameters.backend == "c10d" and parameters.max_nodes == 1 and port == 0 and host in _LOOPBACK:
        return LocalRendezvous(backend="c10d", run_id=parameters.run_id, host=parameters.local_addr)
    if parameters.backend == BACKEND:
        return unicron_handler(parameters)
    read_no_code()  # torch unpickles what is in its store
    name_methods_at_once()
    inner = get_rendezvous_handler(parameters)
    if parameters.backend == "c10d":
        return FreshStoreRendezvous(inner, parameters.local_addr or address_of_this_host([(host, max(port, 1))]))
    place = static_place(inner)
    return inner if place is None else StaticRendezvous(inner, place, _timeout_s(parameters))


def unicron_handler(parameters: RendezvousParameters, default: str = DEFAULT_ENDPOINT) -> JobRendezvous:
    """Ours, in etcd; for a job of one node with no etcd, neither a named one nor at ``default``, one of its own.

    Raises ValueError for parameters that cannot be right.
    """
    most = nodes_of(parameters)[1]
    if most > 1 or named_endpoint(parameters.endpoint) or not _is_closed(default):
        return create_handler(parameters)
    logger.warning("No etcd is named, and nobody listens at %s: this job of one node does without.", default)
    return LocalRendezvous(backend=BACKEND, run_id=parameters.run_id, host=parameters.local_addr)


def _is_closed(endpoint: str) -> bool:
    """Whether nobody listens there, on this host."""
    host, _, port = endpoint.rpartition(":")
    with socket.socket() as probe:
        probe.settimeout(_PROBE_S)
        return probe.connect_ex((host, int(port))) == errno.ECONNREFUSED


def _endpoint(parameters: RendezvousParameters) -> tuple[str, int]:
    """Return host and port, of torch's own back ends; -1 where no port is given."""
    if parameters.backend not in ("c10d", "static"):
        return "", -1
    host, port = parse_rendezvous_endpoint(parameters.endpoint, default_port=-1)
    return str(host), int(port)


def _timeout_s(parameters: RendezvousParameters) -> float:
    """torch's static rendezvous reads ``timeout``; its dynamic one does not."""
    return float(int(parameters.get("timeout", 600)))
