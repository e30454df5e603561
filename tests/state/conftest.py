"""Processes that serve a state."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from relays import Relay

from unicron_elastic.state.pull.chunks import CHUNK_BYTES

DEADLINE_S = 60.0
SCRIPT = Path(__file__).parent / "state_source.py"


class SourceProcess:
    """One source and its address."""

    def __init__(self, **told: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(told)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._address: dict[str, Any] | None = None

    @property
    def address(self) -> dict[str, Any]:
        """What the server says of itself."""
        if self._address is None:
            self._address = json.loads(self.line())
        return self._address

    def line(self) -> str:
        """The next line of the source."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], DEADLINE_S)[0], "the source says nothing"
        return self.process.stdout.readline().decode().strip()

    def kill(self) -> None:
        """Kills the source and waits for its end."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def end(self) -> None:
        """Ends the source."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def start_source() -> Iterator[Callable[..., SourceProcess]]:
    """Starts sources, which end with the test."""
    with contextlib.ExitStack() as opened:

        def start(**told: Any) -> SourceProcess:
            source = SourceProcess(**told)
            opened.callback(source.end)
            return source

        yield start


@pytest.fixture(scope="module")
def steady() -> Iterator[list[SourceProcess]]:
    """Two sources of the same state of ten chunks, which no test ends."""
    with contextlib.ExitStack() as opened:
        sources = [SourceProcess(words=10 * CHUNK_BYTES // 8) for _ in range(2)]
        for source in sources:
            opened.callback(source.end)
        yield sources


@pytest.fixture
def relay() -> Iterator[Callable[..., Relay]]:
    """Puts relays in front of servers."""
    with contextlib.ExitStack() as opened:

        def put(address: dict[str, Any], **faults: Any) -> Relay:
            made = Relay(address, **faults)
            opened.callback(made.close)
            return made

        yield put
