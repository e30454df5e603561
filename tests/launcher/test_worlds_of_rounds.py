"""Agents that agree on worlds while others of their round are silent, gone, or on their way. With a real store."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import PrefixStore, Store, TCPStore

from unicron_elastic.base.world import Member, World
from unicron_elastic.launcher.agent.worlds.log import StoreLog, WorldLog
from unicron_elastic.launcher.agent.worlds.worlds import AgentMeeting, Worlds
from unicron_elastic.launcher.common.loop import Loop
from unicron_elastic.recovery.commands import ChangeWorld
from unicron_elastic.recovery.events import Event, WorldChanged

DEADLINE_S = 30.0
A0, A1 = (Member(name=f"{rank}.0#a", node="a#a", local_rank=rank) for rank in (0, 1))
C0 = Member(name="2.0#c", node="c#c", local_rank=0)
NO_CONTEXT: Any = None


class Agent:
    """One agent's worlds, and the newest it has heard of."""

    def __init__(self, node: str, rank: int) -> None:
        self.node, self.rank = node, rank
        self.loop = Loop()
        self.events: list[Event] = []
        self.said: list[str] = []
        self.worlds = Worlds(self.loop, self.events.append, self.said.append)

    def begin(self, store: Store | None) -> None:
        self.worlds.begin(1, NO_CONTEXT, store, self.rank)

    def meet(
        self,
        store: Store,
        size: int,
        *members: Member,
        living: tuple[Member, ...] | None = None,
        log: WorldLog | None = None,
        others_ended: bool = False,
    ) -> None:
        """In another round, of the agents a and c at most."""
        self.worlds.stop()
        found = AgentMeeting(
            rank=self.rank,
            size=size,
            node=self.node,
            store=store,
            log=log,
            master="127.0.0.1",
            nodes=("a", "c")[:size],
            others_ended=others_ended,
        )
        self.worlds.join(found, members, [each.name for each in (members if living is None else living)])

    def lose(self, *members: Member) -> None:
        self.worlds.change(ChangeWorld(lost=tuple(each.name for each in members), reason="It is lost."))

    def join(self, *members: Member) -> None:
        self.worlds.change(ChangeWorld(joined=members, reason="It is there."))

    @property
    def world(self) -> World | None:
        return next((each.world for each in reversed(self.events) if isinstance(each, WorldChanged)), None)

    def members(self) -> tuple[Member, ...]:
        return () if self.world is None else self.world.members

    def until(self, is_so: Callable[[], bool]) -> None:
        assert self.loop.run_until(is_so, time.monotonic() + DEADLINE_S), (self.events, self.said)

    def close(self) -> None:
        self.worlds.close()
        self.loop.close()


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


@pytest.fixture
def agent(store: TCPStore) -> Iterator[Agent]:
    """With two members, alone."""
    found = Agent("a#a", 0)
    found.begin(None)
    found.meet(store, 1, A0, A1)
    found.join(A0, A1)
    assert found.members() == (A0, A1)
    yield found
    found.close()


@pytest.fixture
def other() -> Iterator[Agent]:
    found = Agent("c#c", 1)
    yield found
    found.close()


def test_a_worker_that_asks_before_the_agents_have_met_knows_whether_they_can_agree(agent: Agent) -> None:
    agent.worlds.begin(2, NO_CONTEXT, None, 0, is_fixed=True)
    assert not agent.worlds.may_enter(0)
    agent.worlds.join(None, (A0, A1))
    assert not agent.worlds.may_enter(0)
    agent.worlds.begin(3, NO_CONTEXT, None, 0)
    assert agent.worlds.may_enter(0)


def test_an_agent_that_was_lost_before_it_said_anything_is_not_waited_for(agent: Agent, store: TCPStore) -> None:
    agent.meet(store, 2, A0, A1)
    agent.lose(A1)
    agent.worlds.gone(("c",))
    agent.until(lambda: agent.members() == (A0,))


def test_an_agent_whose_workers_have_not_started_is_not_waited_for(agent: Agent, other: Agent, store: TCPStore) -> None:
    agent.meet(store, 2, A0, A1)
    agent.lose(A1)
    other.begin(store)
    agent.until(lambda: agent.members() == (A0,))


