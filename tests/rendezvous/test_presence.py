"""An agent's presence in a job, against a real etcd."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from unicron_elastic.membership.round_wait import RoundWait
from unicron_elastic.membership.rounds import Formed, JobMember, NotYet, Place, Round, Settings
from unicron_elastic.rendezvous.job.presence import JobPresence
from unicron_elastic.rendezvous.records.job import JobKeys, JobMirror, member_text
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import Change, Entry, Put, Snapshot, StoreError
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd
from unicron_elastic.rendezvous.torch.create_handler import create_handler
from unicron_elastic.testing.memory_store import MemoryServer, MemoryStore

DEADLINE_S = 30.0
Join = Callable[[str], JobPresence]


def until(is_true: Callable[[], object]) -> None:
    """Waits for it."""
    end = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def open_store(shared_etcd: EmbeddedEtcd) -> Callable[[], EtcdStore]:
    namespace = f"/test/{uuid.uuid4().hex}"
    return lambda: EtcdStore(StoreAddress.parse(shared_etcd.endpoint), namespace)


@pytest.fixture
def join(open_store: Callable[[], EtcdStore]) -> Iterator[Join]:
    made = []

    def of(host: str) -> JobPresence:
        made.append(JobPresence(open_store, JobKeys("job"), lease_ttl_s=1.0))
        made[-1].join(JobMember(node_id=f"{host}/1", host=host), timeout_s=DEADLINE_S)
        return made[-1]

    yield of
    for presence in made:
        presence.leave()


def test_a_store_that_cannot_be_used_is_told_once_and_tried_again(
    open_store: Callable[[], EtcdStore], caplog: pytest.LogCaptureFixture
) -> None:
    refusals = ["etcd at a:1 refuses connections"] * 3

    def open_late() -> EtcdStore:
        if refusals:
            raise StoreError(refusals.pop())
        return open_store()

    presence = JobPresence(open_late, JobKeys("job"), lease_ttl_s=1.0)
    presence.silent_s = 0.0
    presence.enter(DEADLINE_S)
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"etcd at a:1 refuses connections; it is tried for {DEADLINE_S:.0f} s more."]
    presence.leave()


def test_who_waits_for_others_says_who_is_there(
    shared_etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handlers = []
    for host in "ab":
        monkeypatch.setenv("UNICRON_NODE_NAME", host)
        parameters = RendezvousParameters("unicron", shared_etcd.endpoint, f"waits-{uuid.uuid4().hex}", 2, 2)
        parameters.run_id = handlers[0].get_run_id() if handlers else parameters.run_id
        parameters.local_addr = "127.0.0.1"
        handlers.append(create_handler(parameters))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(handlers[0].next_rendezvous)
        until(lambda: "1 of 2 nodes are here: a." in caplog.messages)
        assert handlers[1].next_rendezvous().world_size == first.result(DEADLINE_S).world_size == 2
    for handler in handlers:
        handler.leave()


def test_only_as_many_leave_a_round_as_it_can_spare(join: Join) -> None:
    first, second = join("a"), join("b")
    assert first.take_leave(3, spare=1) == ""
    assert second.take_leave(3, spare=1) == "other nodes leave already, and the job needs the rest."
    assert second.take_leave(4, spare=1) == ""


@pytest.mark.parametrize("odd", [b"", b"3", b"3 -1", b"3 one", b"3 " + b"9" * 5000])
def test_a_count_of_leaves_that_is_none_is_mended(join: Join, open_store: Callable[[], EtcdStore], odd: bytes) -> None:
    with open_store() as store:
        store.put(JobKeys("job").leaving, odd)
        assert join("a").take_leave(3, spare=1) == ""
        assert getattr(store.read(JobKeys("job").leaving).entry, "value", b"") == b"3 1"


@pytest.mark.parametrize("odd", [b"", b"-1", b"one", b"9" * 19, b"9" * 5000])
def test_a_lease_of_the_job_that_is_none_is_replaced(
    join: Join, open_store: Callable[[], EtcdStore], odd: bytes
) -> None:
    with open_store() as store:
        store.put(JobKeys("job").lease, odd)
        assert join("a").write_world(1, 1, "a world") == "a world"
        assert getattr(store.read(JobKeys("job").lease).entry, "value", odd) != odd


def test_who_has_no_store_any_more_takes_no_leave(join: Join) -> None:
    presence = join("a")
    presence.leave()
    assert presence.take_leave(1, spare=1) == "the cluster's store is not open."


def test_who_lost_its_lease_comes_back(join: Join, open_store: Callable[[], EtcdStore]) -> None:
    join("a")
    key = JobKeys("job").member("a/1")
    with open_store() as store:
        lease_id = getattr(store.read(key).entry, "lease_id", None)
        assert lease_id is not None
        assert store.revoke(lease_id)
        until(lambda: store.read(key).entry is not None)


def test_the_worlds_of_rounds_that_are_long_over_go(join: Join, open_store: Callable[[], EtcdStore]) -> None:
    presence, worlds = join("a"), f"{JobKeys('job').prefix}worlds/"
    for round_number in range(9, 13):  # as numbers, not as texts
        for number in range(1, 4):
            assert presence.write_world(round_number, number, "a world") == "a world"
            until(partial(presence.world_after, round_number, number - 1))
    with open_store() as store:
        left = [entry.key.removeprefix(worlds) for entry in store.read_prefix(worlds).entries]
    assert sorted(left) == ["11/1", "11/2", "11/3", "11/latest", "12/1", "12/2", "12/3", "12/latest"]


def _write_worlds(presence: JobPresence, count: int) -> None:
    for place in range(1, count + 1):
        assert presence.write_world(7, place, f"world {place}") == f"world {place}"
        until(partial(presence.world_after, 7, place - 1))


def test_of_a_round_that_changes_worlds_for_months_the_latest_stay(
    join: Join, open_store: Callable[[], EtcdStore]
) -> None:
    presence, worlds = join("a"), f"{JobKeys('job').prefix}worlds/7/"
    _write_worlds(presence, 12)
    with open_store() as store:
        left = [entry.key.removeprefix(worlds) for entry in store.read_prefix(worlds).entries]
    assert sorted(left) == sorted(["latest", *map(str, range(5, 13))])
    assert presence.world_after(7, 0) == presence.world_after(7, 4) == (5, "world 5")
    assert presence.world_after(7, 5) == (6, "world 6")
    assert presence.world_after(7, 12) is None


def test_who_is_behind_gets_what_stands(join: Join) -> None:
    _write_worlds(join("a"), 12)
    assert join("b").write_world(7, 12, "another") == "world 12"
    assert join("c").write_world(7, 5, "another") == "world 5"  # though the one before it has gone


@pytest.mark.parametrize("place", [1, 2, 4])
def test_who_is_far_behind_writes_no_second_world_in_a_place_whose_first_has_gone(join: Join, place: int) -> None:
    presence = join("a")
    _write_worlds(presence, 12)
    with pytest.raises(StoreError, match=f"worlds/7/{place} cannot be written: others have written later ones"):
        presence.write_world(7, place, "another")
    assert presence.world_after(7, 0) == (5, "world 5")


def test_worlds_go_on_in_a_store_that_forgot_them(join: Join, open_store: Callable[[], EtcdStore]) -> None:
    presence, other, keys = join("a"), join("b"), JobKeys("job")
    _write_worlds(presence, 3)
    with open_store() as store:
        assert store.commit({}, [], [keys.latest_world(7), *(keys.world(7, place) for place in range(1, 4))])
    assert presence.write_world(7, 4, "world 4") == "world 4"
    assert other.write_world(7, 4, "another") == "world 4"
    with pytest.raises(StoreError, match="others have written later ones"):
        other.write_world(7, 1, "a second beginning")
    until(lambda: other.world_after(7, 0) == (4, "world 4"))


def test_worlds_go_on_in_a_store_that_forgot_the_latest_ones(join: Join, open_store: Callable[[], EtcdStore]) -> None:
    presence, keys = join("a"), JobKeys("job")
    _write_worlds(presence, 6)
    with open_store() as store:  # as after a backup was put back, or the last writes before a power cut were lost
        assert store.commit({}, [Put(keys.latest_world(7), b"4")], [keys.world(7, 5), keys.world(7, 6)])
    assert presence.write_world(7, 7, "world 7") == "world 7"
    assert join("b").write_world(7, 7, "another") == "world 7"
    until(lambda: presence.world_after(7, 6) == (7, "world 7"))


def test_a_latest_place_that_is_none_is_mended(join: Join, open_store: Callable[[], EtcdStore]) -> None:
    presence, keys = join("a"), JobKeys("job")
    with open_store() as store:
        for number, odd in enumerate((b"", b"-1", b"two", b"\xb2", b"9" * 5000), 1):
            store.put(keys.latest_world(7), odd)
            assert presence.write_world(7, number, "a world") == "a world"


def test_more_worlds_than_one_write_can_delete_go_with_several(join: Join, open_store: Callable[[], EtcdStore]) -> None:
    presence, keys = join("a"), JobKeys("job")
    with open_store() as store:
        for place in range(1, 150):
            store.put(keys.world(7, place), b"of a round before")
        until(lambda: presence.world_after(7, 148) is not None)
        for place in range(1, 3):
            assert presence.write_world(9, place, "a world") == "a world"
            until(partial(presence.world_after, 9, place - 1))
        assert store.read_prefix(f"{keys.prefix}worlds/7/").entries == ()


def test_two_who_write_the_same_place_agree(join: Join) -> None:
    both = [join("a"), join("b")]
    for place in range(1, 30):
        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(lambda each, place=place: each.write_world(7, place, f"of {id(each)}"), both))
        assert said[0] == said[1]


def test_of_the_nodes_that_have_the_state_one_stays(join: Join) -> None:
    first, second = join("a"), join("b")
    assert first.take_leave(3, 2, ("a/1", "It is drained."), have_state=["b/1"]) == ""
    why = "no other node that stays has the training state yet."
    assert second.take_leave(3, 2, ("b/1", "It is drained."), have_state=["a/1"]) == why
    assert second.take_leave(3, 2, ("b/1", "It is drained."), have_state=["a/1", "c/1"]) == ""


def test_what_departed_nodes_said_goes_when_it_is_two_rounds_old(
    join: Join, open_store: Callable[[], EtcdStore]
) -> None:
    presence, keys = join("a"), JobKeys("job")
    nodes = [Place(node_id=f"{name}/1", host=name) for name in "abc"]
    told: list[list[str]] = []
    for number, places in enumerate((nodes, nodes[:2], nodes[:1], nodes[:1]), 1):
        if len(places) > 1:
            gone = places[-1].node_id
            assert presence.take_leave(number, spare=1, departing=(gone, "It is recalled.")) == ""
            until(lambda gone=gone: gone in presence.departing())
        assert presence.propose(Round(number=number, places=tuple(places)), presence.view())
        until(lambda number=number: (found := presence.view().round) is not None and found.number == number)
        told.append(sorted(presence.departing()))
    with open_store() as store:
        left = [entry.key for entry in store.read_prefix(f"{keys.prefix}departing/").entries]
    assert (told, left) == ([["c/1"], ["b/1", "c/1"], ["b/1"], []], [])


@pytest.mark.parametrize(
    ("name", "value"),
    [("lease_ttl", "0"), ("join_timeout", "inf"), ("last_call_timeout", "soon"), ("lease_ttl", "nan")],
)
def test_a_wrong_setting_is_one_sentence(name: str, value: str) -> None:
    parameters = RendezvousParameters("unicron", "localhost", "job", 1, 1, **{name: value})
    with pytest.raises(ValueError, match=rf"--rdzv-conf {name} must be .* seconds, not '{value}'"):
        create_handler(parameters)


def test_what_cannot_be_read_is_left_out_until_it_can() -> None:
    keys = JobKeys("job")
    key = keys.member("a/1")
    mirror = JobMirror(keys, Snapshot.of_nothing(keys.prefix))
    good = member_text(JobMember(node_id="a/1", host="a", waits_for=2))
    for revision, value, readable in ((1, b"[", False), (2, good, True), (3, b'{"node": 1}', False), (4, good, True)):
        entry = Entry(key=key, value=value, revision=revision, created=1, lease_id=None)
        mirror.apply([Change(key=key, revision=revision, entry=entry)])
        assert (len(mirror.view().members) == 1) == readable == (key not in mirror.odd)
    mirror.apply([Change(key=key, revision=5, entry=None)])
    assert (mirror.view().members, mirror.odd, mirror.revision(key)) == ((), {}, 0)


class Forgotten:
    """Agents of one job on a store whose time the test makes pass, and that end without a word."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.server = MemoryServer(lambda: self.now)
        self.made: list[JobPresence] = []
        self.keys = JobKeys("job")

    def join(self, host: str, **options: float) -> JobPresence:
        presence = JobPresence(lambda: MemoryStore(self.server), self.keys, lease_ttl_s=3.0, **options)
        presence.offer(self.keys.spec, host.encode())
        self.made.append(presence)
        presence.join(JobMember(node_id=f"{host}/1", host=host, waits_for=len(self.made)), timeout_s=DEADLINE_S)
        until(lambda: any(each.host == host for each in presence.view().members))
        return presence

    def kill(self, presence: JobPresence) -> None:
        presence._is_gone.set()
        assert presence._thread is not None
        presence._thread.join(DEADLINE_S)
        presence._store = None  # so that leaving says nothing

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.server.advance()


