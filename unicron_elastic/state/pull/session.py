"""One transfer under way: feeds the state machine with what the sources' lanes report, and carries out what it says."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from unicron_elastic.state.pull.landing import Landing
from unicron_elastic.state.pull.link import SourceLink
from unicron_elastic.state.pull.memory import TensorMemory
from unicron_elastic.state.pull.transfer import (
    Accept,
    ChunkArrived,
    ChunkWrong,
    Command,
    Event,
    Fail,
    Fetch,
    Finish,
    SourceLost,
    SourceReady,
    Transfer,
    handle,
)
from unicron_elastic.state.pull.wire import PullWireError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SourceUse:
    """What one source contributed: how many ``bytes``, and by which ``way`` they came."""

    name: str
    way: str
    bytes: int


class Session:
    """Receives the chunks of ``memory`` from up to ``expected`` sources, each of which has ``lanes`` threads."""

    def __init__(self, memory: TensorMemory, expected: int) -> None:
        self.notes: list[str] = []
        self.failure = ""
        self._memory = memory
        self._state = Transfer(memory.chunks.count, expected)
        self._changed = threading.Condition()
        self._is_over = False
        self._links: dict[int, SourceLink] = {}
        self._todo: dict[int, deque[Fetch]] = {}
        self._landings: dict[tuple[int, int], Landing] = {}
        self._bytes: dict[int, int] = {}

    def add(self, source: int, link: SourceLink) -> None:
        """Lets a source send that holds the state."""
        with self._changed:
            self._links[source] = link
            self._todo[source] = deque()
            self._bytes[source] = 0
            self._post(SourceReady(source, link.address.name, link.distance, link.lanes))
        for slot in range(link.lanes):
            threading.Thread(target=self._run_lane, args=(source, slot), name="unicron-lane", daemon=True).start()

    def lose(self, source: int, reason: str) -> None:
        """Says that a source does not send, or no longer."""
        with self._changed:
            self.notes.append(reason)
            for landing in self._landings_of(source):
                landing.move_aside()
            self._post(SourceLost(source, reason))

    def wait(self, until: float) -> bool:
        """Waits until all is here or all sources are lost; False if that was not the case until then."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over, max(0.0, until - time.monotonic()))

    def give_up(self, reason: str) -> None:
        """Ends the transfer; nothing is written to the tensors any more."""
        with self._changed:
            for landing in self._landings.values():
                landing.move_aside()
            self.failure = "; ".join([reason, *self._state.lost])
            self._is_over = True
            self._changed.notify_all()

    def uses(self) -> tuple[SourceUse, ...]:
        """What each source contributed that contributed anything."""
        with self._changed:
            used = [(self._links[source], count) for source, count in self._bytes.items() if count]
            return tuple(SourceUse(link.address.name, link.way, count) for link, count in used)

    def _run_lane(self, source: int, slot: int) -> None:
        """Fetches chunks from one source until the transfer is over or the source is lost."""
        link = self._links[source]
        while (fetch := self._next(source)) is not None:
            landing = self._landing(fetch)
            try:
                is_right = link.fetch(landing, slot)
            except (OSError, PullWireError) as error:  # Gone is an OSError
                link.close()
                self._lose_once(source, f"{link.address.name} was lost: {error}")
                return
            with self._changed:
                event = ChunkArrived if is_right else ChunkWrong
                if not is_right:
                    note = f"{link.address.name} sent chunk {fetch.chunk} with a wrong checksum; it is fetched again"
                    self.notes.append(note)
                    logger.warning("%s.", note)
                self._post(event(source, fetch.chunk))
                self._landings.pop((source, fetch.chunk), None)

    def _lose_once(self, source: int, reason: str) -> None:
        """Reports a loss that the lanes of a source notice one after the other."""
        with self._changed:
            is_known = source not in self._state.sources
        if not is_known:
            self.lose(source, reason)

    def _next(self, source: int) -> Fetch | None:
        """The next chunk to fetch, None when there will be none."""
        todo = self._todo[source]
        with self._changed:
            self._changed.wait_for(lambda: todo or self._is_over or source not in self._state.sources)
            is_alive = not self._is_over and source in self._state.sources
            return todo.popleft() if todo and is_alive else None

    def _landing(self, fetch: Fetch) -> Landing:
        """Where a chunk is to arrive."""
        landing = Landing(self._memory, fetch.chunk, is_aside=fetch.is_copy)
        with self._changed:
            is_late = (fetch.source, fetch.chunk) in self._state.late  # another's was accepted meanwhile
            if self._is_over or is_late or fetch.source not in self._state.sources:
                landing.move_aside()
            self._landings[fetch.source, fetch.chunk] = landing
        return landing

    def _landings_of(self, source: int) -> list[Landing]:
        """Where chunks of a source are arriving."""
        return [landing for (owner, _), landing in self._landings.items() if owner == source]

    def _post(self, event: Event) -> None:
        """Lets the machine decide, and carries out what it says; the lock is held."""
        self._state, commands = handle(self._state, event)
        for command in commands:
            self._carry_out(command)
        self._changed.notify_all()

    def _carry_out(self, command: Command) -> None:
        """Carries out one command."""
        match command:
            case Fetch(source=source):
                self._todo[source].append(command)
            case Accept(source=source, chunk=chunk):
                self._accept(source, chunk)
            case Finish():
                self._is_over = True
            case Fail(reason=reason):
                self.failure = reason
                self._is_over = True

    def _accept(self, source: int, chunk: int) -> None:
        """Takes a chunk as it is, after nobody else writes to its place any more."""
        landing = self._landings[source, chunk]
        for (owner, other), elsewhere in self._landings.items():
            if other == chunk and owner != source:
                elsewhere.move_aside()
        landing.settle()
        self._bytes[source] += landing.bytes()