# Passes alone; in a process in which thousands of tests ran before, it has failed one time of three. Why is unknown.
@pytest.mark.slow
def test_nothing_of_a_round_stays_when_the_nodes_have_met_again(agent: Agent, store: TCPStore) -> None:
    # Its store has a thread and ten descriptors. A launcher makes so few objects that the collector of cycles never
    # comes to it.
    gc.collect()
    gc.disable()
    try:
        log = StoreLog(PrefixStore("second", store))
        kept = weakref.ref(log)
        agent.meet(PrefixStore("second", store), 2, A0, A1, log=log)
        agent.lose(A1)
        agent.worlds.gone(("c",))
        agent.until(lambda: agent.members() == (A0,))
        del log
        agent.meet(store, 1, A0)
        begin = time.monotonic()
        while kept() is not None:  # a thread lets go of it, and wakes nobody
            waited_s = time.monotonic() - begin
            assert waited_s < DEADLINE_S, [type(each) for each in gc.get_referrers(kept())]
            if waited_s > DEADLINE_S / 2:  # after other tests a traceback may hold it, which nothing else ends
                gc.collect()
            time.sleep(0.01)
    finally:
        gc.enable()


def test_a_change_that_was_not_made_before_the_nodes_met_again_is_made_then(agent: Agent, store: TCPStore) -> None:
    agent.meet(PrefixStore("second", store), 2, A0, A1)  # whose other agent says nothing
    agent.join(C0)
    agent.meet(store, 1, A0, A1)
    agent.until(lambda: agent.members() == (A0, A1, C0))


@pytest.mark.parametrize("size", [1, 2])
def test_members_that_were_lost_while_the_nodes_met_are_left_out(
    agent: Agent, other: Agent, store: TCPStore, size: int
) -> None:
    other.begin(store)
    agent.meet(store, size, A0, A1, living=(A0,))
    agent.until(lambda: agent.members() == (A0,))
    assert agent.world is not None
    assert agent.world.number == 2


def test_who_was_to_begin_and_is_lost_has_another_begin(other: Agent, store: TCPStore) -> None:
    other.begin(None)
    other.meet(PrefixStore("theirs", store), 1, A0, A1, C0)
    other.join(A0, A1, C0)
    other.rank = 1
    store.set("unicron/before/0", '{"number": 7, "claims": ["0.0#a", "1.0#a"]}')  # it leads, and says no more
    other.meet(store, 2, C0)
    other.lose(A1)
    other.worlds.gone(("a",))
    other.until(lambda: other.members() == (A0, C0))


def test_members_whose_node_has_not_come_are_left_out_by_one_that_is_alone(agent: Agent, store: TCPStore) -> None:
    agent.join(C0)
    assert agent.world is not None
    before = agent.world.number
    agent.meet(store, 1, A0, A1)
    agent.until(lambda: agent.members() == (A0, A1))
    assert agent.world.lost_in == before


def test_nothing_was_lost_with_those_who_have_ended_well(agent: Agent, store: TCPStore) -> None:
    agent.join(C0)
    agent.meet(store, 1, A0, A1, others_ended=True)
    agent.until(lambda: agent.members() == (A0, A1))
    assert agent.world.lost_in == 0


def test_a_node_that_comes_late_hears_of_the_world_before_its_workers_ask(
    agent: Agent, other: Agent, store: TCPStore
) -> None:
    other.begin(store)
    agent.meet(store, 2, A0, A1)
    other.meet(store, 2, C0, log=StoreLog(PrefixStore("log", store)))
    assert not other.members()
    first = World(number=7, members=(A0, A1), store="h:1")
    StoreLog(PrefixStore("log", store)).write(1, first.to_json())
    other.worlds.look()
    other.until(lambda: other.members() == (A0, A1))


