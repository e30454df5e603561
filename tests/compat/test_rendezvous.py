"""What is put into torch's dynamic rendezvous names methods as torch does, and looks at one frame for it."""

from __future__ import annotations

import inspect
import socket
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous

from unicron_elastic.compat.rendezvous import name_methods_at_once
from unicron_elastic.rendezvous.torch.choose import rendezvous_handler

TORCHS = dynamic_rendezvous.get_method_name


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The name that is put in torch's place, which is put back afterwards."""
    monkeypatch.setattr(dynamic_rendezvous, "get_method_name", TORCHS)
    name_methods_at_once()
    return dynamic_rendezvous.get_method_name


def test_names_are_those_of_torch(names: Any) -> None:
    assert names is not TORCHS

    def record(name: Any, *depth: int) -> str:
        return name(*depth)

    def outer(name: Any, *depth: int) -> str:
        return record(name, *depth)

    for depth in ((), (0,), (1,), (2,), (3,), (10_000,)):
        ours, torchs = outer(names, *depth), outer(TORCHS, *depth)
        assert ours == torchs or depth == (0,), depth  # at 0 stands the name itself, of which torch asks nothing
    assert outer(names) == "outer"


@pytest.mark.usefixtures("names")
def test_a_meeting_lists_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[int] = []
    plain = inspect.stack
    monkeypatch.setattr(inspect, "stack", lambda *context: (listed.append(1), plain(*context))[1])
    with socket.create_server(("localhost", 0)) as server:  # for port 0 a handler of ours would be made
        port = server.getsockname()[1]
    handler = rendezvous_handler(
        RendezvousParameters("c10d", f"localhost:{port}", "lists-no-frames", 1, 1, local_addr="localhost")
    )
    try:
        assert handler.next_rendezvous().world_size == 1
        assert not listed
        monkeypatch.setattr(dynamic_rendezvous, "get_method_name", TORCHS)
        assert handler.next_rendezvous().world_size == 1
        assert listed  # as torch does, so that the count is one that can rise
    finally:
        handler.shutdown()
