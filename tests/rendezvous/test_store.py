"""What every store guarantees: one suite for all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from store_lab import EtcdLab, MemoryLab, Told

from unicron_elastic.rendezvous.store.interface import (
    MAX_COMMIT_BYTES,
    MAX_OPERATIONS,
    Blind,
    Changes,
    Entry,
    LeaseGoneError,
    Put,
    Replaced,
    Sighted,
    Snapshot,
    StoreClosedError,
    StoreError,
    StoreReplacedError,
    StoreUnreachableError,
    Write,
)

Lab = MemoryLab | EtcdLab


@pytest.fixture(params=["memory", "etcd"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A store, and what can befall it."""
    made = MemoryLab() if request.param == "memory" else EtcdLab(request.getfixturevalue("shared_etcd"))
    yield made
    made.end()


def test_a_key_that_is_not_there_has_no_entry(lab: Lab) -> None:
    assert lab.store.read("key").entry is None


def test_an_entry_says_when_it_was_made_and_changed(lab: Lab) -> None:
    first = lab.store.put("key", b"1")
    second = lab.store.put("key", b"2")
    reading = lab.store.read("key")
    assert second > first
    assert reading.revision == second
    assert reading.entry is not None
    assert (reading.entry.key, reading.entry.value, reading.entry.lease_id) == ("key", b"2", None)
    assert (reading.entry.created, reading.entry.revision) == (first, second)


def test_a_key_made_again_is_a_new_one(lab: Lab) -> None:
    lab.store.put("key", b"1")
    lab.store.delete("key")
    again = lab.store.put("key", b"2")
    entry = lab.store.read("key").entry
    assert entry is not None
    assert (entry.created, entry.revision) == (again, again)


def test_a_snapshot_has_all_keys_of_a_prefix_and_no_others(lab: Lab) -> None:
    for key in ("nodes/b", "nodes/a", "nodes", "nodesx", "jobs/1", "nodes/ä"):
        lab.store.put(key, key.encode())
    snapshot = lab.store.read_prefix("nodes/")
    assert [entry.key for entry in snapshot.entries] == ["nodes/a", "nodes/b", "nodes/ä"]
    assert snapshot.get("nodes/b") is not None
    assert snapshot.get("jobs/1") is None
    everything = lab.store.read_prefix("")
    assert len(everything.entries) == 6
    assert everything.revision == snapshot.revision
    assert everything.under("nodes/") == snapshot
    assert everything.under("nothing/").entries == ()


def test_a_part_of_a_prefix_can_be_left_out_and_counted(lab: Lab) -> None:
    for key in ("job/a", "job/members/1", "job/members/2", "job/membership", "job/z", "jobs"):
        lab.store.put(key, b"")
    third = lab.store.put("job/members/3", b"")
    snapshot = lab.store.read_prefix("job/", without="job/members/")
    assert [entry.key for entry in snapshot.entries] == ["job/a", "job/membership", "job/z"]
    assert (snapshot.prefix, snapshot.revision) == ("job/", third)
    assert [lab.store.count("job/members/", most=most) for most in (1, 2, 9)] == [1, 2, 3]
    assert [lab.store.count("job/members/", most=most, created_before=third) for most in (1, 9)] == [1, 2]
    lab.store.put("job/members/1", b"changed")  # and no younger
    assert lab.store.count("job/members/", most=9, created_before=third) == 2
    with pytest.raises(ValueError, match="no part of"):
        lab.store.read_prefix("job/", without="other/")


def test_clients_of_one_namespace_share_it_and_others_do_not_see_it(lab: Lab) -> None:
    lab.store.put("key", b"1")
    assert lab.new_store().read("key").entry is not None
    assert lab.new_store("/unicron/other").read("key").entry is None
    assert lab.new_store("/unicron/tes").read_prefix("").entries == ()


def test_only_one_creates_a_key(lab: Lab) -> None:
    assert lab.store.create("leader", b"a") is not None
    assert lab.new_store().create("leader", b"b") is None
    entry = lab.store.read("leader").entry
    assert entry is not None
    assert entry.value == b"a"


