"""Calls to one of several etcd servers: which of them, until when, and whether it still is the same store.

A server is not trusted with a write before it has proved itself by an answer that needs the quorum and shows the
store's incarnation: a key with a random value, written by whoever came first. So a write is unclear only if its server
fails in the very middle of it, and a server that lost its data is found out whatever its revision.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from unicron_elastic.rendezvous.store.address import Endpoint, StoreAddress, TlsFiles
from unicron_elastic.rendezvous.store.interface import (
    LeaseGoneError,
    StoreClosedError,
    StoreDeniedError,
    StoreRefusedError,
    StoreReplacedError,
    StoreUnclearError,
    StoreUnreachableError,
)
from unicron_elastic.rendezvous.store.library import grpc, messages
from unicron_elastic.rendezvous.store.meaning import Meaning, describe, meaning

INCARNATION = ".incarnation"
_CLOSED = "this connection to etcd was closed"
# A server that has lost its leader answers so at once instead of letting the call run into its deadline.
_METADATA = (("hasleader", "true"),)
_OPTIONS = (
    ("grpc.enable_retries", 0),  # a hidden retry could do a write twice
    ("grpc.enable_http_proxy", 0),  # a proxy for downloads, set for the whole site, is no way to the store
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel must mean a new connection
    ("grpc.max_receive_message_length", -1),  # a snapshot may be larger than gRPC's 4 MiB
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

_first_use: int | None = None  # the process in which gRPC began: it works in no fork of it


class Rpc:
    """A method of the server and its messages."""

    def __init__(self, path: str, request: Any, response: Any) -> None:
        self.path = f"/etcdserverpb.{path}"
        self.encode = request.SerializeToString
        self.decode = response.FromString


AUTHENTICATE = Rpc("Auth/Authenticate", messages.AuthenticateRequest, messages.AuthenticateResponse)
RANGE = Rpc("KV/Range", messages.RangeRequest, messages.RangeResponse)
TXN = Rpc("KV/Txn", messages.TxnRequest, messages.TxnResponse)
WATCH = Rpc("Watch/Watch", messages.WatchRequest, messages.WatchResponse)


class EtcdServer:
    """One endpoint: its channel, its token, and whether it has proved itself since its last failure."""

    def __init__(self, endpoint: Endpoint, tls: TlsFiles | None) -> None:
        self.endpoint = endpoint
        self.token = ""
        self.is_proven = False
        self._tls = tls
        self._channel: Any = None
        self._methods: dict[str, Any] = {}
        self._lock = threading.Lock()

    def call(self, rpc: Rpc, request: Any, timeout_s: float) -> Any:
        """One request and its answer. Raises grpc.RpcError, StoreClosedError."""
        with self._lock:
            method = self._methods.get(rpc.path)
            if method is None:
                open_method = self._open().unary_unary
                method = open_method(rpc.path, request_serializer=rpc.encode, response_deserializer=rpc.decode)
                self._methods[rpc.path] = method
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata())
        except ValueError as error:  # another thread has closed the channel
            raise StoreClosedError(_CLOSED) from error

    def stream(self, rpc: Rpc, requests: Iterator[Any]) -> Any:
        """The answers to a stream of requests, until it is cancelled. Iterating raises grpc.RpcError.

        Raises StoreClosedError.
        """
        with self._lock:
            open_method = self._open().stream_stream
        method = open_method(rpc.path, request_serializer=rpc.encode, response_deserializer=rpc.decode)
        try:
            return method(requests, metadata=self._metadata())
        except ValueError as error:
            raise StoreClosedError(_CLOSED) from error

    def distrust(self, *, renew: bool) -> None:
        """Note a failure. ``renew`` also gives up the connection: one that is silent may be dead for many minutes."""
        with self._lock:
            self.is_proven = False
            if renew:
                self._channel = None  # calls of other threads keep the old one until they end
                self._methods = {}

    def close(self) -> None:
        """Ends all calls."""
        with self._lock:
            channel, self._channel = self._channel, None
            self._methods = {}
        if channel is not None:
            channel.close()

    def abandon(self) -> list[Any]:
        """What it has of gRPC, which is no longer this object's."""
        held = [self._channel, *self._methods.values()]
        self._channel, self._methods = None, {}
        return held

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (*_METADATA, ("token", self.token)) if self.token else _METADATA

    def _open(self) -> Any:
        """The channel; the caller holds the lock."""
        if self._channel is None:
            self._channel = self._new_channel()
        return self._channel

    def _new_channel(self) -> Any:
        global _first_use  # noqa: PLW0603
        _first_use = _first_use or os.getpid()
        target = self.endpoint.target
        if self._tls is None:
            return grpc.insecure_channel(target, options=_OPTIONS)
        try:
            files = [
                None if path is None else path.read_bytes() for path in (self._tls.ca, self._tls.key, self._tls.cert)
            ]
        except OSError as error:
            raise StoreUnreachableError(
                f"the TLS file {error.filename} can no longer be read: {error.strerror}"
            ) from error
        return grpc.secure_channel(target, grpc.ssl_channel_credentials(*files), options=_OPTIONS)


