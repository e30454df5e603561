"""How much a collective has moved while it runs: to break it in its middle, not merely near it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import Any

# struct tcp_info of include/uapi/linux/tcp.h: tcpi_bytes_acked and tcpi_bytes_received, Linux 4.1 and newer.
_BYTES_OFFSET = 120
_INFO_BYTES = _BYTES_OFFSET + 16


class _Traffic:
    """Bytes that this process's TCP connections have carried, both ways, since this was made."""

    def __init__(self) -> None:
        self._fds: list[int] = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    _carried(int(name))  # raises for what is no TCP connection
                    self._fds.append(int(name))
        self._before = self._total()

    def moved(self) -> int:
        return self._total() - self._before

    def _total(self) -> int:
        total = 0
        for fd in self._fds:
            with contextlib.suppress(OSError):
                total += _carried(fd)
        return total


def _carried(fd: int) -> int:
    connection = socket.socket(fileno=fd)
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    finally:
        connection.detach()  # it is not ours to close
    if len(info) < _INFO_BYTES:
        return 0
    acknowledged, received = struct.unpack_from("=QQ", info, _BYTES_OFFSET)
    return int(acknowledged + received)


def wait_until_moving(start: Any, tensor: Any) -> tuple[Any, int]:
    """Calls ``start``, which begins a collective on ``tensor``; returns its work in its midst, and the bytes moved.

    In its midst is a collective over TCP that has moved half of the tensor's bytes. One that is done by then, and one
    whose way cannot be seen (on a GPU), is returned as it is.
    """
    if tensor.device.type != "cpu":
        return start(), 0
    traffic = _Traffic()
    enough = tensor.numel() * tensor.element_size() // 2
    work = start()
    moved = 0
    while work is not None and not work.is_completed() and moved < enough:
        time.sleep(0)  # the transfer may need this core
        moved = traffic.moved()
    return work, moved
