from __future__ import annotations

import socket

from unicron_elastic.base.store_link import SILENT_S, break_when_silent, open_files


def connected() -> tuple[socket.socket, socket.socket, socket.socket]:
    """Return who listens, and both ends of a connection to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    return listener, client, listener.accept()[0]


def patience_ms(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_the_connection_that_was_just_made_is_watched() -> None:
    listener, before, _end = connected()
    known = open_files()
    client = socket.create_connection(listener.getsockname())
    assert break_when_silent(listener.getsockname()[1], known) == 1
    assert patience_ms(client) == SILENT_S * 1000
    assert patience_ms(before) == 0


def test_a_number_that_is_another_file_by_now_is_looked_at() -> None:
    listener, before, _end = connected()
    known, number = open_files(), before.fileno()
    before.close()
    client = socket.create_connection(listener.getsockname())
    assert client.fileno() == number
    assert break_when_silent(listener.getsockname()[1], known) == 1


def test_all_are_looked_at_if_none_is_named() -> None:
    listener, client, _end = connected()
    assert break_when_silent(listener.getsockname()[1]) == 1
    assert patience_ms(client) == SILENT_S * 1000
