"""What the cluster keeps in the store: what is written is read, and what is odd is said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_lab import DEADLINE_S

from unicron_elastic.base.quarantine import TOO_LATE_UNIX_S, Quarantined
from unicron_elastic.base.text import one_line
from unicron_elastic.rendezvous.records.cluster import (
    LEADER,
    NODES,
    QUARANTINE,
    ROSTER,
    SPEC_MAX_BYTES,
    LeaderRecord,
    NodeRecord,
    RosterRecord,
    UnplannedJobSpec,
    leader_text,
    node_key,
    node_text,
    parse_leader,
    parse_node,
    parse_quarantined,
    parse_roster,
    parse_spec,
    quarantine_key,
    quarantine_text,
    roster_key,
    roster_text,
    spec_text,
)
from unicron_elastic.rendezvous.records.job import JobKeys
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import Entry
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd

NODE = NodeRecord(node_id="gpu-7/3f2a", host="gpu-7", job="job 1/2", label="rack7", pid=4711)
LEADING = LeaderRecord(node_id="gpu-7/3f2a", host="gpu-7", address="10.0.0.7:4321")
QUARANTINED = Quarantined(node="gpu-7", reason="It smells.", since=1.8e9, until=None, by="ada")
SPEC = UnplannedJobSpec(
    min_nodes=2,
    max_nodes=4,
    target_nodes=3,
    nproc_per_node=8,
    argv=("python", "-u", "train.py", "--name=ü \udc80"),
    cwd="/home/ada",
    env={"PATH": "/bin", "EMPTY": ""},
)
SPEC_KEY = JobKeys("job1").spec


def _entry(key: str, value: bytes) -> Entry:
    return Entry(key=key, value=value, revision=2, created=1, lease_id=None)


def _changed(text: bytes, **fields: Any) -> bytes:
    """A record's text with other fields; without those that are ``...``."""
    told = {**json.loads(text), **fields}
    return json.dumps({name: value for name, value in told.items() if value is not ...}).encode()


def test_all_is_read_from_etcd_as_it_was_written(shared_etcd: EmbeddedEtcd) -> None:
    spare = replace(NODE, node_id="gpu-8/ü", host="gpu-8", job="", is_spare=True)
    keys = JobKeys("job 1/2")
    with EtcdStore(StoreAddress.parse(shared_etcd.endpoint), "/cluster-records") as store:
        for record in (NODE, spare):
            store.put(node_key(record.node_id), node_text(record))
        store.put(LEADER, leader_text(LEADING))
        store.put(quarantine_key("gpu-7"), quarantine_text(QUARANTINED))
        store.put(keys.spec, spec_text(SPEC))
        assert [parse_node(entry) for entry in store.read_prefix(NODES).entries] == [NODE, spare]
        assert [parse_quarantined(entry) for entry in store.read_prefix(QUARANTINE).entries] == [QUARANTINED]
        leader, spec = store.read(LEADER).entry, store.read(keys.spec).entry
        assert leader is not None
        assert spec is not None
        assert (parse_leader(leader), parse_spec(spec)) == (LEADING, SPEC)


@given(st.text(max_size=40), st.text(max_size=40), st.integers(0, 2**31 - 1), st.booleans())
def test_whatever_a_node_is_called(node_id: str, text: str, pid: int, is_spare: bool) -> None:
    record = NodeRecord(node_id=node_id, host=text, job=text, label=text, pid=pid, is_spare=is_spare)
    assert parse_node(_entry(node_key(node_id), node_text(record))) == record


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40).map(one_line), st.floats(0.0, 1e10))
def test_whatever_a_host_is_called(host: str, node_id: str, reason: str, lost_unix_s: float) -> None:
    record = RosterRecord(host=host, node_id=node_id, reason=reason, lost_unix_s=lost_unix_s)
    assert parse_roster(_entry(roster_key(host), roster_text(record))) == record
    assert not node_key(node_id).startswith(ROSTER), "no agent has the key of a host"


def test_keys_hold_no_name_that_is_a_path() -> None:
    assert node_key("a/b c") == f"{NODES}a%2Fb%20c"
    assert quarantine_key("../x") == "cluster/quarantine/..%2Fx"
    assert (JobKeys("a/b").spec, JobKeys("a/b").cancelled) == ("jobs/a%2Fb/spec", "jobs/a%2Fb/cancelled")


def test_names_are_bounded() -> None:
    text = _changed(node_text(NODE), host="x" * 10_000, label="y" * 10_000)
    found = parse_node(_entry(node_key(NODE.node_id), text))
    assert (len(found.host), len(found.label)) == (200, 200)