@pytest.fixture
def forgotten() -> Iterator[Forgotten]:
    made = Forgotten()
    yield made
    for presence in made.made:
        presence.leave()


def _of_round(forgotten: Forgotten) -> JobPresence:
    """An agent that has trained alone, and was killed or cut off."""
    first = forgotten.join("a")
    assert first.propose(Round(number=1, places=(Place("a/1", "a"),)), first.view())
    until(lambda: first.view().round is not None)
    forgotten.kill(first)
    return first


@pytest.mark.parametrize(("later_s", "left_s"), [(70.0, (563.0, 565.0)), (400.0, (233.0, 235.0))])
def test_nobody_begins_while_agents_of_before_may_train_cut_off(
    forgotten: Forgotten, later_s: float, left_s: tuple[float, float]
) -> None:
    _of_round(forgotten)
    forgotten.later(later_s)
    settings = Settings(min_nodes=1, max_nodes=1)
    for host in "bc":  # who comes first takes nothing of that from who comes next
        late = forgotten.join(host)
        now = time.monotonic()
        decided = RoundWait(settings, now).decide(late.view(), now, "", late.unseen_for_s())
        assert isinstance(decided, NotYet), decided
        assert decided.is_for_safety
        assert decided.again_in_s is not None
        assert left_s[0] - 5.0 <= decided.again_in_s <= left_s[1]


