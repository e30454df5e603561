"""Gets the state of a replica from the nearest ones that hold it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unicron_elastic.state.layout import Layout, check_tensors, empty_tensors
from unicron_elastic.state.pull.chunks import Chunks
from unicron_elastic.state.pull.distance import Address, distance, nearest_first
from unicron_elastic.state.pull.link import STALL_S, ReadMemory, Refused, SourceLink
from unicron_elastic.state.pull.memory import TensorMemory
from unicron_elastic.state.pull.offer import Offer, choose, why_not
from unicron_elastic.state.pull.read_memory import read_memory
from unicron_elastic.state.pull.server import own_address
from unicron_elastic.state.pull.session import Session, SourceUse
from unicron_elastic.state.pull.wire import Gone, PullWireError

RELEASE_S = 1.0  # for a source to end its hold
SOURCES_MAX = 16  # of the nearest that are asked

logger = logging.getLogger(__name__)


class SourcesLost(ConnectionError):
    """No source is left that could send the state; the text says what happened to each.

    ``refusal`` says why one cannot send it at all, or is empty.
    """

    refusal = ""


@dataclass(frozen=True)
class Pulled:
    """The state of a replica at ``step``.

    ``bytes`` came in ``took_s`` seconds, from the first connection on, from ``sources``. ``notes`` says which sources
    were left out or lost, and which chunks were fetched again. The sources hold their state until ``release``.
    """

    step: int
    layout: Layout
    tensors: list[torch.Tensor]
    took_s: float
    bytes: int
    sources: tuple[SourceUse, ...]
    notes: tuple[str, ...]
    _release: Callable[[], None] = field(repr=False)

    def release(self) -> None:
        """Lets the sources go on; may be called again."""
        self._release()


def pull(
    addresses: Sequence[Mapping[str, Any]],
    key: bytes,
    *,
    step: int | None = None,
    timeout_s: float = 60.0,
    into: Sequence[torch.Tensor] | None = None,
    device: torch.device | str = "cpu",
    rack: str = "",
    stall_s: float = STALL_S,
    read_memory: ReadMemory = read_memory,
) -> Pulled:
    """The state that the servers at ``addresses`` hold, from the nearest of them.

    ``step``: the step of which the state must be; None takes the newest that is held, once every source has answered.
    ``into``: contiguous tensors that receive it, else new ones on ``device``. When this raises, their contents are
    undefined. ``rack``: the label of this host's rack. A source that is silent for ``stall_s`` is lost.

    Raises SourcesLost if no source could send it, TimeoutError if it is not here in time, ValueError for an address
    that is none and for ``into`` that has not the tensors of the state.
    """
    parsed = [Address.parse(address) for address in addresses]
    own = own_address(rack)
    order = nearest_first(own, parsed)[:SOURCES_MAX]
    if not order:
        raise SourcesLost("there is no source to get the state from")
    links = [
        SourceLink(parsed[index], distance(own, parsed[index]), stall_s=stall_s, read_memory=read_memory)
        for index in order
    ]
    return _Pull(links, key, step, timeout_s).run(into, device)


class _Pull:
    """One call of ``pull``: a thread for each source, which connects, waits for what is chosen, and lets it send."""

    def __init__(self, links: list[SourceLink], key: bytes, step: int | None, timeout_s: float) -> None:
        self._links = links
        self._key = key
        self._step = step
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._until = self._began + timeout_s
        self._answers: queue.Queue[tuple[int, Offer | str]] = queue.Queue()
        self._failures: dict[int, str] = {}
        self._refusal = ""
        self._is_decided = threading.Event()
        self._is_closed = False
        self._chosen: Offer | None = None
        self._layout: Layout | None = None
        self._session: Session | None = None

    def run(self, into: Sequence[torch.Tensor] | None, device: torch.device | str) -> Pulled:
        """Gets the state; closes all connections if that fails."""
        try:
            return self._run(into, device)
        except BaseException:
            self._close()
            raise
        finally:
            self._is_decided.set()

    def _run(self, into: Sequence[torch.Tensor] | None, device: torch.device | str) -> Pulled:
        for source in range(len(self._links)):
            threading.Thread(target=self._serve, args=(source,), name="unicron-source", daemon=True).start()
        chosen, layout = self._decide()
        tensors = empty_tensors(layout, device) if into is None else _checked(layout, into)
        memory = TensorMemory(tensors, Chunks([spec.bytes for spec in layout.specs]))
        session = Session(memory, len(self._links))
        self._chosen, self._layout, self._session = chosen, layout, session
        self._is_decided.set()
        if not session.wait(self._until):
            session.give_up(f"the state was not here after {self._timeout_s:g} s")
            raise TimeoutError(session.failure)
        if session.failure:
            raise SourcesLost(session.failure)
        took_s = time.monotonic() - self._began
        uses = session.uses()
        notes = tuple(session.notes)
        return Pulled(chosen.step, layout, tensors, took_s, layout.total_bytes, uses, notes, self._let_go)

    def _decide(self) -> tuple[Offer, Layout]:
        """The state to take, and its layout. Raises SourcesLost."""
        offers: dict[int, Offer] = {}
        # Without a step all have to answer; one that does not is not to use up the time that the transfer needs.
        answers_until = self._until if self._step is not None else self._began + self._timeout_s / 2
        for _ in self._links:
            try:
                source, answer = self._answers.get(timeout=max(0.0, answers_until - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(answer, str):
                self._failures[source] = answer
            else:
                offers[source] = answer
            if self._step is not None and (found := self._look(offers)):
                return found
        if found := self._look(offers):
            return found
        for source, offer in offers.items():
            self._failures.setdefault(source, why_not(offer, None, self._step))
        lost = SourcesLost("; ".join(self._told(source) for source in range(len(self._links))))
        lost.refusal = self._refusal
        raise lost

    def _look(self, offers: dict[int, Offer]) -> tuple[Offer, Layout] | None:
        """The state to take of those that are offered, and its layout from the nearest source that can send it."""
        while chosen := choose(offers, self._step):
            source = min(source for source, offer in offers.items() if offer == chosen)
            try:
                return chosen, self._links[source].layout(chosen)
            except (OSError, PullWireError) as error:
                self._failures[source] = f"was lost: {error}"
                del offers[source]
        return None

    def _serve(self, source: int) -> None:
        """Connects to one source and lets it send what was chosen."""
        link = self._links[source]
        offer = self._open(source)
        self._answers.put((source, offer))
        self._is_decided.wait()
        session, layout = self._session, self._layout
        if session is None or layout is None:
            link.close()
            return
        reason = offer if isinstance(offer, str) else why_not(offer, self._chosen)
        reason = self._failures.get(source, reason)
        try:
            if not reason:
                link.prepare(layout)
        except (OSError, PullWireError) as error:
            reason = f"was lost: {error}"
        if reason:
            link.close()
            session.lose(source, f"{link.address.name} {reason}")
        else:
            session.add(source, link)
            if self._is_closed:  # in the meantime
                link.close()

    def _open(self, source: int) -> Offer | str:
        """What a source offers, or what happened to it."""
        try:
            return self._links[source].open(self._key, max(0.0, self._until - time.monotonic()))
        except Gone as gone:
            return f"was lost: {gone}"
        except (OSError, PullWireError) as error:
            if isinstance(error, Refused):
                self._refusal = str(error)
            return f"was left out: {error}"

    def _told(self, source: int) -> str:
        """What happened to a source, in one sentence without full stop."""
        return f"{self._links[source].address.name} {self._failures.get(source, 'did not answer in time')}"

    def _let_go(self) -> None:
        """Have all sources end their holds; they have when this returns, but for those that do not answer."""
        self._is_closed = True
        for link in self._links:
            link.end(RELEASE_S)

    def _close(self) -> None:
        """Ends all connections, and with them all holds."""
        self._is_closed = True
        for link in self._links:
            link.close()


def _checked(layout: Layout, into: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that receive a state. Raises ValueError if they cannot."""
    check_tensors(layout, into)
    for number, tensor in enumerate(into):
        if not tensor.is_contiguous():
            raise ValueError(f"tensor {number} of those that receive the state is not contiguous")
    return list(into)
