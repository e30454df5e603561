"""The watch of the other nodes: what it hears, in which order, and that it is silent once stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from unicron_elastic.launcher.agent.core.peers import PeerWatch, tell_peers

DEADLINE_S = 30.0
INTERVAL_S = 0.01


class Handler:
    """A rendezvous in which as many nodes wait as the test says."""

    def __init__(self) -> None:
        self.waiting = 0
        self.silent: tuple[int, ...] = ()
        self.questions = 0
        self.was_asked = threading.Event()
        self.before_answer: Callable[[], object] = lambda: None

    def num_nodes_waiting(self) -> int:
        self.questions += 1
        self.was_asked.set()
        self.before_answer()
        return self.waiting

    def silent_ranks(self) -> tuple[int, ...]:
        return self.silent


class Watcher:
    """A watch and all that it called back with."""

    def __init__(self) -> None:
        self.handler = Handler()
        self.store: Store = HashStore()
        self.heard: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self.watch: PeerWatch | None = None

    def begin(self, store: Any = None) -> PeerWatch:
        self.watch = PeerWatch(
            self.handler,  # type: ignore[arg-type]
            store or self.store,
            INTERVAL_S,
            on_fault=lambda reason: self.heard.put(("fault", reason)),
            on_waiting=lambda waiting: self.heard.put(("waiting", waiting)),
            on_error=lambda error: self.heard.put(("error", error)),
            on_silent=lambda ranks: self.heard.put(("silent", ranks)),
        )
        self.watch.start()
        return self.watch

    def next(self) -> tuple[str, Any]:
        return self.heard.get(timeout=DEADLINE_S)

    def is_silent(self) -> bool:
        try:
            return not self.heard.get_nowait()
        except Empty:
            return True


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "unicron-peers"]


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    made = Watcher()
    yield made
    if made.watch is not None:
        made.watch.stop()
    assert _threads() == []


def test_a_fault_is_heard_once_and_word_for_word(watcher: Watcher) -> None:
    watch = watcher.begin()
    assert watcher.handler.was_asked.wait(DEADLINE_S)
    assert watcher.is_silent()
    tell_peers(watcher.store, "On n2, rank 5 was killed by signal 9 (SIGKILL); 5 µs.")
    assert watcher.next() == ("fault", "On n2, rank 5 was killed by signal 9 (SIGKILL); 5 µs.")
    watch.stop()
    assert watcher.is_silent()


def test_a_fault_told_before_the_watch_began_is_heard(watcher: Watcher) -> None:
    tell_peers(watcher.store, "rank 5 is gone.")
    watcher.begin()
    assert watcher.next() == ("fault", "rank 5 is gone.")


def test_a_reason_that_is_no_text_is_heard_all_the_same(watcher: Watcher) -> None:
    watcher.store.set("unicron/news", b"rank 5 \xff")  # type: ignore[arg-type]
    watcher.begin()
    assert watcher.next() == ("fault", "rank 5 \ufffd")


def test_a_reason_that_names_an_odd_file_is_told(watcher: Watcher) -> None:
    # A file name that is not UTF-8 reaches Python, and so an exception's message, with lone surrogates.
    tell_peers(watcher.store, "rank 5 raised OSError: no file part-\udcff.")
    watcher.begin()
    kind, reason = watcher.next()
    assert kind == "fault"
    assert reason.startswith("rank 5 raised OSError: no file part-")


def test_nodes_that_wait_are_counted(watcher: Watcher) -> None:
    watcher.begin()
    assert watcher.handler.was_asked.wait(DEADLINE_S)
    watcher.handler.waiting = 3
    assert watcher.next() == ("waiting", 3)


def test_while_nodes_wait_it_is_heard_who_falls_silent_and_what_fails(watcher: Watcher) -> None:
    watcher.handler.waiting = 1
    watcher.begin()
    assert watcher.next() == ("waiting", 1)
    watcher.handler.silent = (2,)
    assert watcher.next() == ("silent", (2,))
    watcher.handler.silent = ()
    assert watcher.next() == ("silent", ())
    watcher.handler.waiting = 2
    assert watcher.next() == ("waiting", 2)
    tell_peers(watcher.store, "rank 5 is gone.")
    assert watcher.next() == ("fault", "rank 5 is gone.")


def test_what_breaks_when_nodes_wait_may_be_for_the_next_round(watcher: Watcher) -> None:
    watcher.handler.waiting = 1
    watch = watcher.begin()
    assert watcher.next() == ("waiting", 1)

    def fail() -> None:
        raise ConnectionError("the node with the store meets the others in another one")

    watcher.handler.before_answer = fail
    watch._thread.join(DEADLINE_S)
    assert watcher.is_silent()


def test_a_fault_weighs_more_than_nodes_that_wait(watcher: Watcher) -> None:
    watcher.handler.waiting = 1
    tell_peers(watcher.store, "rank 5 is gone.")
    watch = watcher.begin()
    assert watcher.next() == ("fault", "rank 5 is gone.")
    watch.stop()
    assert watcher.is_silent()
    assert watcher.handler.questions == 0


@pytest.mark.parametrize("where", ["store", "rendezvous"])
def test_an_error_is_handed_over_and_ends_the_watch(watcher: Watcher, where: str) -> None:
    lost = ConnectionError("the node with the store is gone")

    def fail(*_: object) -> None:
        raise lost

    class LostStore:
        check = staticmethod(fail)

    watcher.handler.before_answer = fail
    watch = watcher.begin(LostStore() if where == "store" else None)
    assert watcher.next() == ("error", lost)
    watch.stop()
    assert watcher.is_silent()


def test_nothing_is_asked_or_said_after_the_stop(watcher: Watcher) -> None:
    watch = watcher.begin()
    assert watcher.handler.was_asked.wait(DEADLINE_S)
    watch.stop()
    assert _threads() == []  # so no callback can come any more
    asked = watcher.handler.questions
    tell_peers(watcher.store, "too late")
    watcher.handler.waiting = 1
    watch.stop()  # a second time is no error
    assert watcher.is_silent()
    assert watcher.handler.questions == asked


@pytest.mark.parametrize("answer", ["nodes wait", "error"])
def test_an_answer_that_comes_during_the_stop_is_not_passed_on(
    watcher: Watcher, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_stopping = threading.Event()

    def answer_late() -> None:
        assert is_stopping.wait(DEADLINE_S)
        if answer == "error":
            raise ConnectionError("closed under our feet")
        watcher.handler.waiting = 1

    watcher.handler.before_answer = answer_late
    watch = watcher.begin()
    assert watcher.handler.was_asked.wait(DEADLINE_S)
    join = threading.Thread.join

    def join_and_let_answer(thread: threading.Thread, timeout: float | None = None) -> None:
        is_stopping.set()  # stop() has said so by the time it waits for the thread
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join_and_let_answer)
    watch.stop()
    assert _threads() == []
    assert watcher.is_silent()


def test_the_watch_may_be_stopped_by_what_it_calls(watcher: Watcher) -> None:
    done = threading.Event()

    def stop(_: int) -> None:
        watch.stop()
        done.set()

    watcher.handler.waiting = 1
    watch = PeerWatch(
        watcher.handler,  # type: ignore[arg-type]
        watcher.store,
        INTERVAL_S,
        on_fault=lambda _: None,
        on_waiting=stop,
        on_error=lambda error: watcher.heard.put(("error", error)),
    )
    watch.start()
    assert done.wait(DEADLINE_S)
    watch.stop()
    assert watcher.is_silent()