def test_a_key_is_set_only_if_nobody_changed_it(lab: Lab) -> None:
    first = lab.store.compare_and_set("key", b"1", 0)
    assert first is not None
    second = lab.store.compare_and_set("key", b"2", first)
    assert second is not None
    assert lab.store.compare_and_set("key", b"3", first) is None
    assert lab.store.compare_and_set("key", b"3", 0) is None
    lab.store.delete("key")
    assert lab.store.compare_and_set("key", b"3", second) is None
    assert lab.store.compare_and_set("key", b"3", 0) is not None


def test_an_update_is_made_of_what_a_faster_one_has_left(lab: Lab) -> None:
    lease_id, others = lab.store.grant(60.0).lease_id, [b"2", b"1"]

    def appended(entry: Entry | None) -> Write:
        if others:
            lab.store.put("key", others.pop())
        return Write(puts=(Put("key", (b"" if entry is None else entry.value) + b"+", lease_id),), deletes=("old",))

    lab.store.put("old", b"")
    assert lab.store.update("key", appended)
    entry = lab.store.read("key").entry
    assert entry is not None
    assert (entry.value, entry.lease_id) == (b"2+", lease_id)
    assert lab.store.read("old").entry is None


def test_an_update_may_leave_all_as_it_is(lab: Lab) -> None:
    assert not lab.store.update("key", lambda _: None)
    assert lab.store.read_prefix("").entries == ()


def test_an_update_that_is_never_the_first_is_given_up(lab: Lab) -> None:
    def late(_: Entry | None) -> Write:
        lab.store.put("key", b"")
        return Write(deletes=("key",))

    with pytest.raises(StoreError, match="others change the key of all the time; try again"):
        lab.store.update("key", late, what="the key of")


def test_other_guards_of_an_update_hold_too(lab: Lab) -> None:
    revision = lab.store.put("other", b"")
    with pytest.raises(StoreError, match="others change key all the time"):
        lab.store.update("key", lambda _: Write(puts=(Put("key", b""),), guards={"other": revision - 1}))
    assert lab.store.update("key", lambda _: Write(puts=(Put("key", b""),), guards={"other": revision}))


def test_a_commit_is_all_or_nothing(lab: Lab) -> None:
    leader = lab.store.put("leader", b"a")
    lab.store.put("old", b"")
    revision = lab.store.commit({"leader": leader, "plan": 0}, [Put("plan", b"1"), Put("other", b"2")], ["old", "none"])
    assert revision is not None
    snapshot = lab.store.read_prefix("")
    assert [(entry.key, entry.revision) for entry in snapshot.entries] == [
        ("leader", leader),
        ("other", revision),
        ("plan", revision),
    ]
    assert lab.store.commit({"leader": leader, "plan": 0}, [Put("other", b"3")], ["leader"]) is None
    assert lab.store.read_prefix("") == snapshot


def test_a_leader_that_was_replaced_changes_nothing(lab: Lab) -> None:
    first = lab.store.create("leader", b"a")
    assert first is not None
    lab.store.delete("leader")
    second = lab.new_store().create("leader", b"b")
    assert second is not None
    assert lab.store.commit({"leader": first}, [Put("plan", b"a's")]) is None
    assert lab.new_store().commit({"leader": second}, [Put("plan", b"b's")]) is not None


def test_a_commit_without_writes_asks_whether_the_guards_hold(lab: Lab) -> None:
    revision = lab.store.put("key", b"1")
    assert lab.store.commit({"key": revision, "none": 0}) == revision
    assert lab.store.commit({"key": revision + 1}) is None


def test_to_delete_what_is_not_there_changes_nothing(lab: Lab) -> None:
    revision = lab.store.put("key", b"1")
    lab.store.delete("none")
    assert lab.store.read("none").revision == revision


def test_the_largest_commit_passes(lab: Lab) -> None:
    puts = [Put(f"key-{number:03}", b"x" * 9000) for number in range(MAX_OPERATIONS)]
    assert lab.store.commit({put.key: 0 for put in puts}, puts) is not None
    assert len(lab.store.read_prefix("key-").entries) == MAX_OPERATIONS


