"""Processes that serve a state."""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from relays import Relay
from warm_launcher import WarmLaunchers, environment_of_no_job

from unicron_elastic.state.pull.chunks import CHUNK_BYTES

DEADLINE_S = 60.0
SCRIPT = Path(__file__).parent / "state_source.py"


class SourceProcess:
    """One source and its address."""

    def __init__(self, warm: WarmLaunchers, **told: Any) -> None:
        stdin, self._until_closed = os.pipe()
        self._lines, stdout = os.pipe()
        with open(stdin, "rb") as ends, open(stdout, "wb") as says:
            environ = environment_of_no_job(SCRIPT.parent)
            command = [str(SCRIPT), json.dumps(told)]
            self.process = warm.start(command, environ, SCRIPT.parent, [ends, says, 2], ends_as_script=True)
        self._address: dict[str, Any] | None = None

    @property
    def address(self) -> dict[str, Any]:
        """What the server says of itself."""
        if self._address is None:
            self._address = json.loads(self.line())
        return self._address

    def line(self) -> str:
        """The next line of the source."""
        line = b""
        while not line.endswith(b"\n"):
            assert select.select([self._lines], [], [], DEADLINE_S)[0], "the source says nothing"
            line += os.read(self._lines, 1)
        return line.decode().strip()

    def kill(self) -> None:
        """Kills the source and waits for its end."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def end(self) -> None:
        """Ends the source."""
        self.kill()
        for pipe in (self._until_closed, self._lines):
            os.close(pipe)


@pytest.fixture
def start_source(warm_launchers: WarmLaunchers) -> Iterator[Callable[..., SourceProcess]]:
    """Starts sources, which end with the test."""
    with contextlib.ExitStack() as opened:

        def start(**told: Any) -> SourceProcess:
            source = SourceProcess(warm_launchers, **told)
            opened.callback(source.end)
            return source

        yield start


@pytest.fixture(scope="module")
def steady(warm_launchers: WarmLaunchers) -> Iterator[list[SourceProcess]]:
    """Two sources of the same state of ten chunks, which no test ends."""
    with contextlib.ExitStack() as opened:
        sources = [SourceProcess(warm_launchers, words=10 * CHUNK_BYTES // 8) for _ in range(2)]
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
