"""What a failed call to etcd means: whether it was done, whose fault it is, and the words for it."""

from __future__ import annotations

from enum import Enum, auto

from unicron_elastic.base.text import one_line
from unicron_elastic.rendezvous.store.library import grpc

_LONGEST = 200  # characters of a server's own words


class Meaning(Enum):
    """What follows from an error."""

    NOT_DONE = auto()  # the server never began: another one may be asked
    UNCLEAR = auto()  # it may have been done
    STALE_TOKEN = auto()  # log in again; not done
    DENIED = auto()
    REFUSED = auto()
    LEASE_GONE = auto()


# The server's own texts are in etcd's api/v3rpc/rpctypes/error.go.
_BY_TEXT = (
    ("requested lease not found", Meaning.LEASE_GONE),
    ("invalid auth token", Meaning.STALE_TOKEN),
    ("revision of auth store is old", Meaning.STALE_TOKEN),
    ("user name is empty", Meaning.STALE_TOKEN),  # there was no token, as passwords were not asked for until now
    ("invalid user ID or password", Meaning.DENIED),
    ("no leader", Meaning.NOT_DONE),
    ("too many requests", Meaning.NOT_DONE),
    ("failed to connect", Meaning.NOT_DONE),
    ("name resolution", Meaning.NOT_DONE),
    ("DNS", Meaning.NOT_DONE),
)
_BY_CODE = {
    grpc.StatusCode.PERMISSION_DENIED: Meaning.DENIED,
    grpc.StatusCode.UNAUTHENTICATED: Meaning.DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Meaning.REFUSED,
    grpc.StatusCode.INVALID_ARGUMENT: Meaning.REFUSED,
    grpc.StatusCode.FAILED_PRECONDITION: Meaning.REFUSED,
    grpc.StatusCode.OUT_OF_RANGE: Meaning.REFUSED,
    grpc.StatusCode.NOT_FOUND: Meaning.REFUSED,
    grpc.StatusCode.UNIMPLEMENTED: Meaning.REFUSED,
}
_WORDS = (
    ("CERTIFICATE_VERIFY_FAILED", "shows a certificate that the given CA did not sign"),
    ("Hostname Verification Check failed", "shows a certificate for another host"),
    ("is not in peer certificate", "shows a certificate for another host"),
    ("WRONG_VERSION_NUMBER", "does not speak TLS; give its address as http://"),
    ("Connection refused", "refuses connections: no server runs there"),
    ("No route to host", "cannot be reached: no route to the host"),
    ("Network is unreachable", "cannot be reached: no route to the network"),
    ("name resolution", "has a name that cannot be resolved"),
    ("DNS", "has a name that cannot be resolved"),
    ("no leader", "has no leader: too few servers of the cluster reach each other"),
    ("user name is empty", "lets nobody in without a user and a password"),
    ("invalid user ID or password", "does not know the user or the password"),
    ("database space exceeded", "takes no more writes: its disk quota is used up"),
)


def meaning(error: grpc.RpcError) -> Meaning:
    """What follows from ``error``; UNCLEAR is the safe answer to what is not known."""
    text = _details(error)
    by_text = next((meant for part, meant in _BY_TEXT if part in text), None)
    return _BY_CODE.get(error.code(), Meaning.UNCLEAR) if by_text is None else by_text


def describe(error: grpc.RpcError, waited_s: float) -> str:
    """What the server did, in words that follow its name. ``waited_s`` is the time it had to answer."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"did not answer within {waited_s:.1f} s"
    text = _details(error)
    words = next((words for part, words in _WORDS if part in text), None)
    if words is None and error.code() is grpc.StatusCode.PERMISSION_DENIED:
        return "does not allow this user to use the key"
    said = one_line(text.removeprefix("etcdserver: "), _LONGEST)
    return words or f"failed: {said or error.code().name}"


def _details(error: grpc.RpcError) -> str:
    return str(error.details() or "")