def test_a_lease_lasts_at_least_as_long_as_asked_for(lab: Lab) -> None:
    lease = lab.store.grant(3.2)
    assert lease.ttl_s >= 3.2
    assert lab.store.keep_alive(lease.lease_id) == lease.ttl_s


def test_a_lease_tells_how_old_it_is_and_never_more(lab: Lab) -> None:
    began = time.monotonic()
    lease = lab.store.grant(30)
    lab.pass_time(5.0)
    age_s = lab.store.age(lease.lease_id)
    assert age_s is not None
    assert 0.0 <= age_s <= 5.0 + time.monotonic() - began
    lab.store.keep_alive(lease.lease_id)
    assert (lab.store.age(lease.lease_id) or 0.0) <= 1.0 + time.monotonic() - began
    lab.store.revoke(lease.lease_id)
    assert lab.store.age(lease.lease_id) is None


def test_keys_go_with_their_lease(lab: Lab) -> None:
    told = Told()
    lease = lab.store.grant(1)
    lab.store.put("leased", b"1", lease.lease_id)
    lab.store.put("lasting", b"1")
    lab.store.watch(lab.store.read_prefix(""), told)
    lab.pass_time(lease.ttl_s)
    told.wait_for(Changes)
    assert [(change.key, change.entry) for change in told.changes] == [("leased", None)]
    assert lab.store.read("leased").entry is None
    assert lab.store.read("lasting").entry is not None
    assert lab.store.keep_alive(lease.lease_id) is None
    assert not lab.store.revoke(lease.lease_id)


def test_a_lease_can_be_ended(lab: Lab) -> None:
    lease = lab.store.grant(30)
    for key in ("b", "a"):
        lab.store.put(key, b"", lease.lease_id)
    entry = lab.store.read("a").entry
    assert entry is not None
    assert entry.lease_id == lease.lease_id
    told = Told()
    lab.store.watch(lab.store.read_prefix(""), told)
    assert lab.store.revoke(lease.lease_id)
    told.wait_for(Changes)
    assert told.keys == ["a", "b"]
    assert len(told.items) == 1
    assert not lab.store.revoke(lease.lease_id)


def test_a_key_written_without_the_lease_outlives_it(lab: Lab) -> None:
    lease = lab.store.grant(30)
    lab.store.put("key", b"1", lease.lease_id)
    lab.store.put("key", b"2")
    lab.store.revoke(lease.lease_id)
    assert lab.store.read("key").entry is not None


def test_nothing_is_written_under_a_lease_that_is_gone(lab: Lab) -> None:
    lease = lab.store.grant(30)
    lab.store.revoke(lease.lease_id)
    with pytest.raises(LeaseGoneError, match="the lease is gone"):
        lab.store.commit({}, [Put("free", b""), Put("leased", b"", lease.lease_id)])
    with pytest.raises(LeaseGoneError):
        lab.store.create("leased", b"", lease.lease_id)
    assert lab.store.read_prefix("").entries == ()
    assert not lab.store.try_put("leased", b"", lease.lease_id)


def test_a_put_that_may_be_lost_never_raises(lab: Lab) -> None:
    assert lab.store.try_put("key", b"1")
    lab.cut()
    assert not lab.store.try_put("key", b"2", timeout_s=0.3)
    lab.mend()


def test_what_the_caller_did_wrong_is_said(lab: Lab) -> None:
    store = lab.store
    for key in ("", "with\nbreak", "x" * 600, ".incarnation"):
        with pytest.raises(ValueError, match="a key must"):
            store.put(key, b"")
        with pytest.raises(ValueError, match="a key must"):
            store.read(key)
    with pytest.raises(ValueError, match="once, not twice, as 'a' here"):
        store.commit({}, [Put("a", b"")], ["a"])
    with pytest.raises(ValueError, match="at most 100 guards"):
        store.commit({}, [Put(str(number), b"") for number in range(MAX_OPERATIONS + 1)])
    with pytest.raises(ValueError, match="at most 1000000 bytes"):
        store.put("a", b"x" * MAX_COMMIT_BYTES)
    with pytest.raises(ValueError, match="must not be negative"):
        store.compare_and_set("a", b"", -1)
    for ttl_s in (0, -1.0, 1e9):
        with pytest.raises(ValueError, match="a lease must last"):
            store.grant(ttl_s)
    for namespace in ("", "unicron", "/unicron/"):
        with pytest.raises(ValueError, match="a namespace must be a path"):
            type(store)(None, namespace)  # type: ignore[arg-type]


