"""``unicron jobs``, ``nodes``, ``drain``, ``undrain`` and ``cancel`` against a real etcd."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unicron_elastic.base.quarantine import Quarantined
from unicron_elastic.launcher.cli import app
from unicron_elastic.launcher.config.answers import local_time
from unicron_elastic.launcher.view.cluster.members import (
    ClusterView,
    JobListing,
    job_status,
    jobs_table,
    nodes_table,
)
from unicron_elastic.membership.rounds import JobMember, JobView, Place, Round
from unicron_elastic.rendezvous.records.cluster import (
    LEADER,
    QUARANTINE,
    LeaderRecord,
    NodeRecord,
    RosterRecord,
    UnplannedJobSpec,
    leader_text,
    node_key,
    node_text,
    parse_quarantined,
    quarantine_key,
    quarantine_text,
    roster_key,
    roster_text,
    spec_text,
)
from unicron_elastic.rendezvous.records.job import JobKeys, member_text, round_text
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import Entry, Snapshot, Store
from unicron_elastic.rendezvous.store.options import OPTIONS
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

NAMED_BINARY = os.environ.get("UNICRON_TEST_ETCD")
DEADLINE_S = 30.0
SPEC = UnplannedJobSpec(
    min_nodes=2, max_nodes=4, target_nodes=3, nproc_per_node=8, argv=("train.py",), cwd="/", env={"TOKEN": "secret"}
)
SINCE = 1_800_000_000.0  # 2027-01-15 08:00 UTC


@pytest.fixture(scope="module")
def etcd() -> Iterator[EmbeddedEtcd]:
    """One server for all tests of this file."""
    with EmbeddedEtcd(binary=Path(NAMED_BINARY) if NAMED_BINARY else None) as server:
        yield server


@pytest.fixture(autouse=True)
def _operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is ada, the time of day is UTC, and nothing is said of etcd."""
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, "ada")
    for name in [name for name in os.environ if name.startswith(("UNICRON_ETCD_", "PET_RDZV_"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def store(etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store that the commands look at, empty at first."""
    monkeypatch.setenv("UNICRON_ETCD_ENDPOINT", etcd.endpoint)
    with EtcdStore(StoreAddress.parse(etcd.endpoint)) as opened:
        for entry in opened.read_prefix("").entries:
            opened.delete(entry.key)
        yield opened


def _unicron(*arguments: object) -> Any:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def _output(*arguments: object) -> str:
    """Of a command that finds nothing wrong."""
    result = _unicron(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return str(result.stdout)


def _node_id(host: str) -> str:
    return f"{host}/1234"


def _put_job(store: Store, run_id: str, training: str, waiting: str = "", spec: UnplannedJobSpec | None = SPEC) -> None:
    """A job whose hosts are letters: those that train in round 3, in the order of their ranks, and those that wait."""
    keys = JobKeys(run_id)
    if training:
        places = tuple(Place(_node_id(host), host) for host in training)
        store.put(keys.round, round_text(Round(number=3, places=places)))
    for host in training + waiting:
        member = JobMember(node_id=_node_id(host), host=host, waits_for=3 if host in training else 4)
        store.put(keys.member(member.node_id), member_text(member))
    if spec is not None:
        store.put(keys.spec, spec_text(spec))


def _put_node(store: Store, host: str, job: str, **fields: Any) -> NodeRecord:
    record = NodeRecord(node_id=_node_id(host), host=host, job=job, label="", pid=7, **fields)
    store.put(node_key(record.node_id), node_text(record))
    return record


# -- jobs --------------------------------------------------------------------------------------------------------------


def test_jobs_in_every_state(store: Store) -> None:
    _put_job(store, "b/10", "da", "c")
    _put_job(store, "b/9", "", "e")
    _put_job(store, "old", "", spec=None)
    store.put(JobKeys("old").closed, b"The job was closed\nby f.")
    _put_job(store, "unspecified", "g", spec=None)
    _put_job(store, "unwanted", "h")
    store.put(JobKeys("unwanted").cancelled, b"cancelled by eve: No GPUs left.")
    assert _output("jobs") == (
        "job          state      round  nodes\n"
        "b/9          waiting    -      0 of 3 (2:4)\n"
        "     1 node waits, and 2 are needed.\n"
        "     e waits\n"
        "b/10         training   3      2 of 3 (2:4)\n"
        "     d, a; c waits\n"
        "old          over       -      0\n"
        "     The job was closed by f.\n"
        "unspecified  training   3      1\n"
        "     g\n"
        "unwanted     cancelled  3      1 of 3 (2:4)\n"
        "     cancelled by eve: No GPUs left.\n"
        "     h\n"
    )
    told = json.loads(_output("jobs", "--json"))
    assert [each["job"] for each in told] == ["b/9", "b/10", "old", "unspecified", "unwanted"]
    assert told[1] == {
        "job": "b/10",
        "state": "training",
        "why": "",
        "round": 3,
        "training": 2,
        "target_nodes": 3,
        "min_nodes": 2,
        "max_nodes": 4,
        "nproc_per_node": 8,
        "hosts": ["d", "a"],
        "waiting_hosts": ["c"],
    }
    assert "secret" not in json.dumps(told)


def test_a_job_without_nodes_says_so(store: Store) -> None:
    store.put(JobKeys("left").lease, b"12")
    assert "left  waiting  -      0\n     No node of it is there.\n" in _output("jobs")
    store.put(JobKeys("left").cancelled, b"cancelled by ada")
    assert "left  cancelled  -      0\n     cancelled by ada\n" in _output("jobs")


def test_what_outlives_a_job_makes_none(store: Store) -> None:
    store.put(f"{JobKeys('gone').prefix}lost/x", b"why")
    assert _unicron("jobs").exit_code == 1


@pytest.mark.parametrize("what", ["job", "node"])
def test_nothing_is_said_and_json_stays_json(store: Store, etcd: EmbeddedEtcd, what: str) -> None:
    sentence = f"unicron: No {what} is in the cluster at {etcd.endpoint}.\n"
    assert store.read_prefix("").entries == ()
    result = _unicron(f"{what}s")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", sentence)
    result = _unicron(f"{what}s", "--json")
    assert (result.exit_code, json.loads(result.stdout), result.stderr) == (1, [], sentence)


def test_what_cannot_be_read_is_told_and_the_rest_is_shown(store: Store) -> None:
    _put_job(store, "job1", "a")
    store.put(JobKeys("job1").member("b"), b"junk")
    store.put(JobKeys("job1").spec, b"{}")
    store.put("jobs/a%2fb/round", b"1")
    store.put(f"{node_key('x')}", b"\x1b[2J")
    store.put(LEADER, b"[]")
    store.put(quarantine_key("y"), b"{}")
    for command in ("jobs", "nodes"):
        result = _unicron(command)
        assert result.exit_code == 0
        assert len(result.stdout.splitlines()) == (3 if command == "jobs" else 2)
        told = result.stderr.splitlines()
        assert len(told) == 6
        assert all(line.startswith("unicron: Skipped: ") and line.endswith(".") for line in told)
        for part in (
            "jobs/job1/members/b holds no JSON object",
            "jobs/job1/spec holds no job's spec",
            "jobs/a%2fb/round is no key of a job",
            f"{node_key('x')} holds no JSON object",
            f"{LEADER} holds no JSON object",
            f"{quarantine_key('y')} holds no node in quarantine: node is missing",
        ):
            assert part in result.stderr


def test_a_run_with_an_escape_in_its_name_does_not_reach_the_terminal(store: Store) -> None:
    _put_job(store, "job\x1b[2J\n", "a")
    assert "job [2J" in _output("jobs")


# -- nodes -------------------------------------------------------------------------------------------------------------


def test_nodes_of_every_kind(store: Store) -> None:
    _put_job(store, "job1", "ba", "c")
    for host in "abc":
        _put_node(store, host, "job1")
    _put_node(store, "d", "", is_spare=True)
    _put_job(store, "job2", "e")  # an agent without a record of its own, as plain torchrun has
    store.put(LEADER, leader_text(LeaderRecord(node_id=_node_id("b"), host="b", address="10.0.0.1:1")))
    for host, until in (("a", None), ("z", SINCE * 2), ("over", SINCE - 1e9)):
        entry = Quarantined(node=host, reason="It\nsmells", since=1000.0, until=until, by="ada")
        store.put(quarantine_key(host), quarantine_text(entry))
    lines = _output("nodes").splitlines()
    until_z = f"{local_time(SINCE * 2):%Y-%m-%d %H:%M}"
    assert lines == [
        "host  job   rank   role",
        "a     job1  1      in quarantine",
        "     until it is lifted, by ada: It smells",
        "b     job1  0      coordinator",
        "c     job1  waits",
        "d     -     spare",
        "e     job2  0",
        "z     -     -      in quarantine",
        f"     until {until_z}, by ada: It smells",
    ]
    told = {each["host"]: each for each in json.loads(_output("nodes", "--json"))}
    assert told.keys() == set("abcdez")
    assert [told[host]["state"] for host in "abcdez"] == ["training", "training", "waiting", "spare", "training", None]
    assert (told["b"]["rank"], told["b"]["is_coordinator"], told["b"]["pid"]) == (0, True, 7)
    assert told["a"]["quarantine"]["reason"] == "It\nsmells"
    assert told["z"]["node_id"] is None


def test_a_coordinator_without_a_node_is_shown(store: Store) -> None:
    store.put(LEADER, leader_text(LeaderRecord(node_id="c/1", host="control", address="10.0.0.1:1")))
    assert _output("nodes") == "host     job  rank  role\ncontrol  -    -     coordinator\n"


def test_a_node_that_is_lost_is_listed_until_it_is_forgotten(store: Store) -> None:
    for host in "abc":
        store.put(roster_key(host), roster_text(RosterRecord(host=host, node_id=_node_id(host))))
    _put_node(store, "a", "", is_spare=True)
    told = RosterRecord(host="b", node_id=_node_id("b"), reason="b is lost: its process has ended.", lost_unix_s=SINCE)
    store.put(roster_key("b"), roster_text(told))
    since = f"{local_time(SINCE):%Y-%m-%d %H:%M:%S}"
    assert _output("nodes").splitlines() == [
        "host  job  rank   role",
        "a     -    spare",
        "b     -    lost",
        f"     b is lost: its process has ended, since {since}. If it is not to return: unicron nodes forget b",
        "c     -    lost",
        "     c is lost: nobody was there to see why. If it is not to return: unicron nodes forget c",
    ]
    found = {each["host"]: each for each in json.loads(_output("nodes", "--json"))}
    assert [found[host]["state"] for host in "abc"] == ["spare", "lost", "lost"]
    assert (found["b"]["lost_since"], found["b"]["lost_why"]) == (SINCE, told.reason)
    assert (found["c"]["lost_since"], found["c"]["node_id"]) == (None, None)

    assert _output("nodes", "forget", "b") == "node b is forgotten.\n"
    assert [each["host"] for each in json.loads(_output("nodes", "--json"))] == ["a", "c"]
    result = _unicron("nodes", "--endpoint", os.environ["UNICRON_ETCD_ENDPOINT"], "forget", "b", "a", "c", "c")
    assert (result.exit_code, result.stdout) == (1, "node c is forgotten.\n")
    where = str(StoreAddress.parse(os.environ["UNICRON_ETCD_ENDPOINT"]))
    assert result.stderr.split()[1:] == (
        f"The cluster at {where} misses no node b. Node a is there; stop its agent, and it is missed no more.".split()
    )
    assert [each["host"] for each in json.loads(_output("nodes", "--json"))] == ["a"]


def test_a_record_of_a_host_that_nobody_can_read_can_be_forgotten(store: Store) -> None:
    store.put(roster_key("a"), b"{}")
    assert "Skipped: nodes/roster/a holds no host of the cluster" in _unicron("nodes").stderr
    assert json.loads(_output("nodes", "forget", "--json", "a")) == [{"node": "a", "was_forgotten": True}]
    assert "No node is in the cluster" in _unicron("nodes").stderr


def test_forgetting_needs_names_of_nodes() -> None:
    assert _unicron("nodes", "forget").exit_code == 2
    result = _unicron("nodes", "forget", "a b")
    assert (result.exit_code, result.stderr.partition(";")[0]) == (2, "unicron: 'a b' names no node")


# -- as text -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    name = "node-17.rack-3.north.example.org"
    hosts = [f"{name}-{number}" for number in range(100)]
    members = tuple(JobMember(node_id=host, host=host, waits_for=1) for host in hosts)
    found = Round(number=1, places=tuple(Place(host, host) for host in hosts))
    job = JobListing(run_id="a-long-name-of-a-job" * 3, view=JobView(members=members, round=found), spec=SPEC)
    quarantined = Quarantined(node=hosts[0], reason="It smells. " * 20, since=SINCE, until=None, by="ada")
    leader = LeaderRecord(node_id=hosts[0], host=hosts[0], address="a:1")
    view = ClusterView(agents=(), leader=leader, quarantine=(quarantined,), jobs=(job,), odd=())
    jobs, nodes = jobs_table(view.jobs, width), nodes_table(view.nodes(SINCE), local_time, width)
    assert max(map(len, [*jobs.splitlines(), *nodes.splitlines()])) <= width
    assert "and 84 more" in " ".join(jobs.split())
    if width >= 60:
        assert "training  1      100 of 3 (2:4)" in jobs
        assert "coordinator, in quarantine" in nodes
    assert len(jobs_table(view.jobs, None).splitlines()) == 3
    assert hosts[99] in jobs_table(view.jobs, None)


def test_agents_of_one_host_are_counted() -> None:
    members = tuple(JobMember(node_id=f"a/{number}", host="a") for number in range(3))
    job = JobListing(run_id="x", view=JobView(members=members))
    assert jobs_table([job], 60).splitlines()[-1] == "     a (3) wait"


def test_a_job_of_nothing_but_strange_keys_is_none() -> None:
    entry = Entry(key="jobs/x/what", value=b"1", revision=1, created=1, lease_id=None)
    assert job_status("x", Snapshot(prefix="jobs/x/", revision=1, entries=(entry,)), []) is None


# -- drain and undrain -------------------------------------------------------------------------------------------------


def _quarantined(store: Store, host: str) -> Quarantined | None:
    entry = store.read(quarantine_key(host)).entry
    assert entry is None or entry.lease_id is None
    return None if entry is None else parse_quarantined(entry)


def test_a_node_is_drained_and_comes_back(store: Store) -> None:
    _put_job(store, "job1", "ab")
    _put_node(store, "a", "job1")
    before = time.time()
    told = _output("drain", "a", "--reason", "Its fan is loud.\nVery.", "--for", "6h")
    assert told.startswith("node a is in quarantine since ")
    assert told.endswith(". It runs job1, and is asked to leave as soon as its job can do without it.\n")
    assert told.count("\n") == 1
    entry = _quarantined(store, "a")
    assert entry is not None
    assert entry.until is not None
    assert (entry.node, entry.reason, entry.by) == ("a", "Its fan is loud. Very.", "ada")
    assert before <= entry.since <= time.time()
    assert entry.until - entry.since == pytest.approx(6 * 3600)
    assert "in quarantine" in _output("nodes")
    assert _output("undrain", "a") == "node a is no longer in quarantine.\n"
    assert _quarantined(store, "a") is None
    assert "in quarantine" not in _output("nodes")


def test_a_node_that_is_drained_already_stays_for_the_longer_time(store: Store) -> None:
    _put_node(store, "a", "")
    assert _output("drain", "a", "--reason", "first").endswith("; it stays there until it is lifted by hand.\n")
    first = _quarantined(store, "a")
    assert first is not None
    told = json.loads(_output("drain", "a", "--reason", "second", "--for", "1h", "--json"))
    assert told == replace(first, reason="second").to_json()
    assert _quarantined(store, "a") == replace(first, reason="second")


def test_a_node_that_the_cluster_does_not_know_is_not_drained(store: Store, etcd: EmbeddedEtcd) -> None:
    told = f"in the cluster at {etcd.endpoint}; "
    absent = " What has not come yet is kept out with --absent.\n"
    result = _unicron("drain", "gpu-71", "--reason", "x")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"unicron: No node gpu-71 is {told}it has no nodes.{absent}"
    _put_job(store, "job1", "c")
    for number in (7, 8, 9):
        _put_node(store, f"gpu-{number}", "")
    result = _unicron("drain", "gpu-71", "--reason", "x", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, None)
    assert result.stderr == f"unicron: No node gpu-71 is {told}its nodes are gpu-[7-9], c.{absent}"
    result = _unicron("drain", "gpu-71", "gpu-7", "gpu-72", "gpu-71", "--reason", "x")
    assert (result.exit_code, result.stdout.partition(" since ")[0]) == (1, "node gpu-7 is in quarantine")
    assert result.stderr == f"unicron: Nodes gpu-71, gpu-72 are not {told}its nodes are gpu-[7-9], c.{absent}"
    assert [each.key for each in store.read_prefix(QUARANTINE).entries] == [quarantine_key("gpu-7")]


def test_a_node_that_is_to_come_later_is_kept_out_if_that_is_meant(store: Store) -> None:
    for words in (["--absent"], []):  # it is known then
        result = _unicron("drain", "later", "--reason", "x", *words)
        assert result.exit_code == 0
        assert result.stdout.startswith("node later is in quarantine since ")
        assert result.stderr == (
            "unicron: No agent of node later is in the cluster now; the node is kept out when it comes.\n"
        )
    assert _quarantined(store, "later") is not None


def test_several_nodes_are_drained_and_come_back(store: Store) -> None:
    _put_job(store, "job1", "a", "b")
    told = _output("drain", "a", "b", "a", "--reason", "x").splitlines()
    assert [line.partition("hand. ")[2] for line in told] == [
        "It runs job1, and is asked to leave as soon as its job can do without it.",
        "It waits for job1, and is asked to leave as soon as its job can do without it.",
    ]
    assert [each["node"] for each in json.loads(_output("drain", "a", "b", "--reason", "x", "--json"))] == ["a", "b"]
    assert _output("undrain", "a", "b") == "node a is no longer in quarantine.\nnode b is no longer in quarantine.\n"
    _output("drain", "a", "--reason", "x")
    result = _unicron("undrain", "a", "b", "c", "--json")
    assert json.loads(result.stdout) == [
        {"node": "a", "was_in_quarantine": True},
        {"node": "b", "was_in_quarantine": False},
        {"node": "c", "was_in_quarantine": False},
    ]
    assert (result.exit_code, result.stderr.partition(" of ")[0]) == (
        1,
        "unicron: Nodes b, c are not in the quarantine",
    )


def test_an_entry_that_cannot_be_read_is_replaced_and_lifted(store: Store) -> None:
    for arguments in (["drain", "a", "--reason", "x", "--absent"], ["undrain", "a"]):
        store.put(quarantine_key("a"), b"junk")
        assert _unicron(*arguments).exit_code == 0
    assert store.read(quarantine_key("a")).entry is None


def test_two_operators_at_the_same_moment_both_count(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_node(store, "a", "")
    other = Quarantined(node="a", reason="other", since=1000.0, until=None, by="eve")
    commit = EtcdStore.commit

    def interrupted(self: EtcdStore, *arguments: Any, **named: Any) -> int | None:
        if self is not store and store.read(quarantine_key("a")).entry is None:
            store.put(quarantine_key("a"), quarantine_text(other))
        return commit(self, *arguments, **named)

    monkeypatch.setattr(EtcdStore, "commit", interrupted)
    _output("drain", "a", "--reason", "mine", "--for", "1h")
    assert _quarantined(store, "a") == replace(other, reason="mine", by="ada")


def test_a_node_that_is_not_drained_cannot_be_undrained(store: Store, etcd: EmbeddedEtcd) -> None:
    sentence = f"unicron: Node a is not in the quarantine of the cluster at {etcd.endpoint}.\n"
    assert store.read(quarantine_key("a")).entry is None
    result = _unicron("undrain", "a")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", sentence)
    result = _unicron("undrain", "a", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (1, {"node": "a", "was_in_quarantine": False})


# -- cancel ------------------------------------------------------------------------------------------------------------


def test_a_job_is_cancelled(store: Store) -> None:
    _put_job(store, "job 1", "ab", "c")
    assert _output("cancel", "job 1", "--reason", "Wrong data.") == (
        "job job 1 is cancelled by ada: Wrong data; 3 nodes stop.\n"
    )
    entry = store.read(JobKeys("job 1").cancelled).entry
    assert entry is not None
    assert entry.value == b"cancelled by ada: Wrong data."
    assert entry.lease_id is not None
    left_s = store.keep_alive(entry.lease_id)
    assert left_s == 600.0
    assert "cancelled" in _output("jobs")
    told = json.loads(_output("cancel", "job 1", "--json"))
    assert told == {"job": "job 1", "reason": "cancelled by ada", "nodes": 3}


def test_the_word_that_a_job_is_cancelled_outlives_its_other_keys(store: Store) -> None:
    keys, lease = JobKeys("job1"), store.grant(670.0)
    _put_job(store, "job1", "ab")
    store.put(keys.lease, str(lease.lease_id).encode(), lease.lease_id)
    _output("cancel", "job1")
    entry = store.read(keys.cancelled).entry
    assert entry is not None
    assert entry.lease_id is not None
    assert (store.keep_alive(entry.lease_id) or 0.0) > 670.0


def test_a_job_that_is_unknown_or_over_cannot_be_cancelled(store: Store, etcd: EmbeddedEtcd) -> None:
    _put_job(store, "other", "a")
    result = _unicron("cancel", "job1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"unicron: No job 'job1' is in the cluster at {etcd.endpoint}.\n"
    store.put(JobKeys("job1").closed, b"The job was closed by a.")
    result = _unicron("cancel", "job1", "--reason", "x")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "unicron: The job 'job1' is over: The job was closed by a.\n"
    store.delete(JobKeys("job1").closed)
    store.put(JobKeys("job1").cancelled, b"cancelled by eve")  # and all its nodes are gone
    result = _unicron("cancel", "job1")
    assert (result.exit_code, result.stderr) == (1, "unicron: The job 'job1' is over: cancelled by eve.\n")


def test_a_job_that_ends_at_that_moment_is_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_job(store, "job1", "a")
    commit = EtcdStore.commit

    def late(self: EtcdStore, guards: Any, *arguments: Any, **named: Any) -> int | None:
        if guards:
            store.put(JobKeys("job1").closed, b"done")
        return commit(self, guards, *arguments, **named)

    monkeypatch.setattr(EtcdStore, "commit", late)
    result = _unicron("cancel", "job1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "unicron: The job 'job1' is over: it ended at this moment.\n"
    assert store.read(JobKeys("job1").cancelled).entry is None


# -- what goes wrong ---------------------------------------------------------------------------------------------------

COMMANDS = [["jobs"], ["nodes"], ["drain", "a", "--reason", "x"], ["undrain", "a"], ["cancel", "a"]]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_an_etcd_that_is_not_there_is_one_sentence(arguments: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        result = _unicron(*arguments, "--endpoint", where)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"unicron: etcd at http://{where} refuses connections: no server runs there.\n"


def test_an_etcd_that_is_silent_is_one_sentence_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        result = _unicron("jobs", "--endpoint", where)
        took_s = time.monotonic() - began
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"unicron: etcd at http://{where} did not answer within 4.0 s.\n"
    assert took_s < 6.0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["jobs", "--endpoint", "ftp://a"],
            "'ftp://a' is no etcd endpoint; give http://HOST:PORT or https://HOST:PORT, such as http://10.0.0.1:2379.",
        ),
        (
            ["nodes", "--etcd-user", "ada"],
            (
                "--etcd-user names a user without a password; give --etcd-password-file, or set "
                "UNICRON_ETCD_PASSWORD_FILE or UNICRON_ETCD_PASSWORD."
            ),
        ),
        (["jobs", "--etcd-ca", ""], "--etcd-ca is empty; give a value, or leave the option out."),
        (["undrain", "a b"], "'a b' names no node; give a name without blanks, such as gpu-7."),
        (
            ["drain", "a" * 600, "--reason", "x"],
            f"'{'a' * 80}' names no node; give a name without blanks, such as gpu-7.",
        ),
        (["drain", "a", "--reason", " \n"], "--reason is empty; say why, for whoever reads it."),
        (
            ["drain", "a", "--reason", "x", "--for", "1w"],
            "--for: '1w' is not valid; give a number and a unit such as 30s, 15m, 6h or 2d.",
        ),
        (["cancel", "x" * 600], f"'{'x' * 80}' names no job; give an id such as unicron jobs shows."),
        (["cancel", "a", "--reason", ""], "--reason is empty; say why, for whoever reads it."),
    ],
)
def test_bad_usage_is_one_sentence_and_changes_nothing(store: Store, arguments: list[str], sentence: str) -> None:
    _put_job(store, "a", "a")
    before = store.read_prefix("")
    result = _unicron(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"unicron: {sentence}\n")
    assert store.read_prefix("") == before


@pytest.mark.parametrize("arguments", COMMANDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_command_takes_every_option_of_etcd(arguments: list[str], option: str) -> None:
    name = f"--{option.replace('_', '-')}"
    result = _unicron(*arguments, name, " ")
    assert result.exit_code == 2
    assert result.stderr == f"unicron: {name} is empty; give a value, or leave the option out.\n"


def test_a_drain_needs_a_reason() -> None:
    result = _unicron("drain", "a")
    assert result.exit_code == 2
    assert "Missing option '--reason'" in result.stderr


def test_the_endpoint_that_is_given_wins(store: Store, etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch) -> None:
    _put_job(store, "job1", "a")
    monkeypatch.delenv("UNICRON_ETCD_ENDPOINT")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", f"127.0.0.1:{etcd.port}")
    assert "job1" in _output("jobs")
    monkeypatch.setenv("UNICRON_ETCD_ENDPOINT", "127.0.0.1:1")
    assert "job1" in _output("jobs", "--endpoint", f"127.0.0.1:{etcd.port}")
    assert _unicron("jobs").exit_code == 2


def test_a_user_without_a_name_is_known_by_number(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", nameless)
    _put_node(store, "a", "")
    _output("drain", "a", "--reason", "x")
    entry = _quarantined(store, "a")
    assert entry is not None
    assert entry.by == f"uid {os.getuid()}"


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@pytest.mark.parametrize("arguments", COMMANDS)
def test_without_the_extra_there_is_one_sentence(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.modules['pyetcd'] = None; sys.argv = ['unicron', *{arguments}];"
        "from unicron_elastic.launcher.cli import app; app()"
    )
    done = _python(code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "unicron: the Python module pyetcd is missing; install it, in the checkout of unicron-elastic: "
        "pip install -e '.[cluster]'.\n"
    )


def test_torch_is_not_imported_and_grpc_only_when_it_is_used() -> None:
    done = _python("import sys, unicron_elastic.launcher.cli; print(*{'torch', 'grpc', 'pyetcd'} & set(sys.modules))")
    assert (done.returncode, done.stdout) == (0, "\n")
