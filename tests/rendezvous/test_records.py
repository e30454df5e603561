"""What is too large for a key of etcd as JSON is written compressed, and read within the same bounds."""

from __future__ import annotations

import json
import uuid
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron_elastic.membership.rounds import JobMember, Place, Round
from unicron_elastic.rendezvous.job.presence import JobPresence
from unicron_elastic.rendezvous.records.job import JobKeys, parse_round, round_text
from unicron_elastic.rendezvous.store.address import StoreAddress
from unicron_elastic.rendezvous.store.etcd import EtcdStore
from unicron_elastic.rendezvous.store.interface import Entry
from unicron_elastic.rendezvous.store.records import large_text, object_in
from unicron_elastic.rendezvous.store.server import EmbeddedEtcd


def round_of(nodes: int) -> Round:
    """Return one whose agents name their processes, as on Linux."""

    def process(number: int) -> str:
        address = f"10.0.{number >> 8}.{number & 255}"
        return f"{uuid.uuid4()} pid:[4026531836],time:[4026531834] {address} 1000 {number} {number}"

    places = (Place(f"gpu-{each}/{uuid.uuid4().hex[:12]}", f"gpu-{each}", process(each)) for each in range(nodes))
    return Round(number=3, places=tuple(places))


def entry(value: bytes) -> Entry:
    return Entry(key="jobs/a/round", value=value, revision=1, created=1, lease_id=None)


@pytest.mark.parametrize("nodes", [1, 300, 12_500])
def test_a_round_is_read_as_it_was_written(nodes: int, shared_etcd: EmbeddedEtcd) -> None:
    found = round_of(nodes)
    store = EtcdStore(StoreAddress.parse(shared_etcd.endpoint), f"/test/{uuid.uuid4().hex}")
    store.put("round", round_text(found))
    held = store.read("round").entry
    store.close()
    assert held is not None
    assert parse_round(held) == found
    assert held.value.startswith(b"{") == (nodes <= 300)
    assert len(held.value) < 1024 * 1024


def test_a_large_round_that_a_version_of_before_has_written_is_read() -> None:
    found = round_of(2000)
    told = {"number": 3, "places": [[each.node_id, each.host] for each in found.places]}
    told["processes"] = [each.process for each in found.places]
    assert parse_round(entry(json.dumps(told).encode())) == found


def test_no_more_is_unpacked_than_is_read() -> None:
    bomb = zlib.compress(b"[" * 50_000_000)
    assert len(bomb) < 100_000
    with pytest.raises(ValueError, match="jobs/a/round holds more bytes, and at most 1000 are read"):
        object_in(entry(bomb), 1000)


@given(st.binary(max_size=200))
def test_what_only_looks_compressed_is_no_object(rest: bytes) -> None:
    with pytest.raises(ValueError, match="jobs/a/round holds"):
        object_in(entry(b"\x78" + rest), 1000)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=50_000), max_size=4))
def test_objects_come_back(told: dict[str, str]) -> None:
    assert object_in(entry(large_text(told)), 1 << 24) == told


def test_a_round_that_the_store_does_not_take_is_said(
    shared_etcd: EmbeddedEtcd, caplog: pytest.LogCaptureFixture
) -> None:
    address, namespace = StoreAddress.parse(shared_etcd.endpoint), f"/test/{uuid.uuid4().hex}"
    presence = JobPresence(lambda: EtcdStore(address, namespace), JobKeys("job"), lease_ttl_s=5.0)
    try:
        presence.join(JobMember(node_id="a/1", host="a"), timeout_s=30.0)
        assert not presence.propose(round_of(50_000), presence.view())
        assert not presence.propose(round_of(50_000), presence.view())
    finally:
        presence.leave()
    (said,) = (each.message for each in caplog.records if "cannot be written" in each.message)
    assert said.startswith("A round of 50000 nodes cannot be written: a commit has at most 1000000 bytes")