ODD: list[tuple[Callable[[Entry], object], str, bytes, str]] = [
    (parse_node, node_key("gpu-7/3f2a"), b"\xff", "holds no JSON object"),
    (parse_node, node_key("gpu-7/3f2a"), b"[" * 10_000, "holds no JSON object"),
    (parse_node, node_key("gpu-7/3f2a"), b"[]", "holds no JSON object"),
    (parse_node, node_key("gpu-7/3f2a"), b" " * 100_000, "holds 100000 bytes, and at most 65536 are read"),
    (parse_node, node_key("other"), node_text(NODE), "holds no agent: node_id must be the one that the key names"),
    (
        parse_roster,
        roster_key("b"),
        roster_text(RosterRecord(host="a", node_id="a/1")),
        "host must be the one that the",
    ),
    (
        parse_roster,
        roster_key("a"),
        b'{"host": "a", "node_id": "a/1"}',
        "no host of the cluster: reason must be a text",
    ),
    (parse_leader, LEADER, b"{}", "holds no leader: node_id must be a text"),
    (parse_quarantined, quarantine_key("x"), quarantine_text(QUARANTINED), "node must be the one that the key names"),
    (
        parse_quarantined,
        quarantine_key("gpu-7"),
        _changed(quarantine_text(QUARANTINED), since=True),
        "holds no node in quarantine: since must be a number of unix seconds, not True",
    ),
    (parse_spec, SPEC_KEY, b" " * (8 * SPEC_MAX_BYTES + 1), "bytes, and at most"),
]


@pytest.mark.parametrize(("parse", "key", "value", "why"), ODD)
def test_what_is_odd_is_one_sentence_that_names_the_key(
    parse: Callable[[Entry], object], key: str, value: bytes, why: str
) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse(_entry(key, value))
    assert str(caught.value).startswith(f"{key} holds ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("host", 7, "host must be a text"),
        ("job", ..., "job must be a text"),
        ("pid", "7", "pid must be a whole number"),
        ("pid", True, "pid must be a whole number"),
        ("pid", 10**30, "pid must be a whole number"),
        ("is_spare", 1, "is_spare must be true or false"),
    ],
)
def test_fields_of_a_node_that_are_odd(field: str, value: object, why: str) -> None:
    with pytest.raises(ValueError, match=f"holds no agent: {why}"):
        parse_node(_entry(node_key(NODE.node_id), _changed(node_text(NODE), **{field: value})))


@pytest.mark.parametrize(
    "address", ["", "10.0.0.7", ":1", "10.0.0.7:0", "10.0.0.7:65536", "a:1x", "a:²", "a:" + "9" * 150]
)
def test_a_leader_has_an_address(address: str) -> None:
    with pytest.raises(ValueError, match="holds no leader: address must be IP:PORT, not "):
        parse_leader(_entry(LEADER, _changed(leader_text(LEADING), address=address)))


@pytest.mark.parametrize("since", [-1, TOO_LATE_UNIX_S, 1e12, 10**400, float("inf"), float("nan"), True, "1", None])
def test_a_leader_has_led_since_a_time_that_a_calendar_has(since: object) -> None:
    with pytest.raises(ValueError, match=r"holds no leader: since_unix_s must be unix seconds$"):
        parse_leader(_entry(LEADER, _changed(leader_text(LEADING), since_unix_s=since)))


def test_the_last_moment_that_is_taken_has_a_date_in_every_time_zone() -> None:
    last = TOO_LATE_UNIX_S - 1.0
    record = parse_leader(_entry(LEADER, _changed(leader_text(LEADING), since_unix_s=last)))
    assert record.since_unix_s == last
    for hours in (-23, 23):
        assert datetime.fromtimestamp(last, timezone(timedelta(hours=hours))).year == 9999


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("min_nodes", 0, "min_nodes must be 1 to 1000000, not 0"),
        ("target_nodes", 1, "target_nodes must be 2 to 4, which the job may have, not 1"),
        ("target_nodes", 5, "target_nodes must be 2 to 4, which the job may have, not 5"),
        ("max_nodes", "4", "max_nodes must be a whole number"),
        ("nproc_per_node", ..., "nproc_per_node must be a whole number"),
        ("argv", [], "argv is empty"),
        ("argv", "train.py", "argv must be a list of texts"),
        ("argv", ["train.py", 3], "argv must be a list of texts"),
        ("env", ["A=b"], "env must be an object of texts"),
        ("env", {"A": 1}, "env must be an object of texts"),
        ("cwd", None, "cwd must be a text"),
        ("cwd", "/a\0b", "must hold no NUL"),
    ],
)
def test_fields_of_a_spec_that_are_odd(field: str, value: object, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^jobs/job1/spec holds no job's spec: .*{why}"):
        parse_spec(_entry(SPEC_KEY, _changed(spec_text(SPEC), **{field: value})))


def test_a_spec_is_bounded_when_it_is_made_and_when_it_is_read() -> None:
    fits = replace(SPEC, argv=("x",), env={"A": "ü" * ((SPEC_MAX_BYTES - 2) // 2)})
    assert parse_spec(_entry(SPEC_KEY, spec_text(fits))) == fits
    with pytest.raises(ValueError, match="at most 262144 bytes together, not 262145"):
        replace(fits, argv=("xy",))
    too_much = _changed(spec_text(fits), argv=["xy"])
    with pytest.raises(ValueError, match="spec holds no job's spec: argv and env have at most 262144 bytes"):
        parse_spec(_entry(SPEC_KEY, too_much))


def test_the_environment_is_not_shown() -> None:
    assert "/bin" not in repr(SPEC)


def test_neither_torch_nor_grpc_is_imported() -> None:
    code = (
        "import sys, unicron_elastic.rendezvous.records.cluster; sys.exit(bool({'torch', 'grpc'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=DEADLINE_S).returncode == 0
