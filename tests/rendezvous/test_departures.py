"""A node that is wanted elsewhere: what its agent and the others hear and may do, against a real etcd."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousParameters,
)

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.membership.rounds import BLIND_MARGIN_S, JobMember, Place, Round
from unicron_elastic.rendezvous.job.round_watch import RoundListener, RoundWatch
from unicron_elastic.rendezvous.records.cluster import quarantine_key, quarantine_text
from unicron_elastic.rendezvous.records.job import JobKeys, JobMirror, Lost, departing_text, parse_lost, round_text
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import Change, Entry, Snapshot
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd
from unicron_elastic.rendezvous.torch.create_handler import create_handler
from unicron_elastic.rendezvous.torch.handler import ClusterRendezvous

DEADLINE_S = 30.0
DRAINED = "Node a is drained by ada: a loud fan."
REASON = "Node a is recalled: job b gains more."


class Lab:
    """Nodes of one job, and what they hear."""

    def __init__(self, etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
        self._endpoint, self._patch, self._run_id = etcd.endpoint, monkeypatch, uuid.uuid4().hex
        self.keys = JobKeys(self._run_id)
        self.store = EtcdStore(StoreAddress.parse(etcd.endpoint))
        self.handlers: dict[str, ClusterRendezvous] = {}
        self.heard: list[tuple[Any, ...]] = []

    def make(self, host: str, nodes: str) -> ClusterRendezvous:
        least, _, most = nodes.partition(":")
        self._patch.setenv("UNICRON_NODE_NAME", host)
        config = {"last_call_timeout": 0 if int(least) > 1 else DEADLINE_S, "lease_ttl": 3, "join_timeout": DEADLINE_S}
        parameters = RendezvousParameters(
            "unicron", self._endpoint, self._run_id, int(least), int(most), local_addr="127.0.0.1", **config
        )
        self.handlers[host] = create_handler(parameters)
        return self.handlers[host]

    def meet(self, *handlers: ClusterRendezvous) -> None:
        with ThreadPoolExecutor(len(handlers)) as pool:
            list(pool.map(lambda handler: handler.next_rendezvous(), handlers))

    def watch(self, host: str) -> None:
        listener = RoundListener(
            on_fault=lambda why: self.heard.append((host, "fault", why)),
            on_lost=lambda nodes, _why: self.heard.append((host, "lost", *map(host_of, nodes))),
            on_depart=lambda nodes, why: self.heard.append((host, "departs", *map(host_of, nodes), why)),
            on_recall=lambda why, why_stay, drained: self.heard.append((host, "recall", why, why_stay, drained)),
        )
        self.handlers[host].watch_nodes(listener)

    def recall(self, host: str) -> None:
        self.store.put(self.keys.recalled(host), b"job b gains more.")

    def drain(self, host: str) -> None:
        entry = Quarantined(node=host, reason="a loud fan", since=time.time(), until=None, by="ada")
        self.store.put(quarantine_key(host), quarantine_text(entry))

    def until(self, condition: Callable[[], object]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end, self.heard
            time.sleep(0.01)

    def end(self) -> None:
        for handler in self.handlers.values():
            handler.leave()
        for host in self.handlers:
            self.store.delete(quarantine_key(host))
        self.store.close()


def host_of(node_id: str) -> str:
    return node_id.partition("/")[0]


@pytest.fixture
def lab(shared_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    made = Lab(shared_etcd, monkeypatch)
    yield made
    made.end()


def test_the_others_hear_that_it_departs_and_not_that_it_is_lost(lab: Lab) -> None:
    lab.meet(*(lab.make(host, "1:2") for host in "ab"))
    for host in "ab":
        lab.watch(host)
    lab.recall("a")
    lab.until(lambda: ("a", "recall", REASON, "", False) in lab.heard)
    assert lab.handlers["a"].depart(2, REASON) == ""
    lab.until(lambda: ("b", "departs", "a", REASON) in lab.heard)
    assert lab.handlers["b"].depart(2, "Too.") == "other nodes leave already, and the job needs the rest."
    lab.handlers["a"].leave()
    lab.handlers["a"].shutdown()  # by whom the job is not closed
    lab.until(lambda: not _is_member(lab, "a"))
    assert lab.handlers["b"].why_stay(2) == "it is the only node of the job."
    assert not lab.handlers["b"].is_closed()
    assert [heard for heard in lab.heard if heard[0] == "b"] == [("b", "departs", "a", REASON)]


def _is_member(lab: Lab, host: str) -> bool:
    members = lab.store.read_prefix(f"{lab.keys.prefix}members/").entries
    return any(f"members/{host}%2F" in entry.key for entry in members)


def test_why_it_stays_is_told_when_that_changes(lab: Lab) -> None:
    lab.meet(*(lab.make(host, "2:3") for host in "ab"))
    lab.watch("a")
    lab.recall("a")
    lab.until(lambda: ("a", "recall", REASON, "the job needs all 2 of its nodes.", False) in lab.heard)
    third = lab.make("c", "2:3")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(third.next_rendezvous)
        lab.until(lambda: ("a", "recall", REASON, "", False) in lab.heard)
        assert lab.handlers["a"].depart(2, REASON) == ""
        lab.handlers["a"].leave()
        lab.meet(lab.handlers["b"])
        assert waiting.result(DEADLINE_S).world_size == 2


def test_a_recall_that_is_taken_back_is_told_and_of_others_nothing(lab: Lab) -> None:
    lab.meet(*(lab.make(host, "1:2") for host in "ab"))
    for host in "ab":
        lab.watch(host)
    lab.recall("a")
    lab.recall("nobody")
    lab.until(lambda: len(lab.heard) == 1)
    lab.store.delete(lab.keys.recalled("a"))
    lab.until(lambda: len(lab.heard) == 2)
    assert lab.heard == [("a", "recall", REASON, "", False), ("a", "recall", "", "", False)]


def test_who_meets_already_does_not_take_the_place_of_a_node_that_is_needed(lab: Lab) -> None:
    lab.meet(*(lab.make(host, "2:2") for host in "ab"))
    with ThreadPoolExecutor(1) as pool:
        meets = pool.submit(lab.handlers["b"].next_rendezvous)
        lab.until(lambda: lab.handlers["a"]._presence.view().waiting)
        assert lab.handlers["a"].why_stay(2) == "the job needs all 2 of its nodes."
        lab.recall("a")
        lab.until(lab.handlers["a"]._why_recalled)
        lab.handlers["a"].next_rendezvous()  # it stays, as it is needed
        assert meets.result(DEADLINE_S).world_size == 2


def test_a_drained_node_that_its_job_needs_meets_again_and_no_other_agent_of_its_host(lab: Lab) -> None:
    lab.meet(*(lab.make(host, "2:2") for host in "ab"))
    lab.watch("a")
    lab.drain("a")
    needed = "the job needs all 2 of its nodes."
    lab.until(lambda: ("a", "recall", DRAINED, needed, True) in lab.heard)
    lab.meet(*lab.handlers.values())  # after a fault, say
    first = lab.handlers["a"]
    with pytest.raises(RendezvousClosedError, match="a loud fan"):
        lab.make("a", "2:2").next_rendezvous()
    first.leave()


def test_a_drained_node_that_meets_again_leaves_if_the_others_are_enough(lab: Lab) -> None:
    lab.meet(*(lab.make(host, "1:2") for host in "ab"))
    lab.watch("b")
    lab.drain("a")
    lab.until(lab.handlers["a"]._node.why_drained)
    with pytest.raises(RendezvousClosedError, match=DRAINED):
        lab.handlers["a"].next_rendezvous()
    lab.until(lambda: ("b", "departs", "a", DRAINED) in lab.heard)
    lab.handlers["a"].shutdown()  # by whom the job is not closed
    lab.meet(lab.handlers["b"])


def test_of_the_rounds_that_an_agent_hosts_only_the_latest_stores_are_told(lab: Lab) -> None:
    alone = lab.make("a", "1:1")
    for _ in range(4):
        lab.meet(alone)
    prefix = f"{lab.keys.prefix}stores/"
    assert [entry.key.removeprefix(prefix) for entry in lab.store.read_prefix(prefix).entries] == ["3", "4"]


def test_who_waits_leaves_and_the_job_is_open(lab: Lab) -> None:
    lab.recall("a")
    with pytest.raises(RendezvousGracefulExitError, match=REASON):
        lab.make("a", "1:1").next_rendezvous()
    lab.handlers["a"].shutdown()
    lab.meet(lab.make("b", "1:1"))


def test_who_meets_again_leaves_with_a_word_and_whoever_is_there_goes_on(lab: Lab) -> None:
    lab.meet(*(lab.make(host, "1:2") for host in "ab"))
    lab.watch("b")
    lab.recall("a")
    lab.until(lab.handlers["a"]._why_recalled)
    with pytest.raises(RendezvousGracefulExitError, match=REASON):
        lab.handlers["a"].next_rendezvous()
    lab.until(lambda: ("b", "departs", "a", REASON) in lab.heard)
    lab.meet(lab.handlers["b"])
    assert [heard for heard in lab.heard if heard[1] in ("lost", "fault")] == []


def test_who_trains_on_while_it_meets_does_not_leave_from_there(lab: Lab) -> None:
    lab.recall("a")
    lab.make("a", "1:1").trains_on = True
    lab.meet(lab.handlers["a"])


class Rounds:
    """A rendezvous that says what a test wants."""

    def __init__(self) -> None:
        self.recalled = ("", "", False)
        self.departing: tuple[tuple[str, ...], str] = ((), "")

    def __getattr__(self, name: str) -> Any:
        nothing = {"nodes_waiting": 0, "nodes_gone": ()}
        return lambda _round: nothing.get(name, "")

    def why_recalled(self, _round: Round) -> tuple[str, str, bool]:
        return self.recalled

    def nodes_departing(self, _round: Round) -> tuple[tuple[str, ...], str]:
        return self.departing


def test_each_change_is_told_once() -> None:
    rounds, heard = Rounds(), []
    listener = RoundListener(
        on_fault=lambda _why: None,
        on_recall=lambda *words: heard.append(words),
        on_depart=lambda nodes, _why: heard.append(nodes),
    )
    watch = RoundWatch(rounds, Round(number=1, places=(Place("a/1", "a"),)), listener)
    nothing, stays, leaves, drained = ("", "", False), ("r", "s", False), ("r", "", False), ("r", "", True)
    for recalled in (nothing, stays, stays, leaves, nothing, drained):
        rounds.recalled = recalled
        watch.look()
    assert heard == [stays, leaves, nothing, drained]
    for nodes in (("b",), ("b",), ("b", "c")):
        rounds.departing = (nodes, "why")
        watch.look()
    assert heard[4:] == [("b",), ("b", "c")]


def test_who_departs_is_read_with_bounds() -> None:
    keys = JobKeys("job")
    mirror = JobMirror(keys, Snapshot.of_nothing(keys.prefix))
    key = keys.departing("a/1")
    for revision, value in enumerate((b"{}", departing_text("a/1", "r\n" * 9000)), 1):
        entry = Entry(key=key, value=value, revision=revision, created=1, lease_id=None)
        mirror.apply([Change(key=key, revision=revision, entry=entry)])
        assert (key in mirror.odd) == (revision == 1) == (mirror.departing() == {})
    assert len(mirror.departing()["a/1"]) <= 2000


# -- in good order, or not ---------------------------------------------------------------------------------------------


def gone(lab: Lab) -> dict[str, Lost]:
    found = map(parse_lost, lab.store.read_prefix(lab.keys.lost("")).entries)
    return {host_of(each.node_id): each for each in found}


def stopped(lab: Lab) -> bool:
    snapshot = lab.store.read_prefix(lab.keys.prefix)
    return JobMirror(lab.keys, snapshot).view().is_stopped


def test_a_job_is_stopped_once_all_of_its_nodes_were_told_to_go(lab: Lab) -> None:
    first, second = lab.make("a", "2:2"), lab.make("b", "2:2")
    lab.meet(first, second)
    for handler, is_over in ((first, False), (second, True)):
        try:
            raise SignalException("Process 7 got signal: 15", signal.SIGTERM)
        except SignalException:
            handler.leave()
        assert stopped(lab) == is_over
    assert [(each.has_ended, each.is_orderly) for each in gone(lab).values()] == [(True, True)] * 2


def test_a_node_that_an_error_ends_has_not_left_in_good_order(lab: Lab) -> None:
    handler = lab.make("a", "1:1")
    lab.meet(handler)
    try:
        raise OSError("No space left on device")
    except OSError:
        handler.shutdown()
    assert (gone(lab)["a"].has_ended, gone(lab)["a"].is_orderly) == (True, False)
    assert not stopped(lab)


def test_a_node_of_the_last_round_says_that_it_has_left_though_it_waits_for_another(lab: Lab) -> None:
    first, second = lab.make("a", "2:2"), lab.make("b", "2:2")
    lab.meet(first, second)
    first.leave()
    lab.store.put(lab.keys.cancelled, b"cancelled by ada")  # else it would wait
    with pytest.raises(RendezvousClosedError):
        second.next_rendezvous()
    lab.store.delete(lab.keys.cancelled)  # or the job's keys would go with it
    lab.until(lambda: second._presence.get(lab.keys.cancelled) is None)
    second.leave()
    assert gone(lab)["b"].is_orderly
    assert stopped(lab)


def test_a_job_that_has_ended_has_no_farewells(lab: Lab) -> None:
    handler = lab.make("a", "1:1")
    lab.meet(handler)
    handler.shutdown()
    assert (gone(lab), stopped(lab)) == ({}, False)


def test_nodes_that_wait_for_safety_wait_longer_than_they_would_for_nodes(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.store.put(lab.keys.round, round_text(Round(number=1, places=(Place("gone/1", "gone"),))))
    late = lab.make("a", "1:1")
    late._join_timeout_s, late._settings = 2.0, replace(late._settings, blind_patience_s=4.0 - BLIND_MARGIN_S)
    began = time.monotonic()
    assert late.next_rendezvous().world_size == 1
    assert time.monotonic() - began > 3.0
    assert any("So the next round begins in " in each and "blind_patience" in each for each in caplog.messages)


@pytest.mark.parametrize(("error", "count"), [(None, 2), (OSError("the host is gone"), 3)], ids=["leaves", "is lost"])
def test_who_takes_over_from_all_others_goes_on_with_their_count(lab: Lab, error: OSError | None, count: int) -> None:
    first, spare = lab.make("a", "1:1"), lab.make("b", "1:1")
    lab.meet(first)
    assert first.restarts_taken_over() == 0
    first.tell_restarts(2)
    join = spare._presence.join

    def join_and_see_it_go(member: JobMember, timeout_s: float) -> None:
        join(member, timeout_s)
        _leave(first, error)
        lab.until(lambda: not spare._presence.view().training)

    with mock.patch.object(spare._presence, "join", join_and_see_it_go):  # before the spare has looked once more
        lab.meet(spare)
    assert spare.restarts_taken_over() == count
    assert first.restarts_taken_over() == 0


@pytest.mark.parametrize(("error", "why"), [(None, ""), (OSError("the host is gone"), "b has left.")])
def test_of_those_who_are_in_the_next_round_no_more_it_is_known_why(lab: Lab, error: OSError | None, why: str) -> None:
    lab.meet(*(lab.make(host, "1:2") for host in "ab"))
    assert lab.handlers["a"].why_lost_before() == ""
    _leave(lab.handlers["b"], error)
    lab.meet(lab.handlers["a"])
    assert lab.handlers["a"].why_lost_before() == why


def test_who_stays_counts_itself_and_who_comes_when_all_have_gone_begins_anew(lab: Lab) -> None:
    lab.meet(*(lab.make(host, "1:2") for host in "ab"))
    lab.handlers["a"].tell_restarts(2)
    lab.handlers["a"].leave()
    lab.meet(lab.handlers["b"])
    assert lab.handlers["b"].restarts_taken_over() == 0
    lab.handlers["b"].leave()
    lab.until(lambda: not lab.store.read_prefix(lab.keys.member("")).entries)
    lab.meet(lab.make("c", "1:2"))
    assert lab.store.read(lab.keys.restarts).entry is not None
    assert lab.handlers["c"].restarts_taken_over() == 0


def _leave(handler: ClusterRendezvous, error: OSError | None) -> None:
    try:
        if error is not None:
            raise error
        handler.leave()
    except OSError:
        handler.leave()
