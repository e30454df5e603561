"""A connection to a torch TCPStore whose host falls silent breaks by itself.

torch waits for the answer of a store without a time-out, deaf to everything else. Where the host of the store loses
power, or is cut off, nothing ever comes: TCP by itself gives up after a quarter of an hour, or never.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator
from typing import TypeAlias

OpenFile: TypeAlias = tuple[int, int]  # its number, and its inode

SILENT_S = 5  # more than it takes to notice a lost host, and to make a world without it
_IDLE_S, _INTERVAL_S = 2, 1


def open_files() -> frozenset[OpenFile]:
    """Return what this process has open; a number that becomes another file's is another one."""
    return frozenset(number for number, _ in _files())


def break_when_silent(port: int, but: Collection[OpenFile] = ()) -> int:
    """Have the kernel end this process's connections to that port of a host that is silent; return how many there are.

    To be called when the store has just connected; what was open before is not looked at if it is named. Then what
    waits for an answer raises DistNetworkError.
    """
    found = 0
    for file, mode in _files():
        try:
            if file in but or not stat.S_ISSOCK(mode):
                continue
            duplicate = os.dup(file[0])  # the number may become another file's at any time
        except OSError:
            continue
        found += _watch(duplicate, port)
    return found


def _files() -> Iterator[tuple[OpenFile, int]]:
    for name in os.listdir("/proc/self/fd"):
        try:
            found = os.fstat(int(name))
        except OSError:
            continue
        yield (int(name), found.st_ino), found.st_mode


def _watch(duplicate: int, port: int) -> bool:
    is_blocking = os.get_blocking(duplicate)
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return False
    with connection:
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getpeername()[1] != port:
                return False
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENT_S - _IDLE_S) // _INTERVAL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
        except OSError:  # it listens, or has just been closed
            return False
        finally:
            os.set_blocking(duplicate, is_blocking)  # a default time-out of the script's has changed it for torch, too
    return True
