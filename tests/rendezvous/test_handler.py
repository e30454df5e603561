"""Nodes that come behind a crowd hear of the round, and not of each other; whoever is lost, it forms all the same."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousTimeoutError

from unicron_elastic.compat.rendezvous import RendezvousInfo
from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd
from unicron_elastic.rendezvous.torch.create_handler import create_handler
from unicron_elastic.rendezvous.torch.handler import ClusterRendezvous

DEADLINE_S = 60.0
CROWD = 2  # see to it that a round forms
NODES = 6


class Crowd:
    """`Crowd` is the nodes of one job, each with a thread that meets the others."""

    def __init__(self, etcd: EmbeddedEtcd) -> None:
        self._endpoint, self.run_id = etcd.endpoint, uuid.uuid4().hex
        self.keys = JobKeys(self.run_id)
        self.store = EtcdStore(StoreAddress.parse(etcd.endpoint))
        self.handlers: list[ClusterRendezvous] = []
        self._pool = ThreadPoolExecutor(2 * NODES)

    def come(
        self, *, least: int = NODES, join_timeout_s: float = DEADLINE_S, waits_to_be_seen: bool = True
    ) -> Future[RendezvousInfo]:
        """Another node joins; return once it waits, and the others can see that."""
        config = {"last_call_timeout": 0, "lease_ttl": 3, "join_timeout": join_timeout_s}
        parameters = RendezvousParameters(
            "unicron", self._endpoint, self.run_id, least, 2 * NODES, local_addr="127.0.0.1", **config
        )
        handler = create_handler(parameters)
        handler._presence._crowd = CROWD
        self.handlers.append(handler)
        found = self._pool.submit(handler.next_rendezvous)
        self.until(lambda: found.done() or not waits_to_be_seen or self.waits(handler))
        return found

    def come_at_once(self, count: int) -> list[Future[RendezvousInfo]]:
        return [self.come(waits_to_be_seen=False) for _ in range(count)]

    def waits(self, handler: ClusterRendezvous) -> bool:
        return self.store.read(self.keys.member(handler.node_id)).entry is not None

    def meet_again(self, *handlers: ClusterRendezvous) -> list[RendezvousInfo]:
        return [each.result(DEADLINE_S) for each in [self._pool.submit(one.next_rendezvous) for one in handlers]]

    @property
    def distant(self) -> list[bool]:
        """Which of the nodes hear of the round alone."""
        return [handler._presence.is_distant for handler in self.handlers]

    @staticmethod
    def until(condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    def end(self) -> None:
        for handler in self.handlers:
            handler.leave()
        self._pool.shutdown()
        self.store.close()


@pytest.fixture
def crowd(shared_etcd: EmbeddedEtcd) -> Iterator[Crowd]:
    made = Crowd(shared_etcd)
    yield made
    made.end()


def _check(found: list[RendezvousInfo]) -> None:
    assert sorted(each.rank for each in found) == list(range(len(found)))
    assert {each.world_size for each in found} == {len(found)}


def test_those_who_came_first_see_to_it(crowd: Crowd) -> None:
    waiting = [crowd.come() for _ in range(NODES - 1)]
    crowd.until(lambda: crowd.distant == [False] * CROWD + [True] * (NODES - 1 - CROWD))
    assert not any(handler._presence.view().members for handler in crowd.handlers[CROWD:])
    waiting.append(crowd.come())
    _check([each.result(DEADLINE_S) for each in waiting])
    assert crowd.distant == [False] * NODES
    places = {member.node_id for member in crowd.handlers[-1]._presence.view().training}  # who trains looks at all
    assert places == {handler.node_id for handler in crowd.handlers}


def test_they_are_as_many_though_all_come_at_once(crowd: Crowd) -> None:
    waiting = crowd.come_at_once(NODES - 1)
    crowd.until(lambda: crowd.distant.count(False) == CROWD and all(map(crowd.waits, crowd.handlers)))
    _check([each.result(DEADLINE_S) for each in (*waiting, crowd.come())])


def test_they_meet_again_without_one_that_is_lost(crowd: Crowd) -> None:
    _check([each.result(DEADLINE_S) for each in [crowd.come(least=NODES - 1) for _ in range(NODES - 1)]])
    lost, *others = crowd.handlers
    more = crowd.come(least=NODES - 1)
    crowd.until(lambda: others[0].num_nodes_waiting() == 1)
    lost.leave()
    _check([*crowd.meet_again(*others), more.result(DEADLINE_S)])


def test_if_those_who_came_first_go_others_step_up(crowd: Crowd) -> None:
    first = [crowd.come(join_timeout_s=3.0) for _ in range(CROWD)]
    rest = [crowd.come() for _ in range(NODES // 2)]
    crowd.until(lambda: crowd.distant == [False] * CROWD + [True] * len(rest))
    for each in first:
        with pytest.raises(RendezvousTimeoutError):
            each.result(DEADLINE_S)
    for handler in crowd.handlers[:CROWD]:
        handler.leave()
    crowd.until(lambda: crowd.distant[CROWD:].count(False) == CROWD)
    rest += [crowd.come() for _ in range(NODES - len(rest))]
    _check([each.result(DEADLINE_S) for each in rest])
