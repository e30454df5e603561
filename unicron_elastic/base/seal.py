"""A seal on each message of a connection, so that nobody in between can change, invent, repeat, reorder or drop one.

A greeting proves who is at the other end at that moment, and no more. From the secret that it was about, and from what
both sides threw in at random, both make two keys that are of this connection alone, one for each direction. A seal is
an HMAC-SHA256 (RFC 2104) over the number of the message in its direction and its bytes, cut to its first half as the
RFC allows (section 5). It hides nothing: what is said can be read on the way.
"""

from __future__ import annotations

import hmac
import json

SEAL_BYTES = 16


class Seal:
    """One end of a connection. Messages are to be sealed in the order in which they go, and checked as they come."""

    def __init__(self, secret: bytes, *thrown: str, is_server: bool) -> None:
        """``thrown`` is what both sides threw in at random, in the same order at both ends."""
        keys = [hmac.digest(secret, json.dumps(["seal", side, *thrown]).encode(), "sha256") for side in ("s", "c")]
        self._own, self._theirs = keys if is_server else reversed(keys)
        self._sealed = self._checked = 0
        self._is_broken = False

    def of(self, message: bytes | bytearray) -> bytes:
        """The seal of the next message that is sent, ``SEAL_BYTES`` long."""
        self._sealed += 1
        return _seal(self._own, self._sealed, message)

    def fits(self, message: bytes | bytearray, seal: bytes | bytearray) -> bool:
        """Whether ``seal`` is the one of the next message that comes. After one that is not, none is."""
        self._checked += 1
        is_right = hmac.compare_digest(_seal(self._theirs, self._checked, message), bytes(seal))
        self._is_broken = self._is_broken or not is_right
        return not self._is_broken


def _seal(key: bytes, number: int, message: bytes | bytearray) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + message, "sha256")[:SEAL_BYTES]