def test_who_comes_when_no_agent_of_before_can_train_any_more_begins_at_once(forgotten: Forgotten) -> None:
    _of_round(forgotten)
    forgotten.later(640.0)
    late, now = forgotten.join("b"), time.monotonic()
    settings = Settings(min_nodes=1, max_nodes=1)
    decided = RoundWait(settings, now).decide(late.view(), now, "", late.unseen_for_s())
    assert isinstance(decided, Formed)
    assert decided.round.number == 2
    assert late.propose(decided.round, late.view())
    forgotten.later(2.0)
    assert late.store is not None
    assert late.store.read(forgotten.keys.round).entry is not None


def test_who_may_have_been_there_meanwhile_is_waited_for_anew(forgotten: Forgotten) -> None:
    _of_round(forgotten)
    forgotten.later(400.0)
    late = forgotten.join("b")
    assert late.unseen_for_s() > 300.0
    late._blinded("etcd stands")
    assert late.unseen_for_s() == 0.0


def test_a_start_of_before_leaves_no_command_line_to_the_next(forgotten: Forgotten) -> None:
    _of_round(forgotten)
    forgotten.later(70.0)
    late = forgotten.join("b")
    assert late.store is not None
    entry = late.store.read(forgotten.keys.spec).entry
    assert entry is not None
    assert entry.value == b"b"


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_the_keys_of_a_job_that_is_over_go_with_its_last_agent(
    open_store: Callable[[], EtcdStore], join: Join, how: str
) -> None:
    agents, keys = [join("a"), join("b")], JobKeys("job")
    until(lambda: all(len(agent.view().members) == len(agents) for agent in agents))
    assert agents[0].propose(Round(number=1, places=(Place("a/1", "a"),)), agents[0].view())
    agents[0].write_world(1, 1, "a world")
    key = keys.closed if how == "closed" else keys.cancelled
    if how == "closed":
        agents[0].close_job("It has ended well.")
    else:
        with open_store() as operator:
            operator.put(key, b"cancelled by ada")
    until(lambda: all(agent.get(key) for agent in agents))
    with ThreadPoolExecutor(len(agents)) as pool:
        list(pool.map(JobPresence.leave, agents))
    with open_store() as store:
        assert [entry.key for entry in store.read_prefix(keys.prefix).entries] == [key]