class EtcdConnection:
    """Finds a server that answers, and stays with it. Safe from any thread; opens nothing before the first call."""

    def __init__(self, address: StoreAddress, root: str) -> None:
        self.servers = [EtcdServer(endpoint, address.tls) for endpoint in address.endpoints]
        self._address = address
        self._incarnation_key = (root + INCARNATION).encode()
        self._incarnation = b""  # unknown before the first answer
        self._revision = 0  # the highest that was seen
        self._current = 0  # which server is asked first
        self._lock = threading.Lock()
        self._pid = os.getpid() if _first_use is None else _first_use
        self._is_closed = False
        self._replaced: str | None = None
        _connections.add(self)

    def call(self, rpc: Rpc, request: Any, timeout_s: float) -> Any:
        """Asks the servers one after the other until one answers; for what does no harm if it is done twice.

        Raises StoreError, LeaseGoneError.
        """
        return self._try_servers(timeout_s, lambda server, left_s: self._ask(server, rpc, request, left_s))

    def transact(self, compare: list[Any], success: list[Any], timeout_s: float, *, is_write: bool) -> Any | None:
        """Does ``success`` in the store that is known if all of ``compare`` hold; the answer, or None if one did not.

        A write that was sent goes to no second server. Raises StoreError, LeaseGoneError.
        """
        seen = self._revision

        def attempt(server: EtcdServer, left_s: float) -> Any:
            same = messages.Compare(key=self._incarnation_key, target="VALUE", result="EQUAL", value=self._incarnation)
            failure = [messages.RequestOp(request_range=messages.RangeRequest(key=self._incarnation_key))]
            request = messages.TxnRequest(compare=[same, *compare], success=success, failure=failure)
            return self._ask(server, TXN, request, left_s)

        answer = self._try_servers(timeout_s, attempt, is_write=is_write)
        if not answer.succeeded:
            self._check_incarnation(answer.responses[0].response_range.kvs)
        self._check_revision(answer.header.revision, seen)
        return answer if answer.succeeded else None

    def read(self, request: Any, timeout_s: float) -> Any:
        """The answer to a range request, from the store that is known. Raises StoreError.

        The store's incarnation is asked for afterwards: what came before it is of the same store, or of none. One
        transaction could do both, but etcd 3.5.1 ends itself when a client gives up one that only reads.
        """
        seen = self._revision

        def attempt(server: EtcdServer, left_s: float) -> tuple[Any, Any]:
            ends_at = time.monotonic() + left_s
            answer = self._ask(server, RANGE, request, left_s)
            return answer, self._read_incarnation(server, ends_at)

        answer, incarnation = self._try_servers(timeout_s, attempt)
        self._check_incarnation(incarnation.kvs)
        self._check_revision(answer.header.revision, seen)
        return answer

    def prove(self, timeout_s: float) -> EtcdServer:
        """A server that has just proved itself. Raises StoreError."""
        self.check_open()
        with self._lock:
            self.servers[self._current].is_proven = False
        server: EtcdServer = self._try_servers(timeout_s, lambda server, _left_s: server)
        return server

    def fail(self, server: EtcdServer) -> None:
        """The server was found silent: the next call begins with another one."""
        server.distrust(renew=True)
        with self._lock:
            if self.servers[self._current] is server:
                self._current = (self._current + 1) % len(self.servers)

    @property
    def is_ours(self) -> bool:
        """Whether this process may use it: not after a fork."""
        return self._pid == os.getpid()

    def check_open(self) -> None:
        """Raises StoreClosedError or StoreReplacedError if this object is of no use any more."""
        if not self.is_ours:
            raise StoreClosedError(
                f"this connection to etcd belongs to process {self._pid}, and gRPC cannot be used after a fork; "
                "start a program of its own for what needs the store"
            )
        if self._is_closed:
            raise StoreClosedError(_CLOSED)
        if self._replaced is not None:
            raise StoreReplacedError(self._replaced)

    def close(self) -> None:
        """Ends all calls. In a forked child it leaves the parent's connections alone."""
        self._is_closed = True
        if self.is_ours:
            for server in self.servers:
                server.close()

    def _try_servers(
        self, timeout_s: float, attempt: Callable[[EtcdServer, float], Any], *, is_write: bool = False
    ) -> Any:
        """Makes the attempt with each server at most once, until one answers."""
        ends_at = time.monotonic() + timeout_s
        problems: list[str] = []
        first, count = self._current, len(self.servers)
        for tried in range(count):
            self.check_open()
            number = (first + tried) % count
            server = self.servers[number]
            share_s = _until(ends_at) / (count - tried)  # a silent server must leave time to ask the others
            is_sent = False
            try:
                if not server.is_proven:
                    self._prove(server, share_s)
                is_sent = True
                answer = attempt(server, _until(ends_at) if is_write else min(_until(ends_at), share_s))
            except grpc.RpcError as error:
                problems.append(self._judge(server, error, share_s, is_unclear=is_sent and is_write))
            else:
                self._current = number
                return answer
        where = problems[0] if len(problems) == 1 else f"no etcd server can be used: {'; '.join(problems)}"
        raise StoreUnreachableError(where)

    def _judge(self, server: EtcdServer, error: grpc.RpcError, waited_s: float, *, is_unclear: bool) -> str:
        """What is wrong with the server, if another one may be asked; raises what the caller must know."""
        self.check_open()
        meant = meaning(error)
        what = f"etcd at {server.endpoint} {describe(error, waited_s)}"
        if meant is Meaning.LEASE_GONE:
            raise LeaseGoneError("the lease is gone") from error
        server.distrust(renew=error.code() is grpc.StatusCode.DEADLINE_EXCEEDED)
        if meant in (Meaning.DENIED, Meaning.STALE_TOKEN):
            raise StoreDeniedError(what) from error
        if meant is Meaning.REFUSED:
            raise StoreRefusedError(what) from error
        if meant is Meaning.UNCLEAR and is_unclear:
            raise StoreUnclearError(f"{what}, so that a write may have been done or not") from error
        return what

    def _ask(self, server: EtcdServer, rpc: Rpc, request: Any, timeout_s: float) -> Any:
        ends_at = time.monotonic() + timeout_s
        try:
            return server.call(rpc, request, timeout_s)
        except grpc.RpcError as error:
            if meaning(error) is not Meaning.STALE_TOKEN or self._address.user is None:
                raise
        self._log_in(server, _until(ends_at))
        return server.call(rpc, request, _until(ends_at))

    def _log_in(self, server: EtcdServer, timeout_s: float) -> None:
        server.token = ""
        request = messages.AuthenticateRequest(name=self._address.user, password=self._address.password)
        try:
            server.token = server.call(AUTHENTICATE, request, timeout_s).token
        except grpc.RpcError as error:
            # As etcd's own clients do: a password is no obstacle where none is asked for.
            if "authentication is not enabled" not in str(error.details()):
                raise

    def _prove(self, server: EtcdServer, timeout_s: float) -> None:
        ends_at = time.monotonic() + timeout_s
        if self._address.user is not None and not server.token:
            self._log_in(server, timeout_s)
        seen = self._revision
        answer = self._read_incarnation(server, ends_at)
        if not self._incarnation and not answer.kvs:
            self._write_incarnation(server, ends_at)
            answer = self._read_incarnation(server, ends_at)
        self._check_incarnation(answer.kvs)
        self._check_revision(answer.header.revision, seen)
        server.is_proven = True

    def _read_incarnation(self, server: EtcdServer, ends_at: float) -> Any:
        return self._ask(server, RANGE, messages.RangeRequest(key=self._incarnation_key), _until(ends_at))

    def _write_incarnation(self, server: EtcdServer, ends_at: float) -> None:
        """Names a store that is empty, unless somebody else is faster."""
        key, value = self._incarnation_key, uuid.uuid4().hex.encode()
        absent = messages.Compare(key=key, target="CREATE", result="EQUAL", create_revision=0)
        write = messages.RequestOp(request_put=messages.PutRequest(key=key, value=value))
        self._ask(server, TXN, messages.TxnRequest(compare=[absent], success=[write]), _until(ends_at))

    def _check_incarnation(self, kvs: Any) -> None:
        found = bytes(kvs[0].value) if kvs else b""
        with self._lock:
            if not self._incarnation:
                self._incarnation = found
            is_same = found == self._incarnation
        if not is_same:
            self._replace("its data is gone" if not found else "another store answers in its place")

    def _check_revision(self, revision: int, seen: int) -> None:
        """``seen`` was known before the call began, so that an honest store cannot answer with less."""
        if revision < seen:
            self._replace(f"it went back from revision {seen} to {revision}, as if an old backup had been restored")
        with self._lock:
            self._revision = max(self._revision, revision)

    def _replace(self, what: str) -> None:
        self._replaced = f"etcd at {self._address} is no longer the store that it was: {what}"
        raise StoreReplacedError(self._replaced)


def _until(ends_at: float) -> float:
    """Seconds until the deadline, and a little if it has passed: gRPC takes no less for "at once"."""
    return max(0.001, ends_at - time.monotonic())


_connections: weakref.WeakSet[EtcdConnection] = weakref.WeakSet()


def _forget_channels() -> None:
    """Forget channels in a forked child: gRPC's threads are missing, and freeing one would wait for them for ever."""
    for connection in list(_connections):
        for server in connection.servers:
            for held in server.abandon():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


os.register_at_fork(after_in_child=_forget_channels)
