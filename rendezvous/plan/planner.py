"""The thread that plans for all jobs of the cluster, in the agent that coordinates it."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from unicron_elastic.metrics.figures import PlanFigures
from unicron_elastic.rendezvous.records.cluster import LEADER
from unicron_elastic.rendezvous.store.interface import (
    LeaseGoneError,
    Put,
    Store,
    StoreClosedError,
    StoreError,
    StoreReplacedError,
    StoreUnclearError,
    StoreUnreachableError,
)

if TYPE_CHECKING:
    from unicron_elastic.rendezvous.plan.term import Term


TICK_S = 1.0  # time is a reason to look, too
RETRY_S = 0.5
CLOSE_S = 2.0  # a store that does not answer is not waited for any longer

logger = logging.getLogger(__name__)


class Planner:
    """Plans while this agent coordinates; ``lead`` says whether it does. Safe from any thread."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        say: Callable[[str], None],
        *,
        tick_s: float = TICK_S,
        retry_s: float = RETRY_S,
        close_s: float = CLOSE_S,
    ) -> None:
        """``open_store`` opens another object for the same store each time; ``say`` tells people a sentence."""
        self._tick_s, self._retry_s, self._close_s = tick_s, retry_s, close_s
        self._open_store = open_store
        self._say = say
        self._leader_revision = 0
        self._elections = 0
        self._void = 0  # the election by a store that has lost its data since
        self._kept: list[Put] = []  # what that store is to be told again
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error = ""  # the last one that was told
        self._term: Term | None = None
        self._turned_at = 0.0

    @property
    def figures(self) -> PlanFigures | None:
        """Return the cluster's figures, as of the latest look; None while this agent does not plan. From any thread."""
        term = self._term
        return None if term is None or not self._leader_revision else term.figures(time.time())

    @property
    def turned_at(self) -> float | None:
        """When the loop last went round, in monotonic seconds; None while this agent does not plan."""
        return self._turned_at if self._leader_revision else None

    def lead(self, leader_revision: int) -> None:
        """This agent holds the leader's key, which is at ``leader_revision``; 0: it does not."""
        self._turned_at = time.monotonic()
        self._leader_revision = leader_revision
        self._elections += leader_revision != 0
        self._inbox.put(None)
        if (term := self._term) is not None:
            term.wake()
        with self._starting:
            if leader_revision and self._thread is None and not self._is_over.is_set():
                self._thread = threading.Thread(target=self._run, name="unicron-planner", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Plans no more. May come twice."""
        self._is_over.set()
        self.lead(0)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._close_s)

    def _run(self) -> None:
        while not self._is_over.is_set():
            revision, election = self._leader_revision, self._elections
            self._turned_at = time.monotonic()
            if not self._kept and (not revision or election == self._void):
                self._inbox.get()
                continue
            try:
                if self._kept:
                    self._tell_again()
                    continue
                from unicron_elastic.rendezvous.plan.term import Term  # and NumPy, which only a coordinator needs

                with self._open_store() as store:
                    self._term = Term(store, revision, self._say)
                    try:
                        self._serve(self._term, revision)
                    except (StoreUnreachableError, StoreUnclearError) as error:
                        logger.debug("%s", error)  # others say that the store is away
                    self._await_word(store)
                continue
            except StoreReplacedError:  # with another store this agent has to be elected anew
                self._void = election
                self._kept = self._kept if self._term is None else self._term.kept()
            except (StoreUnreachableError, StoreUnclearError, StoreClosedError, LeaseGoneError) as error:
                logger.debug("%s", error)  # others say that the store is away
            except StoreError as error:
                if self._is_news(error):
                    self._say(f"Nothing can be planned: {error}.")
            except Exception as error:  # without this thread nobody plans
                if self._is_news(error):
                    logger.exception("An error in the planning of the cluster, which is tried again and again")
            finally:
                self._term = None
            self._is_over.wait(self._retry_s)

    def _await_word(self, store: Store) -> None:
        """Hear from a term's store at its end that what the term has seen is still there. Raises StoreReplacedError."""
        while not self._is_over.is_set():
            self._turned_at = time.monotonic()
            try:
                store.read(LEADER)
            except (StoreUnreachableError, StoreUnclearError):
                self._is_over.wait(self._retry_s)
            else:
                return

    def _tell_again(self) -> None:
        """What was planned, unless those whom it is about have told it already. Raises StoreError."""
        with self._open_store() as store:
            told = sum(store.create(each.key, each.value) is not None for each in self._kept)
        self._kept = []
        if told:
            self._say(f"The cluster's store has lost its data: it is told again what was planned, {told} records.")

    def _is_news(self, error: Exception) -> bool:
        """Whether it is another one than the last time: it is tried twice a second."""
        before, self._error = self._error, repr(error)
        return self._error != before

    def _serve(self, term: Term, revision: int) -> None:
        """Serve as long as this agent leads by the same right."""
        while self._leader_revision == revision and not self._is_over.is_set():
            self._turned_at = time.monotonic()
            term.look(time.time())
            term.wait(self._tick_s)