def test_nobody_asks_the_rounds_store_for_worlds_where_no_worker_asks_for_one(
    other: Agent, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, told = threading.Event(), threading.Event()
    monkeypatch.setattr(StoreLog, "after", lambda *_: asked.set())
    other.begin(store)
    other.meet(store, 2, C0)
    watch = other.worlds._watch
    assert watch is not None
    monkeypatch.setattr(watch, "_do_others_train", told.set)  # which it asks after all that it tells
    watch.look()
    assert told.wait(DEADLINE_S)
    assert not asked.is_set()
    watch.want()
    assert asked.wait(DEADLINE_S)


def test_there_is_no_world_without_members(agent: Agent, other: Agent, store: TCPStore) -> None:
    other.begin(store)
    agent.meet(store, 2, A0, A1)
    agent.lose(A0, A1)
    agent.join(C0)
    agent.until(lambda: agent.members() == (A0, A1, C0))
    assert not agent.said  # nothing was written that is none


def test_what_is_no_world_is_passed_over_and_told_once(agent: Agent, other: Agent, store: TCPStore) -> None:
    other.begin(store)
    agent.meet(store, 2, A0, A1)
    agent.until(lambda: StoreLog(store).after(0) is not None)
    StoreLog(store).write(2, "{}")
    agent.lose(A1)
    agent.until(lambda: agent.members() == (A0,))
    assert len(agent.said) == 1
    assert "The worlds of the job cannot be read: " in agent.said[0]


class HeldLog(StoreLog):
    """A log in which nothing is written before ``may_write``."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.may_write = threading.Event()
        self.may_write.set()

    def write(self, place: int, text: str) -> str:
        assert self.may_write.wait(DEADLINE_S)
        return super().write(place, text)


def test_who_ends_first_has_it_written_that_the_training_is_over(agent: Agent, other: Agent, store: TCPStore) -> None:
    """It waits for the others in the same store next, by its only connection: they would never hear of it."""
    log = HeldLog(store)
    other.begin(store)
    agent.meet(store, 2, A0, A1, log=log)
    other.meet(store, 2)
    other.worlds.may_enter(0)
    agent.until(lambda: agent.world is not None)
    log.may_write.clear()
    agent.join(C0)
    agent.lose(A1)  # what else it wanted does not hold that up
    agent.worlds.change(ChangeWorld(over=1, reason=""))
    agent.worlds.stop()
    waiting = threading.Thread(target=agent.worlds.await_end)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    log.may_write.set()
    waiting.join(DEADLINE_S)
    assert not waiting.is_alive()
    other.until(lambda: other.world is not None and other.world.over == 1)


class AwayLog:
    """A log that can be read, and written when it ``answers``."""

    def __init__(self, store: Store) -> None:
        self._log = StoreLog(store)
        self.answers = True

    def write(self, place: int, text: str) -> str:
        """Writes, or waits in vain."""
        if not self.answers:
            raise ConnectionError("etcd did not answer")
        return self._log.write(place, text)

    def after(self, place: int) -> tuple[int, str] | None:
        """Reads."""
        return self._log.after(place)


@pytest.mark.parametrize(
    ("what", "told"), [("lost", "Steps stand still until the store answers"), ("joined", "Who joins waits until")]
)
def test_what_stands_still_is_said_to_stand_still(
    agent: Agent, other: Agent, store: TCPStore, what: str, told: str
) -> None:
    log = AwayLog(store)
    other.begin(store)
    agent.meet(store, 2, A0, A1, log=log)
    agent.join(C0)
    agent.until(lambda: C0 in agent.members())
    log.answers = False
    if what == "lost":
        agent.lose(A1)
    else:
        agent.join(Member(name="3.0#c", node="c#c", local_rank=1))
    agent.until(lambda: bool(agent.said))
    assert agent.said[0].startswith(told)
    assert agent.said[0].endswith("etcd did not answer")
    log.answers = True
    agent.until(lambda: len(agent.said) > 1)
    assert agent.said[1] == "The store answers again: the nodes agree who trains."
    agent.until(lambda: len(agent.members()) == (2 if what == "lost" else 4))


def test_a_change_that_is_asked_for_while_it_is_asked_whether_others_train_is_made(
    agent: Agent, other: Agent, store: TCPStore
) -> None:
    class AskedLog(AwayLog):
        """A log during whose first reading somebody joins."""

        is_asked = False

        def after(self, place: int) -> tuple[int, str] | None:
            if not self.is_asked:
                self.is_asked = True
                agent.join(C0)
            return super().after(place)

    other.begin(store)
    agent.meet(store, 2, A0, A1, log=AskedLog(store))
    agent.until(lambda: C0 in agent.members())
