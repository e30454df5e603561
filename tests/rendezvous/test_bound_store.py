"""A store listens where others are told that it is, and nowhere else if that can be."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import pytest
from torch.distributed import DistNetworkError, TCPStore

from unicron_elastic.rendezvous.job.bound_store import bound_store
from unicron_elastic.rendezvous.torch.local import LocalRendezvous

TIMEOUT = timedelta(seconds=10)


def _listens_on(port: int) -> list[str]:
    """The addresses on which this process listens at a port."""
    found = psutil.Process().net_connections("tcp")
    return [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "::1"])
def test_an_address_of_this_node_is_the_only_one(address: str) -> None:
    if ":" in address and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    store = bound_store(address, TIMEOUT)
    assert _listens_on(store.port) == [address]
    TCPStore(address, store.port, None, False, TIMEOUT, wait_for_workers=False).set("a", "b")
    assert store.get("a") == b"b"


@pytest.mark.parametrize("address", ["localhost", "192.0.2.1", "no.such.name.invalid", ""])
def test_what_is_a_name_or_elsewhere_is_listened_for_everywhere(address: str) -> None:
    store = bound_store(address, TIMEOUT)
    assert set(_listens_on(store.port)) & {"::", "0.0.0.0"}


def test_the_port_and_its_descriptor_go_with_the_store() -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = bound_store("127.0.0.1", TIMEOUT)
    port = store.port
    del store
    assert _listens_on(port) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_port_that_is_taken_is_torch_s_to_complain_of() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(DistNetworkError, match="listen"):
        bound_store("127.0.0.1", TIMEOUT, other.getsockname()[1])


def test_a_job_of_one_node_is_not_on_the_network() -> None:
    """As for plain ``unicron-run --nproc-per-node=N``, whose store is at 127.0.0.1."""
    rendezvous = LocalRendezvous(backend="static", run_id="job", host="127.0.0.1")
    info = rendezvous.next_rendezvous()
    assert _listens_on(info.bootstrap_store_info.master_port) == ["127.0.0.1"]
    rendezvous.shutdown()
