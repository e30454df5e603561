"""What goes over a heartbeat connection: lines of JSON, an empty line as a beat, and the proof of who is there.

Both sides prove that they know the cluster's secret, which is in the store: who may read the store is of the cluster.
The proof is an HMAC over what both sides threw in at random, so that none can be used twice. From then on each line has
a seal before it (``unicron_elastic.base.seal``): what is said has effects. A beat has none, as nothing follows from it:
that the other host lives is what its kernel says by its acknowledgements. What is read is bounded.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from unicron_elastic.base.seal import Seal
from unicron_elastic.base.text import one_line

BEAT = b"\n"
LINE_BYTES_MAX = 16 * 1024
GONE_AFTER_S = 0.45  # without the kernel of the other host saying that it got what was sent
_NAME_CHARACTERS = 300
_TCP_USER_TIMEOUT = getattr(socket, "TCP_USER_TIMEOUT", 18)


class WireError(ValueError):
    """The other side says what no agent of this cluster says; the text says what, without a full stop."""


class Nonces(NamedTuple):
    """What both sides of one connection threw in at random."""

    coordinator: str
    agent: str


@dataclass(frozen=True, slots=True)
class Hello:
    """How an agent introduces itself to the coordinator."""

    node_id: str
    host: str
    job: str

    def line(self, secret: str, challenged: Mapping[str, Any]) -> tuple[bytes, Nonces]:
        """The answer to a challenge, and on what the coordinator has to prove its own knowledge. Raises WireError."""
        nonces = Nonces(_text(challenged, "nonce"), secrets.token_hex(16))
        told = {"node": self.node_id, "host": self.host, "job": self.job, "nonce": nonces.agent}
        return line({**told, "proof": self._proof(secret, nonces)}), nonces

    @classmethod
    def parse(cls, told: Mapping[str, Any], secret: str, challenge_nonce: str) -> tuple[Hello, Nonces]:
        """The hello in ``told`` and the nonces. Raises WireError if its sender does not know the secret."""
        hello = cls(_text(told, "node"), _text(told, "host"), _text(told, "job"))
        nonces = Nonces(challenge_nonce, _text(told, "nonce"))
        if not _is_same(hello._proof(secret, nonces), _text(told, "proof")):
            raise WireError("the other side does not know the cluster's secret")
        return hello, nonces

    def _proof(self, secret: str, nonces: Nonces) -> str:
        return _proof(secret, "agent", *nonces, self.node_id, self.host, self.job)


def challenge() -> tuple[bytes, str]:
    """What the coordinator says first, and the nonce in it."""
    nonce = secrets.token_hex(16)
    return line({"nonce": nonce}), nonce


def welcome(secret: str, nonces: Nonces, beat_s: float) -> bytes:
    """What the coordinator answers to a hello; ``beat_s``: how often the agent shall beat."""
    return line({"proof": _proof(secret, "coordinator", *nonces, repr(float(beat_s))), "beat_s": beat_s})


def read_welcome(told: Mapping[str, Any], secret: str, nonces: Nonces) -> float:
    """The seconds between two beats. Raises WireError if the coordinator does not know the secret, or refuses."""
    if "refused" in told:
        raise WireError(one_line(_text(told, "refused")))  # of somebody who has proven nothing
    beat_s = told.get("beat_s")
    if isinstance(beat_s, bool) or not isinstance(beat_s, int | float) or not 0.01 <= beat_s <= 10.0:
        raise WireError("beat_s is no number of seconds from 0.01 to 10")
    if not _is_same(_proof(secret, "coordinator", *nonces, repr(float(beat_s))), _text(told, "proof")):
        raise WireError("the coordinator does not know the cluster's secret")
    return float(beat_s)


def seal_of(secret: str, nonces: Nonces, *, is_coordinator: bool) -> Seal:
    """The seal of one end of a connection on which both have proven who they are."""
    return Seal(secret.encode(), *nonces, is_server=is_coordinator)


def sealed_line(told: Mapping[str, Any], seal: Seal) -> bytes:
    """The next message of a connection, with its seal before it."""
    text = line(told)
    return seal.of(text[:-1]).hex().encode() + b" " + text


def read_sealed(text: bytes, seal: Seal) -> Mapping[str, Any]:
    """The next message that came. Raises WireError, after which nothing of this connection is to be read."""
    said, space, message = text.partition(b" ")
    if not (space and seal.fits(message, _from_hex(said))):
        raise WireError("a line that the other side has not said at this point")
    return read(message)


def line(told: Mapping[str, Any]) -> bytes:
    """One message."""
    return json.dumps(told).encode() + b"\n"


def read(text: bytes) -> Mapping[str, Any]:
    """The message in one line. Raises WireError."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise WireError("a line that is no JSON object")
    return told


def listen(host: str) -> socket.socket:
    """At a port of the system's choice; on "" for IPv4 and IPv6, as a name may stand for either. Raises OSError."""
    listener = None
    if not host and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            listener = socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    if listener is None:
        host = host.strip("[]")
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0] if host else socket.AF_INET
        except UnicodeError as error:  # as for an empty part between two dots
            raise OSError(f"{host!a} is no name of a host") from error
        listener = socket.create_server((host, 0), family=family, backlog=1024)
    listener.setblocking(False)
    return listener


def watched(connection: socket.socket) -> None:
    """Lets the kernel end the connection soon after the other host has stopped to answer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_USER_TIMEOUT, int(GONE_AFTER_S * 1000))


class Lines:
    """Cuts what comes into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> Iterator[bytes]:
        """The lines that ``data`` ends, beats left out. Raises WireError for one that is too long."""
        *ended, self._rest = (self._rest + data).split(b"\n")
        for text in ended:
            if len(text) > LINE_BYTES_MAX:
                break
            if text:
                yield text
        else:
            if len(self._rest) <= LINE_BYTES_MAX:
                return
        raise WireError(f"a line of more than {LINE_BYTES_MAX} bytes")


def _proof(secret: str, *said: str) -> str:
    # As JSON, so that no two lists of texts make the same one.
    return hmac.new(secret.encode(), json.dumps(said).encode(), hashlib.sha256).hexdigest()


def _is_same(expected: str, proof: str) -> bool:
    # As bytes, because of texts compare_digest takes ASCII alone.
    return hmac.compare_digest(expected.encode(), proof.encode(errors="surrogatepass"))


def _from_hex(text: bytes) -> bytes:
    """The bytes of ``hex``; none if it is something else."""
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""


def _text(told: Mapping[str, Any], name: str) -> str:
    value = told.get(name)
    if not isinstance(value, str) or len(value) > _NAME_CHARACTERS:
        raise WireError(f"{name} is no text of at most {_NAME_CHARACTERS} characters")
    return value