def test_a_watch_tells_of_every_change_once_and_in_order(lab: Lab) -> None:
    told = Told()
    snapshot = lab.store.read_prefix("nodes/")
    lab.store.put("nodes/before", b"")  # after the snapshot and before the watch
    lab.store.watch(snapshot, told)
    other = lab.new_store()
    for number in range(50):
        other.put(f"nodes/{number}", b"%d" % number)
        other.put("jobs/1", b"")
    other.delete("nodes/7")
    told.wait(lambda: len(told.changes) == 52)
    assert told.keys == ["nodes/before", *(f"nodes/{number}" for number in range(50)), "nodes/7"]
    revisions = [change.revision for change in told.changes]
    assert revisions == sorted(set(revisions))
    assert told.changes[-1].entry is None
    assert told.of(Changes) == told.items


def test_a_commit_is_told_whole(lab: Lab) -> None:
    told = Told()
    lab.store.put("c", b"")
    lab.store.watch(lab.store.read_prefix(""), told)
    revision = lab.store.commit({}, [Put("a", b"1"), Put("b", b"2")], ["c"])
    told.wait_for(Changes)
    assert isinstance(told.items[0], Changes)
    assert (told.items[0].revision, told.keys, told.items[0].is_summary) == (revision, ["a", "b", "c"], False)


def test_whoever_knows_nothing_is_first_told_of_everything(lab: Lab) -> None:
    told = Told()
    lab.store.put("a", b"1")
    lab.store.put("b", b"2")
    lab.store.put("a", b"3")
    lab.store.watch(Snapshot.of_nothing(""), told)
    told.wait_for(Changes)
    lab.store.put("c", b"4")
    told.wait_for(Changes, 2)
    assert told.state == {"a": b"3", "b": b"2", "c": b"4"}
    assert [(item.is_summary, len(item.changes)) for item in told.items if isinstance(item, Changes)] == [
        (True, 2),
        (False, 1),
    ]


def test_a_receiver_may_write(lab: Lab) -> None:
    told = Told()

    def deliver(item: object) -> None:
        told(item)  # type: ignore[arg-type]
        if len(told.changes) < 5:
            lab.store.put("key", b"%d" % len(told.changes))

    lab.store.watch(lab.store.read_prefix(""), deliver)
    lab.store.put("key", b"0")
    told.wait(lambda: len(told.changes) == 5)
    assert [change.entry.value for change in told.changes if change.entry is not None] == [b"0", b"1", b"2", b"3", b"4"]


def test_a_closed_watch_tells_nothing(lab: Lab) -> None:
    closed, running = Told(), Told()
    watch = lab.store.watch(lab.store.read_prefix(""), closed)
    lab.store.watch(lab.store.read_prefix(""), running)
    lab.store.put("a", b"")
    closed.wait_for(Changes)
    watch.close()
    watch.close()
    lab.store.put("b", b"")
    running.wait_for(Changes, 2)
    assert closed.keys == ["a"]


def test_a_server_that_stands_still_makes_blind_and_then_sight_returns(lab: Lab) -> None:
    told = Told()
    lab.store.put("a", b"")
    lab.store.watch(lab.store.read_prefix(""), told)
    lab.stop()
    blind = told.wait_for(Blind)
    assert isinstance(blind, Blind)
    assert blind.reason
    assert blind.silent_s >= 0
    with pytest.raises(StoreUnreachableError):
        lab.store.read("a", timeout_s=0.2)
    with pytest.raises(StoreError):
        lab.store.put("b", b"", timeout_s=0.2)
    lab.resume()
    told.wait_for(Sighted)
    lab.store.put("c", b"")
    told.wait(lambda: "c" in told.keys)
    assert [type(item) for item in told.items if not isinstance(item, Changes)] == [Blind, Sighted]


