"""Watches the other nodes of a job: a fault that one of them reports, nodes that wait to join, or fall silent.

torch's rendezvous handlers and stores can only be asked, and asking may block on the network, so a thread asks and
posts what it hears.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from torch.distributed import Store

from unicron_elastic.base.text import one_line
from unicron_elastic.launcher.agent.hangs.remote_ranks import NEWS_KEY, RemoteRanks, question_in
from unicron_elastic.rendezvous.job.answer_in_time import answer_in_time
from unicron_elastic.rendezvous.job.job_rendezvous import JobRendezvous

TELL_TIMEOUT_S = 1.0
STUCK_S = 0.1
STORE_LOST_S = 10.0  # so long a better reason is waited for than that the round's store is gone


def tell_peers(store: Store, reason: str, timeout_s: float = TELL_TIMEOUT_S) -> None:
    """Lets every other agent of this round know of a fault. Raises what the store raises, or TimeoutError."""
    # The name of a file that is not UTF-8 comes with lone surrogates, which a store does not take.
    told = reason.encode(errors="backslashreplace").decode()
    answer_in_time(lambda: store.set(NEWS_KEY, told), timeout_s)


class PeerWatch:
    """Asks every ``interval_s`` seconds until stopped; calls back from its own thread.

    Each word is said once; when others wait it goes on, as they may have to, and hears what befalls this round then.
    """

    def __init__(
        self,
        handler: JobRendezvous,
        store: Store,
        interval_s: float,
        *,
        on_fault: Callable[[str], None],
        on_waiting: Callable[[int], None],
        on_error: Callable[[Exception], None],
        on_silent: Callable[[tuple[int, ...]], None] = lambda _ranks: None,
        remote_ranks: RemoteRanks | None = None,
        outlives_store: bool = False,
    ) -> None:
        """``on_silent``: the ranks of nodes that give no sign of life, each time that these are others.

        ``outlives_store``: when the store is gone, the handler is asked on, which may know of a better reason."""
        self._handler = handler
        self._store = store
        self._interval_s = interval_s
        self._on_fault = on_fault
        self._on_waiting = on_waiting
        self._on_error = on_error
        self._on_silent = on_silent
        self._silent: tuple[int, ...] = ()
        self._waiting = 0  # as it was told
        self._remote_ranks = remote_ranks
        self._has_news = False
        self._outlives_store = outlives_store
        self._store_error: Exception | None = None
        self._store_lost_at = 0.0
        self._wake = threading.Event()
        if remote_ranks is not None:
            remote_ranks.wake = self._wake.set
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="unicron-peers", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch; no callback comes after this returns, unless a question is stuck in the network."""
        self._stopped.set()
        self._wake.set()
        if threading.current_thread() is not self._thread:
            # Where the store's node may go silent, to wait for its answer would hold up the next round.
            self._thread.join(timeout=STUCK_S if self._outlives_store else self._interval_s + 1.0)

    def _watch(self) -> None:
        while not self._is_stopped_after_pause():
            try:
                heard = self._ask()
            except Exception as error:
                if self._outlives_store and self._store_error is None and not self._waiting:
                    self._store_error, self._store_lost_at = error, time.monotonic()
                    continue
                if not self._stopped.is_set() and not self._waiting:
                    self._on_error(error)
                return
            if heard is not None and not self._stopped.is_set():
                heard()
                return

    def _is_stopped_after_pause(self) -> bool:
        self._wake.wait(
            self._interval_s if self._remote_ranks is None else self._remote_ranks.pause_s(self._interval_s)
        )
        self._wake.clear()
        return self._stopped.is_set()

    def _ask(self) -> Callable[[], None] | None:
        """What there is to tell, if anything."""
        if self._store_error is not None:
            return self._ask_without_store(self._store_error)
        news = self._news()
        if news is not None and question_in(news) is None:
            reason = one_line(news)  # everybody who reaches the store can write it
            return lambda: self._on_fault(reason)
        if self._remote_ranks is not None:
            self._remote_ranks.exchange(news)
        self._look_around()
        return None

    def _look_around(self) -> None:
        """Tell who waits and who is silent, if that is news. What breaks once others wait may be for the next round."""
        waiting, silent = self._handler.num_nodes_waiting(), self._handler.silent_ranks()
        if waiting > self._waiting and not self._stopped.is_set():
            self._waiting = waiting
            self._on_waiting(waiting)
        if silent != self._silent and not self._stopped.is_set():
            self._silent = silent
            self._on_silent(silent)

    def _ask_without_store(self, error: Exception) -> Callable[[], None] | None:
        """Its node may be lost, or begin another round: that is soon told by others, and else the loss itself is."""
        waiting = self._handler.num_nodes_waiting()
        if waiting > 0:
            return lambda: self._on_waiting(waiting)
        return (lambda: self._on_error(error)) if time.monotonic() - self._store_lost_at > STORE_LOST_S else None

    def _news(self) -> bytes | None:
        """A fault, or a question of another agent. One request, for what is there stays there."""
        self._has_news = self._has_news or self._store.check([NEWS_KEY])
        return bytes(self._store.get(NEWS_KEY)) if self._has_news else None
