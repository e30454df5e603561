"""Strangers at a state server: they cause few lines, and keep no replica out."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import pytest
from state_source import make_state

from unicron_elastic.state.layout import flatten
from unicron_elastic.state.pull.client import pull
from unicron_elastic.state.pull.server import CONNECTIONS_MAX, Held, StateServer

DEADLINE_S = 20.0


class _Provider:
    def hold(self) -> Held:
        layout, tensors = flatten(make_state(0, 8))
        return Held(7, layout, tensors)

    def release(self, held: Held) -> None:
        pass


@pytest.fixture
def server() -> Iterator[StateServer]:
    opened = StateServer(_Provider(), b"key")
    yield opened
    opened.close()


def _stranger(server: StateServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.address["tcp"][1]), DEADLINE_S)


def _said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_refused_connections_are_one_line(server: StateServer, caplog: pytest.LogCaptureFixture) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]", b"\0\0\0\2{}") * 40:
        with _stranger(server) as stranger:
            stranger.sendall(said)
            while stranger.recv(4096):
                pass
    assert len(_said(caplog)) == 1, _said(caplog)[:3]
    pull([server.address], b"key", step=7, timeout_s=DEADLINE_S).release()


def test_silent_ones_make_room_for_a_replica(server: StateServer, caplog: pytest.LogCaptureFixture) -> None:
    silent = [_stranger(server) for _ in range(3 * CONNECTIONS_MAX)]
    began_at = time.monotonic()
    pull([server.address], b"key", step=7, timeout_s=DEADLINE_S).release()
    assert time.monotonic() - began_at < 4.0, "it waited for them to be dropped"
    assert len(_said(caplog)) <= 1
    for each in silent:
        each.close()