def test_what_was_missed_is_told_before_sight_returns(lab: Lab) -> None:
    told = Told()
    lab.store.watch(lab.store.read_prefix(""), told)
    lab.store.put("a", b"1")
    told.wait_for(Changes)
    lab.cut()
    told.wait_for(Blind)
    other = lab.new_store()
    for number in range(20):
        other.put(f"missed-{number}", b"")
    other.delete("a")
    with pytest.raises(StoreUnreachableError):
        lab.store.read("a", timeout_s=0.3)
    lab.mend()
    told.wait_for(Sighted)
    assert told.keys == ["a", *(f"missed-{number}" for number in range(20)), "a"]
    assert isinstance(told.items[-1], Sighted)
    assert not any(item.is_summary for item in told.items if isinstance(item, Changes))


def test_sight_returns_also_if_nothing_was_missed(lab: Lab) -> None:
    told = Told()
    lab.store.watch(lab.store.read_prefix("quiet/"), told)
    lab.cut()
    told.wait_for(Blind)
    lab.new_store().put("elsewhere", b"")
    lab.mend()
    told.wait_for(Sighted)
    assert len(told.items) == 2


def test_history_that_is_gone_is_summed_up(lab: Lab) -> None:
    told = Told()
    for key in ("kept", "changed", "deleted"):
        lab.store.put(key, b"1")
    lab.store.watch(Snapshot.of_nothing(""), told)
    told.wait_for(Changes)
    lab.cut()
    told.wait_for(Blind)
    other = lab.new_store()
    other.put("changed", b"2")
    other.put("changed", b"3")
    other.put("brief", b"")
    other.put("new", b"4")
    other.delete("brief")
    other.delete("deleted")
    other.put("changed", b"5")
    lab.compact(other.read("kept").revision)
    lab.mend()
    told.wait_for(Sighted)
    assert told.state == {"kept": b"1", "changed": b"5", "new": b"4"}
    summary = told.of(Changes)[-1]
    assert isinstance(summary, Changes)
    assert summary.is_summary
    assert [change.key for change in summary.changes] == ["new", "changed", "deleted"]
    lab.store.put("after", b"")
    told.wait(lambda: told.keys[-1] == "after")
    assert [type(item) for item in told.items] == [Changes, Blind, Changes, Sighted, Changes]


def test_a_watch_from_a_revision_that_is_gone_begins_with_a_summary(lab: Lab) -> None:
    told = Told()
    lab.store.put("a", b"1")
    snapshot = lab.store.read_prefix("")
    lab.store.delete("a")
    lab.store.put("b", b"2")
    lab.compact(lab.store.put("b", b"3"))
    lab.store.watch(snapshot, told)
    told.wait_for(Changes)
    assert [(change.key, change.entry is None) for change in told.changes] == [("b", False), ("a", True)]


def test_a_server_without_its_data_is_another_store(lab: Lab) -> None:
    told = Told()
    revision = lab.store.put("a", b"1")
    lab.store.watch(lab.store.read_prefix(""), told)
    lab.lose_data()
    replaced = told.wait_for(Replaced)
    assert isinstance(replaced, Replaced)
    assert "gone" in replaced.reason
    assert told.items[-1] is replaced
    for _again in range(2):
        with pytest.raises(StoreReplacedError):
            lab.store.put("a", b"2")
        with pytest.raises(StoreReplacedError):
            lab.store.read("a")
    fresh = lab.new_store()
    assert fresh.read("a").entry is None
    while fresh.put("a", b"") <= revision:  # also a revision that it could have had does not make it the same
        pass
    with pytest.raises(StoreReplacedError):
        lab.store.commit({"b": 0}, [Put("b", b"")])
    assert fresh.read("b").entry is None


def test_a_closed_store_is_of_no_use(lab: Lab) -> None:
    told = Told()
    with lab.new_store() as store:
        store.put("a", b"")
        store.watch(store.read_prefix(""), told)
    store.close()
    with pytest.raises(StoreClosedError, match="was closed"):
        store.read("a")
    with pytest.raises(StoreClosedError, match="was closed"):
        store.watch(Snapshot.of_nothing(""), told)
    lab.store.put("b", b"")
    assert told.items == []
