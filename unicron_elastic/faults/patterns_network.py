"""What NCCL, gloo and torch.distributed write when a collective, a connection or the store fails.

Every text that a *healthy* process writes because another one went away is a consequence. The flag is relative: it only
loses against a fault that has no such excuse, so in doubt about a peer (NCCL's internal error) it is set.
"""

from __future__ import annotations

from unicron_elastic.base.fault import Status
from unicron_elastic.faults.pattern import Row, peer_row, row

_TIMEOUT = Status.COLLECTIVE_TIMEOUT
_CONNECTION = Status.CONNECTION_REFUSED_OR_RESET
_OTHER = Status.OTHER_NETWORK_ERROR

# "A call failed", in the words of strerror(3), as NCCL, gloo and c10d repeat them.
_GONE = r"(?:connection (?:refused|reset by peer|closed by (?:remote )?peer)|broken pipe)"

# NCCL writes these on the rank whose own port, memory or arguments are at fault, so they are causes.
_NCCL_OWN = (
    row("NCCL net_ib", r"NET/IB : (?:\S{1,40} )?Got async event : port error", Status.LINK_FLAPPING),
    row("NCCL shm", r"Error while creating shared memory segment", Status.OUT_OF_HOST_MEMORY),
    row("NCCL", r"ncclInvalid(?:Usage|Argument)|Duplicate GPU detected", Status.OTHER_SOFTWARE_ERROR),
    row(
        "torch ProcessGroupNCCL, heartbeat monitor",
        r"watchdog got stuck for \d+ seconds[^\n.]{0,80}|due to ProcessGroupNCCL watchdog hang",
        Status.TASK_HANG,
    ),
)

# The order matters: an aborted communicator quotes the reason, and the time-out that aborted it is the better status.
_NCCL = (
    peer_row("torch ProcessGroupNCCL, watchdog", r"Watchdog caught collective operation timeout", _TIMEOUT),
    peer_row(
        "torch ProcessGroupNCCL, monitor",
        r"Received a dump signal due to a collective timeout from[^\n]{0,20}rank|"
        r"flight recorder dump signal from another rank",
        _TIMEOUT,
    ),
    peer_row("NCCL net_ib", r"Got completion from peer \S{1,60} with (?:error|status)", _OTHER),
    peer_row("NCCL socket, with the peer's end", rf"(?:socket\w+|Net) ?: [^\n]{{0,160}}{_GONE}", _CONNECTION),
    peer_row("NCCL", r"ncclRemoteError|remote process exited or there was a network error", _CONNECTION),
    peer_row("torch ProcessGroupNCCL", r"NCCL communicator was aborted on rank \d+", _OTHER),
    # nccl#795: a remote error surfaces as an internal one further up, so the peer is the likelier cause.
    peer_row("NCCL", r"ncclInternalError|internal error - please report this issue to the NCCL", _OTHER),
    peer_row(
        "torch ProcessGroupNCCL, unique id", r"is setting up NCCL communicator and retr\w{3}ing ncclUniqueId", _OTHER
    ),
    row("NCCL", r"ncclSystemError|unhandled system error", _OTHER),
    row("NCCL, any other", r"\bNCCL error\b", _OTHER),
)

_GLOO = (
    peer_row("torch ProcessGroupGloo", r"failed to pass monitoredBarrier", _TIMEOUT),
    peer_row("gloo unbound_buffer.cc", r"Timed out waiting \d+ms for (?:recv|send) operation to complete", _TIMEOUT),
    peer_row("gloo pair.cc, after a time-out", r"Application timeout caused pair closure", _TIMEOUT),
    peer_row("gloo pair.cc", r"Connection closed by peer \S{1,60}", _CONNECTION),
    peer_row("gloo pair.cc", rf"(?:Read|Write) error \S{{1,60}} {_GONE}", _CONNECTION),
    peer_row("gloo connectFullMesh", r"Gloo connectFullMesh failed", _CONNECTION),
    # A collective called with different sizes: the process is ended by std::terminate, so only stderr has the text.
    row(
        "gloo pair.cc",
        r"Received data size doesn't match expected size",
        Status.OTHER_SOFTWARE_ERROR,
    ),
    peer_row("gloo, any other", r"gloo/transport/\w+/\w+\.cc:\d+\][^\n]{0,120}", _OTHER),
)

_C10D = (
    row("torch c10d socket", r"EADDRINUSE|address already in use", _OTHER),
    peer_row("torch c10d socket", r"The client socket has (?:timed out|failed to connect)[^\n]{0,120}", _OTHER),
    peer_row("torch c10d TCPStore", r"Failed to recv, got 0 bytes|Connection was likely closed", _CONNECTION),
    peer_row("torch c10d", _GONE, _CONNECTION, type_name=r"Dist\w*Error"),
    peer_row(
        "torch c10d TCPStore", r"wait timeout after \d+ms, keys|Timed out after \d+ seconds waiting for \w+", _OTHER
    ),
    peer_row("torch c10d before 2.5", r"\bSocket Timeout\b", _OTHER),
    peer_row("torch elastic", r"", _OTHER, type_name=r"Rendezvous\w*(?:Error|Exit)"),
    row("torch c10d", r"", _OTHER, type_name=r"Dist(?:Network|Store|Backend)Error"),
)

NETWORK_ROWS: tuple[Row, ...] = (*_NCCL_OWN, *_NCCL, *_GLOO, *_C10D)
