"""Chunks land where nobody else's have been accepted."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from unicron_elastic.state.pull.chunks import Chunks
from unicron_elastic.state.pull.distance import Address, Distance
from unicron_elastic.state.pull.landing import Landing
from unicron_elastic.state.pull.memory import TensorMemory
from unicron_elastic.state.pull.session import Session
from unicron_elastic.state.pull.transfer import Fetch

DEADLINE_S = 20.0
CHUNK_BYTES = 64


class Waiting(Session):
    """A session in which one fetch of the first source stops between being asked for and having a place."""

    def __init__(self, memory: TensorMemory, sources: int) -> None:
        super().__init__(memory, sources)
        self.may_land = threading.Event()
        self.landed: list[Landing] = []
        self.has_landed = threading.Event()

    def _landing(self, fetch: Fetch) -> Landing:
        if fetch.source != 0:
            return super()._landing(fetch)
        self.may_land.wait(DEADLINE_S)
        landing = super()._landing(fetch)
        self.landed.append(landing)
        self.has_landed.set()
        return landing


class Source:
    """A link that answers when it may."""

    way = "TCP"
    distance = Distance.OTHER_HOST

    def __init__(self, name: str, lanes: int, blocked: frozenset[int] = frozenset()) -> None:
        self.address = Address(name, "boot", 1, ("", 0), "", "", "replica")
        self.lanes = lanes
        self.may_go_on = threading.Event()
        self._blocked = blocked

    def fetch(self, landing: Landing, _slot: int) -> bool:
        """The chunk, with the right checksum."""
        if landing.chunk in self._blocked:
            self.may_go_on.wait(DEADLINE_S)
        return True

    def close(self) -> None:
        """Nothing to close."""


def test_a_chunk_that_another_source_has_brought_meanwhile_lands_aside() -> None:
    tensors = [torch.zeros(3 * CHUNK_BYTES, dtype=torch.uint8)]
    session = Waiting(TensorMemory(tensors, Chunks([3 * CHUNK_BYTES], chunk_bytes=CHUNK_BYTES)), 2)
    slow, fast = Source("slow", 1), Source("fast", 2, frozenset({2}))
    links: list[Any] = [slow, fast]
    session.add(0, links[0])
    session.add(1, links[1])
    end = time.monotonic() + DEADLINE_S
    while session._state.accepted < 2:  # of fast: its first chunk and a copy of slow's; the last one it holds back
        assert time.monotonic() < end, session._state
        time.sleep(0.001)
    session.may_land.set()
    assert session.has_landed.wait(DEADLINE_S)
    landing = session.landed[0]
    assert landing.chunk == 0
    assert landing.is_moved
    assert landing.is_aside
    fast.may_go_on.set()
    assert session.wait(end)
