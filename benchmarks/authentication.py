"""What it costs that messages between nodes have seals: ``python benchmarks/authentication.py``.

A seal, made and checked, for messages as they are: a fault on a heartbeat connection, frames of output and of state.
And for the bytes of tensors, which have none: what an HMAC would cost, beside the checksum that they have and a socket.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import socket
import statistics
import threading
import time
from collections.abc import Callable

from unicron_elastic.base.seal import Seal
from unicron_elastic.rendezvous.cluster.heartbeat_wire import Nonces, line, read, read_sealed, seal_of, sealed_line
from unicron_elastic.state.checksum import Checksum

SECRET = "5e" * 32
FAULT = {"fault": {"job": "chat", "round": 3, "reason": "Rank 3 was killed by SIGKILL (exit code -9)."}}
BULK_BYTES = 64 * 1024 * 1024


def seconds(act: Callable[[], object], count: int, repeats: int) -> list[float]:
    """What one ``act`` takes, in each of ``repeats`` rounds of ``count``."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(count):
            act()
        found.append((time.perf_counter() - began) / count)
    return found


def told(what: str, found: list[float], scale: float = 1e6, unit: str = "us") -> float:
    """Prints median, least and most; returns the median."""
    values = sorted(each * scale for each in found)
    print(f"{what:58} {statistics.median(values):9.2f} {unit}  ({values[0]:.2f} to {values[-1]:.2f})", flush=True)
    return statistics.median(found)


def messages(repeats: int) -> None:
    """Of messages that have effects."""
    nonces = Nonces("c" * 32, "n" * 32)

    def plainly() -> None:
        read(line(FAULT)[:-1])

    mine, theirs = (seal_of(SECRET, nonces, is_coordinator=is_it) for is_it in (False, True))

    def sealed() -> None:
        read_sealed(sealed_line(FAULT, mine)[:-1], theirs)

    plain_s = told("a fault, written and read, without a seal", seconds(plainly, 2000, repeats))
    sealed_s = told("the same with its seal, made and checked", seconds(sealed, 2000, repeats))
    print(f"{'so a seal costs':58} {(sealed_s - plain_s) * 1e6:9.2f} us")
    for size in (8, 1024, 16 * 1024, 64 * 1024):
        told(f"a message of {size} bytes, sealed and checked", seconds(_sealing(nonces, bytes(size)), 500, repeats))


def _sealing(nonces: Nonces, message: bytes) -> Callable[[], bool]:
    one, other = (Seal(SECRET.encode(), *nonces, is_server=is_it) for is_it in (False, True))
    return lambda: other.fits(message, one.of(message))


def bulk(repeats: int) -> None:
    """Of the bytes of tensors."""
    data = bytearray(BULK_BYTES)
    view = memoryview(data)

    def checked() -> None:
        Checksum().add(view)

    def over_loopback() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sender = threading.Thread(target=lambda: socket.create_connection(listener.getsockname()).sendall(data))
            sender.start()
            connection, _ = listener.accept()
            with connection:
                left = BULK_BYTES
                while left:
                    left -= connection.recv_into(view[:left], min(left, 1 << 20))
            sender.join()

    for what, act in (
        ("a socket over loopback", over_loopback),
        ("our checksum, at one end", checked),
        ("HMAC-SHA256, at one end", lambda: hmac.digest(b"k" * 32, data, "sha256")),
        ("keyed BLAKE2b, at one end", lambda: hashlib.blake2b(data, key=b"k" * 32).digest()),
    ):
        rates = sorted(BULK_BYTES / each / 1e9 for each in seconds(act, 1, repeats))
        print(f"{what:58} {statistics.median(rates):9.2f} GB/s  ({rates[0]:.2f} to {rates[-1]:.2f})", flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=9)
    given = options.parse_args()
    messages(given.repeats)
    bulk(given.repeats)
